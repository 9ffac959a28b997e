#!/bin/bash
# Stands in for ssh: `bash ssh/here.sh HOST COMMAND` runs the command on this machine.
exec bash -c "$2"
