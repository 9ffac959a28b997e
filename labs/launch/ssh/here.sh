#!/bin/bash
# Replaces ssh in a test: `bash ssh/here.sh HOST COMMAND` runs COMMAND on this machine.
exec bash -c "$2"
