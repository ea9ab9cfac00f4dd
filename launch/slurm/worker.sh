#!/usr/bin/env bash
# Starts one worker in a Slurm job with a running frontend and etcd; deployment.sh starts all.
# Launch: NODES=a,b ENGINE=tensorrt_llm MODEL=path/to/model ENGINE_CONFIGS=directory ETCD_ENDPOINTS=http://HOST:2379 \
#         launch/slurm/worker.sh agg|prefill|decode [more arguments for the worker]
: "${NODES:=}" "${SRUN_ARGS:=}" # NODE[,NODE...]; more arguments, divided at spaces: --container-image=... --container-mounts=...
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
read_ranks "${1:-}" "${@:2}"
commas=${NODES//[^,]/} && read -ra srun_args <<<"$SRUN_ARGS"
exec srun --overlap --kill-on-bad-exit=1 --cpu-bind=none --nodelist="$NODES" --nodes=$((${#commas} + 1)) --ntasks="$ranks" \
    --ntasks-per-node=$((ranks / (${#commas} + 1))) --mpi="$mpi" "${srun_args[@]}" \
    env ${CUDA_VISIBLE_DEVICES:+"CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"} "${launcher[@]}" "$script" "${@:2}"
