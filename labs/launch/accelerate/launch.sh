#!/bin/bash
# Accelerate's launcher: torchrun, configured by a file and a plugin's worth of variables.
exec accelerate launch --config_file accelerate/two_ranks.yaml train.py "$@"
