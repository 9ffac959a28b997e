#!/bin/bash
# Submit the job, tell it that its time is up once it has saved something, and see it through.
set -eu
job=$(sbatch --parsable "$@")
folder=${CHECKPOINTS:-checkpoints}
until compgen -G "$folder/step*.pt" >/dev/null; do sleep 0.2; done
scancel --signal=TERM "$job"
until scontrol show job "$job" | grep -Eq 'JobState=(COMPLETED|FAILED|CANCELLED)'; do sleep 0.5; done
scontrol show job "$job" | grep -o 'JobState=[A-Z]*\|Restarts=[0-9]*\|ExitCode=[0-9:]*'
