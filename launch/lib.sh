# Shared by the launch scripts: their settings, all of them environment variables, and how a worker is started.
# Sourced, never run.
# shellcheck shell=bash disable=SC2034  # the scripts use variables that functions set
set -euo pipefail
launch="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

fail() {
    echo "error: $*" >&2
    exit 1
}

# show_help: prints the head of the script, and its settings with the values that they have when unset.
show_help() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    printf '\nSettings:\n'
    local file
    for file in "$0" "${BASH_SOURCE[0]}"; do
        sed -n '/^source/q; /:+/d; s/:=/=/g; s/["${}]//g; s/^: /  /p' "$file"
    done
    printf '\nArguments of a worker: trtllm-disagg worker --help; of the frontend: python -m dynamo.frontend --help\n'
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    show_help
    [[ -z ${own_discovery:-} ]] || rmdir "$own_discovery"
    exit 0
fi

: "${MODEL:=}"                # model directory or Hugging Face name; every worker needs it
: "${SERVED_MODEL_NAME:=}"    # the name for clients (the name of the model directory when unset)
: "${STRATEGY:=decode_first}" # or prefill_first, auto, router; the same for all workers
: "${ENGINE:=}"               # tensorrt_llm or embedded (the worker's default when unset)
: "${ENGINE_CONFIGS:=}"       # directory with agg.yaml, or prefill.yaml and decode.yaml (no engine config when unset)
: "${NAMESPACE:=dynamo}"      # a frontend sees the workers of its Dynamo namespace only
: "${HTTP_HOST:=127.0.0.1}"   # where clients reach the frontend; 0.0.0.0 for other machines
: "${HTTP_PORT:=8000}"
# Where one script starts several processes: seconds until one that was told to stop is killed (as `up` has it when unset: a
# worker drains for TRTLLM_DISAGG_DRAIN_SECONDS, and then ends its engine).
: "${STOP_TIMEOUT:=}"
: "${PYTHON:=python3}"
: "${TRANSFER_HOST:=}" # the embedded engine on several machines: where others fetch KV from this one (SECURITY.md)
# Also read: PREFILL_CUDA_VISIBLE_DEVICES, DECODE_CUDA_VISIBLE_DEVICES and AGG_CUDA_VISIBLE_DEVICES, the GPUs of a worker of
# that role (CUDA_VISIBLE_DEVICES when unset); DYN_SYSTEM_PORT, a worker's port for health and metrics, at most 32767 and one for each worker of a machine;
# and, for several machines, the same on all of them: ETCD_ENDPOINTS=http://HOST:2379, and a copy
# of one TRTLLM_DISAGG_ADMIN_KEY_FILE, with which `trtllm-disagg switch` and `set` prove that they may.
# As in a worker: its own variables beat Dynamo's, which are the frontend's too, and discovery is etcd if ETCD_ENDPOINTS is set.
: "${DYN_DISCOVERY_BACKEND:=${ETCD_ENDPOINTS:+etcd}}"
export DYN_DISCOVERY_BACKEND="${TRTLLM_DISAGG_DISCOVERY_BACKEND:-${DYN_DISCOVERY_BACKEND:-file}}"
export DYN_REQUEST_PLANE="${TRTLLM_DISAGG_REQUEST_PLANE:-${DYN_REQUEST_PLANE:-tcp}}"
export DYN_EVENT_PLANE="${TRTLLM_DISAGG_EVENT_PLANE:-${DYN_EVENT_PLANE:-zmq}}"
# Workers would append it to NAMESPACE, and the frontend would not see them.
unset DYN_NAMESPACE_WORKER_SUFFIX
export DYN_SYSTEM_HOST="${DYN_SYSTEM_HOST:-127.0.0.1}"
export DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="${DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS:-1}"
# A stream that fails before its first token gets an HTTP status, in every strategy, instead of a 200.
export DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS="${DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS:-500}"
# A health check of a loading worker is answered with a 503, and costs a line in its log each time.
export DYN_LOG="${DYN_LOG:-info,tower_http=off}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Otherwise each start of a frontend writes a temporary file for an engine that does not run here.
export DYN_SKIP_SGLANG_LOG_FORMATTING="${DYN_SKIP_SGLANG_LOG_FORMATTING:-1}"
# File discovery works on one machine only, so all addresses can be loopback. With etcd or Kubernetes, Dynamo finds the
# address.
if [[ $DYN_DISCOVERY_BACKEND == file ]]; then
    if [[ -z ${DYN_FILE_KV:-} ]]; then
        DYN_FILE_KV="${XDG_RUNTIME_DIR:-${TMPDIR:-/tmp}}/trtllm-disagg-discovery-$UID"
        (umask 077 && mkdir -p "$DYN_FILE_KV")
        # Another user could divert prompts to a worker of their own.
        [[ -O $DYN_FILE_KV && ! -L $DYN_FILE_KV ]] ||
            fail "DYN_FILE_KV: '$DYN_FILE_KV' belongs to another user; set it to a directory of your own"
    fi
    export DYN_FILE_KV
    export DYN_TCP_RPC_HOST="${DYN_TCP_RPC_HOST:-127.0.0.1}"
    export DYN_TCP_RESPONSE_STREAM_HOST="${DYN_TCP_RESPONSE_STREAM_HOST:-127.0.0.1}"
    export DYN_EVENT_PLANE_HOST="${DYN_EVENT_PLANE_HOST:-127.0.0.1}"
    mkdir -p "$DYN_FILE_KV"
