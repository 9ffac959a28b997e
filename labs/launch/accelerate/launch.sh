#!/bin/bash
# Accelerate's launcher: torchrun with its options in a file.
exec accelerate launch --config_file accelerate/two_ranks.yaml train.py "$@"
