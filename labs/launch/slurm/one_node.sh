#!/bin/bash
# A job on one node: torchrun starts the ranks, and they save before the time limit.
#SBATCH --job-name=world-size
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4          # with GPUs also: --gpus=8
#SBATCH --time=00:30:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --error=%x-%j.err

set -u
export OMP_NUM_THREADS=1
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # since 22.05 srun does not inherit it
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100  # seconds that ranks have to save; default 30
echo "run ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_NAME on one node"
# --standalone chooses a free port, so two jobs can run on the same node
srun --kill-on-bad-exit=1 torchrun --standalone --nproc-per-node="${RANKS:-2}" \
    train.py --checkpoints "${CHECKPOINTS:-checkpoints}" "$@"
status=$?
if [ $status -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
