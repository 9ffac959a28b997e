"""Run commands and end their processes. The tests and the graders use this layer."""
