#!/bin/bash
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
echo "run ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_NAME on one node"
# --standalone: a rendezvous of its own on a free port, so that two jobs share a node in peace
srun --kill-on-bad-exit=1 torchrun --standalone --nproc-per-node="${RANKS:-2}" \
    train.py --checkpoints "${CHECKPOINTS:-checkpoints}" "$@"
status=$?
if [ $status -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
