#!/bin/bash
# Runs accelerate's launcher, which reads the options of torchrun from a file.
exec accelerate launch --config_file accelerate/two_ranks.yaml train.py "$@"