fi
if [[ -z $SERVED_MODEL_NAME ]]; then
    SERVED_MODEL_NAME=$MODEL
    [[ ! -d $MODEL ]] || SERVED_MODEL_NAME=$(basename "$(cd "$MODEL" && pwd)")
fi

# read_strategy: sets stop_order, the roles in the order in which they stop.
read_strategy() {
    stop_order=$("$PYTHON" -P -m trtllm_disagg.strategies "$STRATEGY") || exit 1
}

require_model() {
    [[ -n $MODEL ]] || fail "MODEL: set it to a model directory or a Hugging Face name"
}

# take_gpus ROLE: exports the GPUs for workers of this role, if any are set.
take_gpus() {
    local devices="${1^^}_CUDA_VISIBLE_DEVICES"
    [[ -z ${!devices:-} ]] || export CUDA_VISIBLE_DEVICES="${!devices}"
}

# worker_arguments ROLE [ARG...]: sets argv, what a worker is started with.
worker_arguments() {
    local role=$1
    require_model
    argv=(--model "$MODEL" --served-model-name "$SERVED_MODEL_NAME" --namespace "$NAMESPACE")
    argv+=(--disaggregation-mode "$role")
    [[ $role == agg ]] || argv+=(--disaggregation-strategy "$STRATEGY")
    # Also for a second stage: after a switch it is the first one, and the frontend then knows its cache.
    argv+=(--publish-events-and-metrics)
    [[ -z $ENGINE ]] || argv+=(--engine "$ENGINE")
    [[ -z $ENGINE_CONFIGS ]] || argv+=(--extra-engine-args "$ENGINE_CONFIGS/$role.yaml")
    [[ -z $TRANSFER_HOST ]] || argv+=(--trtllm.embedded.transfer_host "$TRANSFER_HOST")
    argv+=("${@:2}")
}

# require_gpus ROLE[,ROLE] [ARG...]: fails if a prefill and a decode worker on this machine need more memory of a GPU than it has.
# ARG...: further arguments of the workers of these roles.
require_gpus() {
    local both=() role argv
    for role in prefill decode; do
        if [[ ,$1, == *,$role,* ]]; then worker_arguments "$role" "${@:2}"; else worker_arguments "$role"; fi
        both+=("${argv[@]}" --)
    done
    "$PYTHON" -P -m trtllm_disagg.tools.up.for_scripts gpus "${both[@]}" || exit 1
}

