"""What check.py knows: a runner shared by all labs, and one module of steps for each lab."""
