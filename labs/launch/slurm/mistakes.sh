#!/bin/bash
# Submits job scripts with a mistake to a real Slurm: python slurm/rehearse.py --gpus 2 …
set -u
cat >task.sh <<'END'
echo "task $SLURM_PROCID on node $SLURM_NODEID: GPUs ${CUDA_VISIBLE_DEVICES-none}"
END
# --8<-- [start:traps]
cat >late.sh <<'END'
#!/bin/bash
trap '[ $SECONDS -lt 5 ] && echo "saved in time" || echo "too late: the step is over"' USR1
echo "begins" >>started
srun sleep 5
END
cat >in_time.sh <<'END'
#!/bin/bash
trap '[ $SECONDS -lt 5 ] && echo "saved in time" || echo "too late: the step is over"' USR1
echo "begins" >>started
srun sleep 5 &
wait # a signal ends this wait at once, and the trap runs
wait # until the step has ended
END
# --8<-- [end:traps]

submit() {  # a title, then options of sbatch; srun starts task.sh, and the output is sorted
    echo "$1"; shift
    sbatch --wait --quiet --output=out "$@" --wrap 'srun --quiet bash task.sh | sort' 2>&1 |
        sed 's/^/  /'
    [ -e out ] && sed 's/^/  /' out; rm -f out
}
send_usr1() {  # submits a job script, and sends SIGUSR1 to its batch shell
    echo "$2"; rm -f started out
    job=$(sbatch --parsable --output=out "$1")
    until [ -s started ]; do sleep 0.1; done; sleep 0.5
    scancel --signal=USR1 --batch "$job"
    until scontrol show job "$job" | grep -Eq 'JobState=(COMP|FAIL|CANC)'; do sleep 0.3; done
    sed 's/^/  /' out
}

# --8<-- [start:cases]
submit "correct: one task per node, with all its GPUs" --nodes=2 --ntasks-per-node=1 --gres=gpu:2
submit "--ntasks-per-node=2: torchrun would start twice on each node" --nodes=2 \
    --ntasks-per-node=2 --gres=gpu:2
submit "without --gres" --nodes=2 --ntasks-per-node=1
submit "more GPUs than a node has" --nodes=2 --gres=gpu:8
submit "a type of resource that is not configured" --nodes=2 --gres=accelerator:2
echo "SLURM_NODEID in double quotes: the batch shell replaces it"
sbatch --wait --quiet --output=out --nodes=2 --ntasks-per-node=1 \
    --wrap 'srun bash -c "echo torchrun --node-rank=$SLURM_NODEID"'; sed 's/^/  /' out
echo "SLURM_NODEID in single quotes: each task replaces it"
sbatch --wait --quiet --output=out --nodes=2 --ntasks-per-node=1 \
    --wrap "srun bash -c 'echo torchrun --node-rank=\$SLURM_NODEID' | sort"; sed 's/^/  /' out
# --8<-- [end:cases]
send_usr1 late.sh "a trap in the batch shell, with srun in the foreground"
send_usr1 in_time.sh "a trap in the batch shell, with srun in the background"
rm -f out started task.sh late.sh in_time.sh
