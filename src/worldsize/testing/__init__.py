"""The pytest plugin that runs the book and compares its outputs with the recorded ones."""
