"""Command-line tools: GPU recording, upgrade check, comparisons of sites and outputs."""
