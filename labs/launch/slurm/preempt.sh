#!/bin/bash
# Submit a job, send it SIGTERM after its first checkpoint, and wait until it has ended.
set -eu
job=$(sbatch --parsable "$@")
folder=${CHECKPOINTS:-checkpoints}
until compgen -G "$folder/step*.pt" >/dev/null; do sleep 0.2; done
scancel --signal=TERM "$job"
until scontrol show job "$job" | grep -Eq 'JobState=(COMPLETED|FAILED|CANCELLED)'; do sleep 0.5; done
scontrol show job "$job" | grep -o 'JobState=[A-Z]*\|Restarts=[0-9]*\|ExitCode=[0-9:]*'
