#!/usr/bin/env bash
# One worker in a Slurm job: on as many nodes as its engine config says, or on some GPUs of one. Beside a frontend and an
# etcd that are there already; deployment.sh starts all.
# Machine:  a Slurm job (salloc); this project in PLAN_PYTHON on the machine where the script runs, and in PYTHON on the nodes.
# Launch:   ENGINE=tensorrt_llm MODEL=path/to/model ENGINE_CONFIGS=directory ETCD_ENDPOINTS=http://HOST:2379 \
#           launch/slurm/worker.sh agg|prefill|decode [more arguments for the worker]
#           Several on one node: PREFILL_CUDA_VISIBLE_DEVICES=0,1 and DECODE_CUDA_VISIBLE_DEVICES=2,3, each with a
#           DYN_SYSTEM_PORT of its own. On a certain node: SRUN_ARGS=--nodelist=NODE.
# Settings: launch/lib.sh, launch/slurm/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[[ $DYN_DISCOVERY_BACKEND != etcd || -n ${ETCD_ENDPOINTS:-} ]] ||
    fail "ETCD_ENDPOINTS: set it to the etcd of the frontend, http://HOST:2379"
role=${1:-}
worker_args=("${@:2}")
devices="${role^^}_CUDA_VISIBLE_DEVICES"
given_gpus=${!devices:-}
plan "$role:1"
export DYN_SYSTEM_PORT="${DYN_SYSTEM_PORT:-$FIRST_SYSTEM_PORT}"
worker_at "${places[0]}"
