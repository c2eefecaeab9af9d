#!/bin/bash
#SBATCH --chdir=/shared/models
#SBATCH --gpus-per-node=8
#SBATCH --job-name=quantmint-llama405b-fp8kv
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/models/store/logs/slurm/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=B:USR1@120

unset QUANTMINT_IMAGE
# Ray waits 30 s for its nodes, too short for an environment on a network filesystem.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600
export PATH='/shared/quantmint env/bin':"$PATH"  # of ray
# Near its time limit the job goes back to the queue, 3 times at most: a run that gets nowhere ends.
again() { [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ] || scontrol requeue "$SLURM_JOB_ID"; }
trap again USR1
# The run writes its exit code here. The codes of srun, its plugins and Ray are no verdict on a checkpoint.
ended=/shared/models/store/logs/slurm/"$SLURM_JOB_ID".code
rm -f "$ended"
# The writer outlives the SIGTERM that the run gets. The rename shows readers no half-written code.
record='trap : TERM; "$@"; code=$?; echo "$code" > "$0.new" && mv -f "$0.new" "$0"; exit "$code"'

srun --unbuffered --output /shared/models/store/logs/slurm/%j_%t_log.out --open-mode=append --kill-on-bad-exit=1 \
  bash -c 'if [ -n "$ROCR_VISIBLE_DEVICES" ]; then export HIP_VISIBLE_DEVICES="$ROCR_VISIBLE_DEVICES"; fi; unset ROCR_VISIBLE_DEVICES; exec "$@"' bash \
  ray symmetric-run --address "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):6379" \
  --min-nodes 2 --num-gpus 8 -- \
  sh -c "$record" "$ended" '/shared/quantmint env/bin/python' -P -m quantmint run llama405b-fp8kv --json --store /big/store --on ray &
run=$!
wait "$run"
code=$?
# A trapped signal ends wait, and not the run.
while kill -0 "$run" 2>/dev/null; do wait "$run"; code=$?; done
[ -s "$ended" ] || echo "the run recorded no exit code: srun ended with $code"
code=$(cat "$ended" 2>/dev/null)
exit "${code:-5}"
