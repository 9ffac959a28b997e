#!/bin/bash
# Whom Slurm signals: what --signal sends before the end of a job, sent now by scancel.
set -u
export HEARD=$PWD/heard
cat >listen.sh <<'END'
trap 'echo "$1" >>"$HEARD"; leave=1' USR1 TERM
echo "$1" >>"$HEARD.ready"
until [ "${leave:-}" ] || [ -e "$HEARD.over" ]; do sleep 0.1; done
END
cat >job.sh <<'END'
#!/bin/bash
# a task on each node, and what it starts in a session of its own, as torchrun starts its ranks
srun --quiet bash -c 'setsid bash listen.sh ranks & bash listen.sh tasks; wait' &
. ./listen.sh "batch shell"  # in this very process
wait
END

tell() { # an option of sbatch, and scancel's words for the same
    rm -f "$HEARD"*; touch "$HEARD.ready"
    job=$(sbatch --parsable --nodes=2 --ntasks-per-node=1 --output=/dev/null job.sh)
    until [ "$(wc -l <"$HEARD.ready")" = 5 ]; do sleep 0.1; done
    scancel $2 "$job"
    sleep 2; touch "$HEARD.over"  # who has not heard it by now is not told
    until scontrol show job "$job" | grep -Eq 'JobState=(COMP|FAIL|CANC)'; do sleep 0.2; done
    echo "$1: $(sort -u "$HEARD" | paste -sd, | sed 's/,/, /g')"
}
tell "--signal=TERM@60  " "--signal=TERM"
tell "--signal=USR1@60  " "--signal=USR1"
tell "--signal=B:USR1@60" "--signal=USR1 --batch"
tell "scancel --full    " "--signal=USR1 --full"
rm -f "$HEARD"* listen.sh job.sh
