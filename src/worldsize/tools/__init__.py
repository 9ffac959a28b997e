"""Command-line tools around the book: GPU recording, newer packages, comparisons."""
