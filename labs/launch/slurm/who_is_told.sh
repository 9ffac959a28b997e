#!/bin/bash
# Which processes get the signal of --signal? scancel sends the same signal at once.
set -u
export RECEIVED=$PWD/received
cat >listen.sh <<'END'
trap 'echo "$1" >>"$RECEIVED"; leave=1' USR1 TERM
echo "$1" >>"$RECEIVED.ready"
until [ "${leave:-}" ] || [ -e "$RECEIVED.over" ]; do sleep 0.1; done
END
cat >job.sh <<'END'
#!/bin/bash
# one task per node, and a process that the task starts in a new session, as torchrun does
srun --quiet bash -c 'setsid bash listen.sh ranks & bash listen.sh tasks; wait' &
. ./listen.sh "batch shell"  # in the process of the batch shell
wait
END

report() { # an option of sbatch, and the options of scancel with the same effect
    rm -f "$RECEIVED"*; touch "$RECEIVED.ready"
    job=$(sbatch --parsable --nodes=2 --ntasks-per-node=1 --output=/dev/null job.sh)
    until [ "$(wc -l <"$RECEIVED.ready")" = 5 ]; do sleep 0.1; done
    scancel $2 "$job"
    sleep 2; touch "$RECEIVED.over"  # a signal that has not arrived by now was not sent
    until scontrol show job "$job" | grep -Eq 'JobState=(COMP|FAIL|CANC)'; do sleep 0.2; done
    echo "$1: $(sort -u "$RECEIVED" | paste -sd, | sed 's/,/, /g')"
}
report "--signal=TERM@60  " "--signal=TERM"
report "--signal=USR1@60  " "--signal=USR1"
report "--signal=B:USR1@60" "--signal=USR1 --batch"
report "scancel --full    " "--signal=USR1 --full"
rm -f "$RECEIVED"* listen.sh job.sh
