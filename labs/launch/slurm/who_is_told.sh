#!/bin/bash
# Whom Slurm signals: what --signal sends before the end of a job, sent now by scancel.
set -u
tell() {  # the option of sbatch, and scancel's words for the same
    export HEARD=$PWD/heard; rm -f "$HEARD"*; touch "$HEARD.ready"
    job=$(sbatch --parsable slurm/listener.sh)
    until [ "$(wc -l <"$HEARD.ready")" = 5 ]; do sleep 0.1; done
    scancel ${2:?} "$job"
    until scontrol show job "$job" | grep -Eq 'JobState=(COMP|FAIL|CANC)'; do sleep 0.2; done
    echo "$1: $(sort -u "$HEARD" | paste -sd, | sed 's/,/, /g')"
    rm -f "$HEARD"*
}
tell "--signal=USR1@60  " "--signal=USR1"
tell "--signal=B:USR1@60" "--signal=USR1 --batch"
tell "scancel --full    " "--signal=USR1 --full"
tell "--signal=TERM@60  " "--signal=TERM"
