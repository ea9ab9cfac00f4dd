# What the launch scripts share: their settings, all of them environment variables, and how a worker is started.
# Sourced, never run.
# shellcheck shell=bash
set -euo pipefail

: "${MODEL:=}"                # model directory or Hugging Face name; every worker needs it
: "${SERVED_MODEL_NAME:=}"    # the name for clients (the name of the model directory when unset)
: "${STRATEGY:=decode_first}" # or prefill_first, auto, router; the same for all workers
: "${ENGINE:=}"               # tensorrt_llm or embedded (the worker's default when unset)
: "${ENGINE_CONFIGS:=}"       # directory with agg.yaml, or prefill.yaml and decode.yaml (no engine config when unset)
: "${NAMESPACE:=dynamo}"      # a frontend sees the workers of its Dynamo namespace only
: "${HTTP_HOST:=127.0.0.1}"   # where clients reach the frontend; 0.0.0.0 for other machines
: "${HTTP_PORT:=8000}"
: "${PYTHON:=python3}"
# Also read: PREFILL_CUDA_VISIBLE_DEVICES, DECODE_CUDA_VISIBLE_DEVICES and AGG_CUDA_VISIBLE_DEVICES, the GPUs of a worker of
# that role (CUDA_VISIBLE_DEVICES when unset); DYN_SYSTEM_PORT, a worker's port for health and metrics, at most 32767 and one for each worker of a machine;
# and, for several machines, the same on all of them: DYN_DISCOVERY_BACKEND=etcd ETCD_ENDPOINTS=http://HOST:2379, and a copy
# of one TRTLLM_DISAGG_ADMIN_KEY_FILE, with which `trtllm-disagg switch` and `set` prove that they may.
export DYN_DISCOVERY_BACKEND="${DYN_DISCOVERY_BACKEND:-file}"
export DYN_REQUEST_PLANE="${DYN_REQUEST_PLANE:-tcp}"
export DYN_EVENT_PLANE="${DYN_EVENT_PLANE:-zmq}"
export DYN_SYSTEM_HOST="${DYN_SYSTEM_HOST:-127.0.0.1}"
export DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="${DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS:-1}"
# A stream that fails before its first token gets an HTTP status, in every strategy, instead of a 200.
export DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS="${DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS:-500}"
# A health check of a loading worker is answered with a 503, and costs a line in its log each time.
export DYN_LOG="${DYN_LOG:-info,tower_http=off}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A temporary file at each start of a frontend, for an engine that does not run here.
export DYN_SKIP_SGLANG_LOG_FORMATTING="${DYN_SKIP_SGLANG_LOG_FORMATTING:-1}"
# File discovery, in a directory that all processes share, cannot leave the machine, so nothing else needs to. With etcd
# or Kubernetes, Dynamo finds the address.
if [[ $DYN_DISCOVERY_BACKEND == file ]]; then
    export DYN_FILE_KV="${DYN_FILE_KV:-${XDG_RUNTIME_DIR:-${TMPDIR:-/tmp}}/trtllm-disagg-discovery}"
    export DYN_TCP_RPC_HOST="${DYN_TCP_RPC_HOST:-127.0.0.1}"
    export DYN_TCP_RESPONSE_STREAM_HOST="${DYN_TCP_RESPONSE_STREAM_HOST:-127.0.0.1}"
    export DYN_EVENT_PLANE_HOST="${DYN_EVENT_PLANE_HOST:-127.0.0.1}"
    mkdir -p "$DYN_FILE_KV"
fi
if [[ -z $SERVED_MODEL_NAME ]]; then
    SERVED_MODEL_NAME=$MODEL
    [[ ! -d $MODEL ]] || SERVED_MODEL_NAME=$(basename "$(cd "$MODEL" && pwd)")
fi

fail() {
    echo "error: $*" >&2
    exit 1
}

# read_strategy: sets routed_roles, which the frontend routes to by what their KV caches hold, and stop_order.
read_strategy() {
    local spec
    spec=$("$PYTHON" -P -m trtllm_disagg.strategies "$STRATEGY") || exit 1
    # shellcheck disable=SC2034  # disagg.sh reads stop_order
    { read -r routed_roles && read -r stop_order; } <<<"$spec"
}

require_model() {
    [[ -n $MODEL ]] || fail "MODEL: set it to a model directory or a Hugging Face name"
}

# exec_worker ROLE SYSTEM_PORT [ARG...]: becomes a worker.
exec_worker() {
    local role=$1 routed_roles=$1
    local devices="${1^^}_CUDA_VISIBLE_DEVICES"
    [[ -z ${!devices:-} ]] || export CUDA_VISIBLE_DEVICES="${!devices}"
    export DYN_SYSTEM_PORT="${DYN_SYSTEM_PORT:-$2}"
    shift 2
    require_model
    local argv=(--model "$MODEL" --served-model-name "$SERVED_MODEL_NAME" --namespace "$NAMESPACE")
    argv+=(--disaggregation-mode "$role")
    if [[ $role != agg ]]; then
        read_strategy
        argv+=(--disaggregation-strategy "$STRATEGY")
    fi
    argv+=(--publish-metrics)
    [[ " $routed_roles " != *" $role "* ]] || argv+=(--publish-kv-events)
    [[ -z $ENGINE ]] || argv+=(--engine "$ENGINE")
    [[ -z $ENGINE_CONFIGS ]] || argv+=(--extra-engine-args "$ENGINE_CONFIGS/$role.yaml")
    # This user's own, made once.
    : "${TRTLLM_DISAGG_ADMIN_KEY_FILE:=$("$PYTHON" -P -m trtllm_disagg.keys)}"
    [[ -z $TRTLLM_DISAGG_ADMIN_KEY_FILE ]] || export TRTLLM_DISAGG_ADMIN_KEY_FILE
    exec "$PYTHON" -P -m trtllm_disagg worker "${argv[@]}" "$@"
}
