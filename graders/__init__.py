"""What check.py knows: a runner shared by all, and one module for each lab and each part of the
assessment, which says what every step must do and which hint answers to which mistake."""
