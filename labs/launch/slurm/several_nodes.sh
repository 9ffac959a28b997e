#!/bin/bash
# A job on several nodes: one torchrun per node starts the ranks.
# --8<-- [start:options]
#SBATCH --job-name=world-size
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # one torchrun per node, which starts the ranks
#SBATCH --cpus-per-task=2          # with GPUs also: --gpus-per-node=8
#SBATCH --time=00:30:00
#SBATCH --signal=TERM@120          # sent to every process of a job step, 120 s before the end
#SBATCH --requeue                  # Slurm may start the job again
#SBATCH --open-mode=append         # a second run continues the same log
#SBATCH --output=%x-%j.out
#SBATCH --error=%x-%j.err          # torchrun's log about a signal is long
# --8<-- [end:options]

# --8<-- [start:launch]
set -u
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# on a cluster, this name resolves; in a test on one machine, it does not
MASTER_ADDR=$(getent hosts "$first" >/dev/null && echo "$first" || echo 127.0.0.1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS=1
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # since 22.05 srun does not inherit it
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100  # seconds that ranks have to save; default 30

echo "run ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_NAME on $SLURM_JOB_NUM_NODES nodes"
srun --kill-on-bad-exit=1 bash -c 'exec torchrun \
    --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node="${RANKS:-2}" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    train.py --checkpoints "${CHECKPOINTS:-checkpoints}" '"$*" 
status=$?
# train.py was stopped or has failed: put the job into the queue again, at most five times
if [ $status -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
# --8<-- [end:launch]
