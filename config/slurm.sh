#!/bin/bash
# Trains on two nodes, and requeues itself before its time limit. Submit it from the repository, in its Python
# environment: sbatch config/slurm.sh. Edit the #SBATCH lines, --nproc_per_node (GPUs per node) and the arguments of
# train.py. Nodes share out/, a network folder; they share data/, too, or each has a copy.
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64
#SBATCH --time=24:00:00 --signal=B:USR1@120 --requeue --open-mode=append
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes="$SLURM_NNODES" --nproc_per_node=8 --max-restarts=3 \
    --rdzv_backend=c10d --rdzv_endpoint="$first:29500" --rdzv_id="$SLURM_JOB_ID" \
    train.py config/train_gpt2.py --init_from=auto --out_dir=out/gpt2 &
job=$!
trap 'kill $job; wait $job; scontrol requeue "$SLURM_JOB_ID"' USR1
wait $job
