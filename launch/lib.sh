# Shared by the launch scripts: settings with their defaults, and the few functions around them. Sourced, never run.
# shellcheck shell=bash

: "${PYTHON:=python3}"
: "${MODEL:=}"
: "${STRATEGY:=decode_first}"
: "${HTTP_HOST:=127.0.0.1}"
: "${HTTP_PORT:=8000}"
: "${NAMESPACE:=dynamo}"
: "${ENGINE:=}"
: "${ENGINE_CONFIGS:=}"
: "${STARTUP_TIMEOUT:=300}"
: "${STOP_TIMEOUT:=20}"

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

# File discovery cannot leave the machine, so nothing else needs to. With etcd or Kubernetes, Dynamo finds the address.
if [[ $DYN_DISCOVERY_BACKEND == file ]]; then
    export DYN_FILE_KV="${DYN_FILE_KV:-${XDG_RUNTIME_DIR:-${TMPDIR:-/tmp}}/trtllm-disagg-discovery}"
    export DYN_TCP_RPC_HOST="${DYN_TCP_RPC_HOST:-127.0.0.1}"
    export DYN_TCP_RESPONSE_STREAM_HOST="${DYN_TCP_RESPONSE_STREAM_HOST:-127.0.0.1}"
    export DYN_EVENT_PLANE_HOST="${DYN_EVENT_PLANE_HOST:-127.0.0.1}"
    mkdir -p "$DYN_FILE_KV"
fi

fail() {
    echo "error: $*" >&2
    exit 1
}

# The key with which `trtllm-disagg switch` and `set` prove that they may: this user's own, made once. Several hosts
# need the same file: set TRTLLM_DISAGG_ADMIN_KEY_FILE.
make_admin_key() {
    [[ -z ${TRTLLM_DISAGG_ADMIN_KEY_FILE:-} ]] || return 0
    local directory="${XDG_STATE_HOME:-${HOME:-/}/.local/state}/trtllm-disagg"
    local key=$directory/admin.key draft
    if [[ ! -e $key ]]; then
        mkdir -p "$directory" && draft=$(umask 077 && mktemp "$directory/draft.XXXXXX") || {
            echo "no key can be made in $directory: the workers will refuse \`trtllm-disagg switch\` and \`set\`" >&2
            return 0
        }
        head -c 32 /dev/urandom >"$draft"
        # Of two scripts that start at once, the first one's stays.
        ln "$draft" "$key" 2>/dev/null || true
        rm -f "$draft"
    fi
    export TRTLLM_DISAGG_ADMIN_KEY_FILE=$key
}

served_model_name() {
    if [[ -n ${SERVED_MODEL_NAME:-} ]]; then
        echo "$SERVED_MODEL_NAME"
    elif [[ -d $MODEL ]]; then
        basename "$(cd "$MODEL" && pwd)"
    else
        echo "$MODEL"
    fi
}

# check_strategy: sets routed_roles, which the frontend routes to by what their KV caches hold, and stop_order.
check_strategy() {
    local spec
    spec=$("$PYTHON" -P -m trtllm_disagg.strategies "$STRATEGY") || exit 1
    { read -r routed_roles && read -r stop_order; } <<<"$spec"
}

# exec_worker ROLE [ARG...]: becomes a worker.
exec_worker() {
    local role=$1 routed_roles=$1 stop_order=$1
    shift
    [[ -n $MODEL ]] || fail "MODEL: set it to a model directory or a Hugging Face name"
    local argv=(--model "$MODEL" --served-model-name "$(served_model_name)" --namespace "$NAMESPACE")
    argv+=(--disaggregation-mode "$role")
    if [[ $role != agg ]]; then
        check_strategy
        argv+=(--disaggregation-strategy "$STRATEGY")
    fi
    case " $routed_roles " in
        *" $role "*) argv+=(--publish-events-and-metrics) ;;
        *) argv+=(--publish-metrics) ;;
    esac
    [[ -z $ENGINE ]] || argv+=(--engine "$ENGINE")
    [[ -z $ENGINE_CONFIGS ]] || argv+=(--extra-engine-args "$ENGINE_CONFIGS/$role.yaml")
    make_admin_key
    exec "$PYTHON" -P -m trtllm_disagg worker "${argv[@]}" "$@"
}

# http_get URL: the body; fails unless the answer is a 200.
http_get() {
    "$PYTHON" -I -c '
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    print(opener.open(sys.argv[1], timeout=2).read().decode())
except OSError:
    sys.exit(1)
' "$1"
}

children=()

# start COMMAND...: in the background, out of reach of the terminal's Ctrl-C.
start() {
    set -m
    "$@" </dev/null &
    set +m
    children+=("$!")
}

any_child_gone() {
    local pid
    for pid in "${children[@]}"; do
        kill -0 "$pid" 2>/dev/null || return 0
    done
    return 1
}

# wait_until_ready SYSTEM_PORT...: until the frontend lists the model and these workers call themselves healthy.
wait_until_ready() {
    local deadline=$((SECONDS + STARTUP_TIMEOUT))
    until is_ready "$@"; do
        any_child_gone && fail "a process ended while loading"
        ((SECONDS < deadline)) || fail "not ready after $STARTUP_TIMEOUT s"
        sleep 0.5
    done
}

is_ready() {
    local port
    for port in "$@"; do
        http_get "http://127.0.0.1:$port/health" >/dev/null || return 1
    done
    http_get "http://$HTTP_HOST:$HTTP_PORT/v1/models" | grep -qF "\"id\":\"$(served_model_name)\""
}

# stop PID: SIGTERM, and SIGKILL for its whole group when it is still there after STOP_TIMEOUT.
stop() {
    local pid=$1 deadline=$((SECONDS + STOP_TIMEOUT))
    [[ -n $pid ]] || return 0
    kill -TERM "$pid" 2>/dev/null || true
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do
        sleep 0.1
    done
    kill -KILL -- "-$pid" 2>/dev/null && echo "killed what was left of process group $pid" >&2
    return 0
}
