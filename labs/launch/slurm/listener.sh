#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=/dev/null
#SBATCH --open-mode=append
# A job that only listens: its batch shell, a task on each node, and what each task has started
# in a session of its own, as torchrun starts its ranks. HEARD is the file that they write to.
cat >"$HEARD.listen" <<'END'
trap 'echo "$1" >>"$HEARD"; leave=1' USR1 TERM
echo "$1" >>"$HEARD.ready"
for _ in {1..80}; do sleep 0.1; [ "${leave:-}" ] && break; done
END
srun --quiet bash -c 'setsid bash "$HEARD.listen" ranks & bash "$HEARD.listen" tasks; wait' &
. "$HEARD.listen" "batch shell"  # in this very process: B: reaches no other
wait
