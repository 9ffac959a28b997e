"""Runs commands and ends their processes. The tests and the graders use this layer."""
