# Shared by launch/slurm/*.sh: their settings beside those of ../lib.sh, and how a command starts on nodes of this job.
# Sourced, never run.
# shellcheck shell=bash disable=SC2034,SC2154  # the scripts read places, and set worker_args
: "${GPUS_PER_NODE:=${SLURM_GPUS_ON_NODE:-}}" # on TensorRT-LLM; what Slurm says when unset
: "${SRUN_ARGS:=}" # more arguments for each srun, divided at spaces: --container-image=... --container-mounts=...
: "${PLAN_PYTHON:=}" # on the machine of this script; PYTHON is that of the nodes, in a container for example (PYTHON when unset)
: "${DYN_DISCOVERY_BACKEND:=etcd}"
: "${FIRST_SYSTEM_PORT:=8081}" # of the first worker; the next one has the next port
# Also read, for the embedded engine on several nodes: TRTLLM_DISAGG_TRANSFER_KEY_FILE, a file that all nodes see.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
nodes_python=$PYTHON
PYTHON=${PLAN_PYTHON:-$PYTHON}
read -ra srun_args <<<"$SRUN_ARGS"

[[ -n ${SLURM_JOB_NODELIST:-} ]] || fail "SLURM_JOB_NODELIST: not set; run this inside a job (sbatch --wrap or salloc)"
# What `auto` finds here says nothing about the nodes' container.
[[ -n $ENGINE ]] || fail "ENGINE: set it to tensorrt_llm or embedded"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#nodes[@]})) || fail "SLURM_JOB_NODELIST: scontrol finds no nodes in '$SLURM_JOB_NODELIST'"
if [[ $DYN_DISCOVERY_BACKEND == file ]] && ((${#nodes[@]} > 1)); then
    fail "DYN_DISCOVERY_BACKEND: 'file' is not allowed on ${#nodes[@]} nodes: a node is not told of files that another one writes; expected etcd or kubernetes"
fi

# plan ROLE:WORKERS...: sets places, a line for each worker (trtllm_disagg/tools/up/for_scripts.py). The arguments of all
# workers are in worker_args. Also sets on_gpus, srun_mpi and launcher.
plan() {
    local each role specs=() gpus_per_node=-
    for each in "$@"; do
        role=${each%%:*}
        read_ranks "$role" "${worker_args[@]}"
        specs+=("$each:$ranks")
    done
    if [[ $on_gpus == yes ]]; then
        [[ $GPUS_PER_NODE =~ ^[1-9][0-9]*$ ]] ||
            fail "GPUS_PER_NODE: '$GPUS_PER_NODE' is not allowed; expected a number from 1 up (sbatch --gpus-per-node sets it)"
        gpus_per_node=$GPUS_PER_NODE
    elif (($# > 1 && ${#nodes[@]} > 1)) && [[ -z ${TRTLLM_DISAGG_TRANSFER_KEY_FILE:-} ]]; then
        fail "TRTLLM_DISAGG_TRANSFER_KEY_FILE: not set; the embedded engine moves KV between nodes with a key (SECURITY.md)"
    fi
    local planned
    planned=$("$PYTHON" -P -m trtllm_disagg.tools.up.for_scripts placement \
        "$gpus_per_node" "${given_gpus:--}" "$(IFS=,; echo "${nodes[*]}")" "${specs[@]}") || exit 1
    mapfile -t places <<<"$planned"
}

# on_nodes NODE[,NODE...] NUMBER TASKS TASKS_PER_NODE MPI COMMAND...: runs COMMAND there beside other steps of the job.
on_nodes() {
    PYTHON=$nodes_python exec srun --overlap --kill-on-bad-exit=1 --cpu-bind=none --nodelist="$1" --nodes="$2" \
        --ntasks="$3" --ntasks-per-node="$4" --mpi="$5" "${srun_args[@]}" "${@:6}"
}

# worker_at PLACE: becomes one worker. Slurm gives every task all GPUs of a node; a worker takes its own.
worker_at() {
    local role at number tasks per_node gpus variables=()
    read -r role at number tasks per_node gpus <<<"$1"
    [[ $gpus == - ]] || variables+=("CUDA_VISIBLE_DEVICES=$gpus")
    [[ $on_gpus == yes || ${#nodes[@]} == 1 ]] || variables+=("TRANSFER_HOST=$at")
    on_nodes "$at" "$number" "$tasks" "$per_node" "$srun_mpi" env "${variables[@]}" "${launcher[@]}" \
        "$launch/$role.sh" "${worker_args[@]}"
}
