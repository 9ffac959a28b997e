#!/bin/bash
# Mistakes in a job script, each submitted to a real Slurm: python slurm/rehearse.py --gpus 2 …
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
wait # a signal ends this one at once
wait # until the step is over
END
# --8<-- [end:traps]

submit() {  # a title, then sbatch's options: srun starts task.sh, sorted
    echo "$1"; shift
    sbatch --wait --quiet --output=out "$@" --wrap 'srun --quiet bash task.sh | sort' 2>&1 |
        sed 's/^/  /'
    [ -e out ] && sed 's/^/  /' out; rm -f out
}
signalled() {  # a job script whose batch shell is sent USR1 as soon as it runs
    echo "$2"; rm -f started out
    job=$(sbatch --parsable --output=out "$1")
    until [ -s started ]; do sleep 0.1; done; sleep 0.5
    scancel --signal=USR1 --batch "$job"
    until scontrol show job "$job" | grep -Eq 'JobState=(COMP|FAIL|CANC)'; do sleep 0.3; done
    sed 's/^/  /' out
}

# --8<-- [start:cases]
submit "right: a task on each node, with its GPUs" --nodes=2 --ntasks-per-node=1 --gres=gpu:2
submit "a task for each GPU: torchrun would start twice on a node" --nodes=2 \
    --ntasks-per-node=2 --gres=gpu:2
submit "--gres forgotten" --nodes=2 --ntasks-per-node=1
submit "more than a node has" --nodes=2 --gres=gpu:8
submit "a kind of resource that nobody configured" --nodes=2 --gres=accelerator:2
echo "SLURM_NODEID read too early: by the batch shell, in double quotes"
sbatch --wait --quiet --output=out --nodes=2 --ntasks-per-node=1 \
    --wrap 'srun bash -c "echo torchrun --node-rank=$SLURM_NODEID"'; sed 's/^/  /' out
echo "the same in single quotes"
sbatch --wait --quiet --output=out --nodes=2 --ntasks-per-node=1 \
    --wrap "srun bash -c 'echo torchrun --node-rank=\$SLURM_NODEID' | sort"; sed 's/^/  /' out
# --8<-- [end:cases]
signalled late.sh "a trap in the batch shell, while srun runs in the foreground"
signalled in_time.sh "srun in the background, and wait"
rm -f out started task.sh late.sh in_time.sh
