#!/bin/bash

# Parameters
#SBATCH --chdir=/shared/models
#SBATCH --gpus-per-node=8
#SBATCH --job-name=quantmint-llama405b-fp8kv
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/models/store/logs/slurm/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=B:USR1@120

# setup
export PATH='/shared/quantmint env/bin':"$PATH"
again() { [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ] || scontrol requeue "$SLURM_JOB_ID"; }
trap again USR1

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /shared/models/store/logs/slurm/%j_%t_log.out --open-mode=append --kill-on-bad-exit=1 bash -c 'export HIP_VISIBLE_DEVICES="$ROCR_VISIBLE_DEVICES"; unset ROCR_VISIBLE_DEVICES; exec "$@"' bash ray symmetric-run --address "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):6379" --min-nodes 2 --num-gpus 8 -- '/shared/quantmint env/bin/quantmint' run llama405b-fp8kv --json --store /big/store --on ray &
run=$!
wait "$run"
code=$?
while kill -0 "$run" 2>/dev/null; do wait "$run"; code=$?; done
exit "$code"
