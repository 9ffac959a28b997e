"""What runs the book and holds it to what was recorded: a plugin of pytest."""