# require_number VARIABLE WHAT: fails unless the variable is a whole number.
require_number() {
    [[ ${!1} =~ ^(0|[1-9][0-9]*)$ ]] || fail "$1: '${!1}' is not allowed; expected $2"
}

# read_stop_timeout ROLE[,ROLE] [ARG...]: sets STOP_TIMEOUT, if it is not set, for workers of these roles with these further
# arguments.
read_stop_timeout() {
    local every=() roles role argv
    if [[ -n $STOP_TIMEOUT ]]; then
        require_number STOP_TIMEOUT "a whole number of seconds"
        return
    fi
    IFS=, read -ra roles <<<"$1"
    for role in "${roles[@]}"; do
        worker_arguments "$role" "${@:2}"
        every+=("${argv[@]}" --)
    done
    STOP_TIMEOUT=$("$PYTHON" -P -m trtllm_disagg.tools.up.for_scripts stop "${every[@]}") || exit 1
}

# exec_worker ROLE SYSTEM_PORT [ARG...]: becomes a worker.
exec_worker() {
    # Only if the GPUs of both roles are known; disagg.sh has checked them already.
    if [[ $1 != agg && -n ${PREFILL_CUDA_VISIBLE_DEVICES:-} && -n ${DECODE_CUDA_VISIBLE_DEVICES:-} && -z ${gpus_fit:-} ]]; then
        require_gpus "$1" "${@:3}"
    fi
    take_gpus "$1"
    export DYN_SYSTEM_PORT="${DYN_SYSTEM_PORT:-$2}"
    worker_arguments "$1" "${@:3}"
    # The key of this user, made at the first start.
    : "${TRTLLM_DISAGG_ADMIN_KEY_FILE:=$("$PYTHON" -P -m trtllm_disagg.admin.keys)}"
    [[ -z $TRTLLM_DISAGG_ADMIN_KEY_FILE ]] || export TRTLLM_DISAGG_ADMIN_KEY_FILE
    exec "$PYTHON" -P -m trtllm_disagg worker "${argv[@]}"
}

# read_ranks ROLE [ARG...]: sets argv, and what one worker of this role needs: ranks (processes), on_gpus (yes or no),
# srun_mpi, and launcher, what runs in every rank in front of the worker.
read_ranks() {
    local answer launches
    [[ $1 == agg || $1 == prefill || $1 == decode ]] || fail "ROLE: '$1' is not allowed; expected agg, prefill or decode"
    worker_arguments "$@"
    answer=$("$PYTHON" -P -m trtllm_disagg.tools.up.for_scripts ranks "${argv[@]}") || exit 2
    read -r ranks on_gpus srun_mpi launches <<<"$answer"
    launcher=()
    [[ -n $launches ]] || return 0
    launcher=("$launches" "$launch/all_or_none.sh")
    local word
    for word in "$launch" "${@:2}"; do
        [[ $word != *[[:space:]*?[]* ]] ||
            fail "$launches splits its arguments again, so none may have a space, *, ? or [: '$word'"
    done
}

# client_address: HOST:PORT, as a client on this machine reaches the frontend.
client_address() {
    case $HTTP_HOST in
    0.0.0.0) echo "127.0.0.1:$HTTP_PORT" ;;
    ::) echo "[::1]:$HTTP_PORT" ;;
    *:*) echo "[$HTTP_HOST]:$HTTP_PORT" ;;
    *) echo "$HTTP_HOST:$HTTP_PORT" ;;
    esac
}

# start NAME COMMAND...: in the background, out of reach of the terminal's Ctrl-C.
declare -A started=()
start() {
    set -m
    "${@:2}" </dev/null &
    set +m
    started[$1]=$!
}

# stop PID: SIGTERM, and SIGKILL for its whole group when it is still there after STOP_TIMEOUT.
stop() {
    local pid=$1 deadline=$((SECONDS + STOP_TIMEOUT))
    kill -TERM "$pid" 2>/dev/null || true
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do
        sleep 0.1
    done
    kill -KILL -- "-$pid" 2>/dev/null && echo "killed what was left of process group $pid" >&2
    return 0
}
