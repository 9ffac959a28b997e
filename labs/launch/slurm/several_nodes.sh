#!/bin/bash
# A job of several nodes: one torchrun on each, told where to meet; saved when its time is up.
#SBATCH --job-name=world-size
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # one torchrun a node; it starts the ranks
#SBATCH --cpus-per-task=2          # with GPUs also: --gpus-per-node=8
#SBATCH --time=00:30:00
#SBATCH --signal=TERM@120          # two minutes before the end, to every process of the steps
#SBATCH --requeue                  # the scheduler may start the job again
#SBATCH --open-mode=append         # a second run goes on in the same file
#SBATCH --output=%x-%j.out
#SBATCH --error=%x-%j.err          # what torchrun says of a signal is long

set -u
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# in a cluster its name leads to it; the nodes of a rehearsal are all this machine
MASTER_ADDR=$(getent hosts "$first" >/dev/null && echo "$first" || echo 127.0.0.1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS=1
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # from 22.05 on srun does not inherit it
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100  # how long torchrun lets ranks save; 30 s if unsaid

echo "run ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_NAME on $SLURM_JOB_NUM_NODES nodes"
srun --kill-on-bad-exit=1 bash -c 'exec torchrun \
    --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node="${RANKS:-2}" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    train.py --checkpoints "${CHECKPOINTS:-checkpoints}" '"$*" 
status=$?
# train.py has saved what it had. Not finished: queue up again.
if [ $status -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
