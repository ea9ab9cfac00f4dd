# shellcheck shell=bash disable=SC2034  # sourced by the launch scripts, which use these variables
: "${MODEL:=}"                # model directory or Hugging Face name; every worker needs it
: "${SERVED_MODEL_NAME:=}"    # the name for clients (the name of the model directory when unset)
: "${STRATEGY:=decode_first}" # or prefill_first, auto, router; the same for all workers
: "${ENGINE:=}"               # tensorrt_llm or embedded (the worker's default when unset)
: "${ENGINE_CONFIGS:=}"       # directory with agg.yaml, or prefill.yaml and decode.yaml (no engine file when unset)
: "${IMAGES:=no}"             # yes: serve images (--enable-multimodal); set it for the frontend, too
: "${PUBLISH_METRICS:=yes}"   # no: step times are missing in /metrics, top and the Planner
: "${NAMESPACE:=dynamo}"      # a frontend sees only workers of its Dynamo namespace
: "${HTTP_HOST:=127.0.0.1}" "${HTTP_PORT:=8000}" "${PYTHON:=python3}" # HTTP_HOST=0.0.0.0 admits clients of other machines
# Also read: AGG_, PREFILL_ and DECODE_CUDA_VISIBLE_DEVICES (CUDA_VISIBLE_DEVICES when unset); DYN_SYSTEM_PORT, a worker's own;
# RUN_DIR, STARTUP_TIMEOUT, STOP_TIMEOUT of agg.sh and disagg.sh; for several machines ETCD_ENDPOINTS, TRTLLM_DISAGG_ADMIN_KEY_FILE.
set -euo pipefail
launch="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
fail() { echo "error: $*" >&2 && exit 1; }
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -sn '2,/^[^#:]/{s/^# \{0,1\}//p; s/^: /  /; T; s/["${}]//g; s/:=/=/gp}' "$0" "${BASH_SOURCE[0]}" && exit
fi
# exec_up [ARG...]: becomes `up`, with these settings as flags. ARG...: more arguments for its workers.
exec_up() {
    [[ $PUBLISH_METRICS != no ]] || set -- --no-publish-metrics "$@"
    [[ $IMAGES == no ]] || set -- --enable-multimodal "$@"
    exec "$PYTHON" -P -m trtllm_disagg up --strategy "$STRATEGY" --model "$MODEL" --namespace "$NAMESPACE" \
        --http-host "$HTTP_HOST" --http-port "$HTTP_PORT" ${SERVED_MODEL_NAME:+--served-model-name "$SERVED_MODEL_NAME"} \
        ${ENGINE:+--engine "$ENGINE"} ${ENGINE_CONFIGS:+--engine-configs "$ENGINE_CONFIGS"} ${RUN_DIR:+--run-dir "$RUN_DIR"} \
        ${STARTUP_TIMEOUT:+--startup-timeout "$STARTUP_TIMEOUT"} ${STOP_TIMEOUT:+--stop-timeout "$STOP_TIMEOUT"} \
        ${1:+--worker-args="${*@Q}"}
}

# join: sets how processes find each other. Workers' own variables override Dynamo's; ETCD_ENDPOINTS selects etcd.
join() {
    : "${DYN_DISCOVERY_BACKEND:=${ETCD_ENDPOINTS:+etcd}}"
    export DYN_DISCOVERY_BACKEND="${TRTLLM_DISAGG_DISCOVERY_BACKEND:-${DYN_DISCOVERY_BACKEND:-file}}"
    export DYN_REQUEST_PLANE="${TRTLLM_DISAGG_REQUEST_PLANE:-${DYN_REQUEST_PLANE:-tcp}}"
    export DYN_EVENT_PLANE="${TRTLLM_DISAGG_EVENT_PLANE:-${DYN_EVENT_PLANE:-zmq}}"
    export DYN_SYSTEM_HOST="${DYN_SYSTEM_HOST:-127.0.0.1}" DYN_LOG="${DYN_LOG:-info,tower_http=off}"
    export DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS="${DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS:-500}" DYN_SKIP_SGLANG_LOG_FORMATTING=1
    export DYN_DISABLE_FRONTEND_ADMIN_API="${DYN_DISABLE_FRONTEND_ADMIN_API:-1}" # else clients could set the frontend's thresholds
    [[ -n ${DYN_HTTP_BODY_LIMIT_MB:-} || -z $ENGINE_CONFIGS ]] || # the frontend needs 125 bytes of memory per byte of a body
        DYN_HTTP_BODY_LIMIT_MB=$(awk -v images="$([[ $IMAGES == no ]] || echo 16)" \
            '/^max_seq_len:/ && $2 > n { n = $2 } END { n = int((n + 32767) / 32768); print (n < 2 ? 2 : n) + images }' \
            "$ENGINE_CONFIGS"/*.yaml) && export DYN_HTTP_BODY_LIMIT_MB
    unset DYN_NAMESPACE_WORKER_SUFFIX # workers would append it to NAMESPACE, where the frontend does not look
    [[ $DYN_DISCOVERY_BACKEND == file ]] || return 0
    export DYN_FILE_KV="${DYN_FILE_KV:-${XDG_RUNTIME_DIR:-${TMPDIR:-/tmp}}/trtllm-disagg-discovery-$UID}"
    (umask 077 && mkdir -p "$DYN_FILE_KV") # else other users could divert prompts to their own workers
    [[ -O $DYN_FILE_KV && ! -L $DYN_FILE_KV ]] || fail "DYN_FILE_KV: '$DYN_FILE_KV' is not a directory of your own"
    export DYN_TCP_RPC_HOST="${DYN_TCP_RPC_HOST:-127.0.0.1}" DYN_EVENT_PLANE_HOST="${DYN_EVENT_PLANE_HOST:-127.0.0.1}"
    export DYN_TCP_RESPONSE_STREAM_HOST="${DYN_TCP_RESPONSE_STREAM_HOST:-127.0.0.1}"
}

# become_worker ROLE SYSTEM_PORT [ARG...]
become_worker() {
    local devices="${1^^}_CUDA_VISIBLE_DEVICES" argv=(--model "$MODEL" --namespace "$NAMESPACE" --disaggregation-mode "$1")
    [[ -n $SERVED_MODEL_NAME || ! -d $MODEL ]] || SERVED_MODEL_NAME=$(basename "$(cd "$MODEL" && pwd)")
    argv+=(--served-model-name "${SERVED_MODEL_NAME:-$MODEL}" --publish-kv-events ${ENGINE:+--engine "$ENGINE"}
        ${ENGINE_CONFIGS:+--extra-engine-args "$ENGINE_CONFIGS/$1.yaml"})
    [[ $PUBLISH_METRICS == no ]] || argv+=(--publish-metrics)
    [[ $IMAGES == no ]] || argv+=(--enable-multimodal)
    [[ $1 == agg ]] || argv+=(--disaggregation-strategy "$STRATEGY")
    [[ -z ${!devices:-} ]] || export CUDA_VISIBLE_DEVICES="${!devices}"
    export DYN_SYSTEM_PORT="${DYN_SYSTEM_PORT:-$2}"
    export TRTLLM_DISAGG_ADMIN_KEY_FILE="${TRTLLM_DISAGG_ADMIN_KEY_FILE:-$("$PYTHON" -P -m trtllm_disagg.tools.admin.user_key)}"
    join
    argv=("$PYTHON" -P -m trtllm_disagg worker "${argv[@]}" "${@:3}")
    [[ -n ${TLLM_SPAWN_PROXY_PROCESS:-} ]] || exec "${argv[@]}"
    trap : INT TERM # trtllm-llmapi-launch waits for all ranks, so end them if the worker fails
    "${argv[@]}" || { echo "error: the worker ended with status $?; ending its ranks" >&2 && kill -TERM 0; exit 1; }
}

# read_ranks ROLE [ARG...]: sets script, ranks (from the engine file), launcher (starts ranks) and mpi (for srun).
read_ranks() {
    [[ -z ${STOP_TIMEOUT:-} ]] || fail "STOP_TIMEOUT is for agg.sh and disagg.sh; here the argument --drain-seconds says how long a worker waits"
    local devices="${1^^}_CUDA_VISIBLE_DEVICES"
    script=$launch/${1/agg/agg_worker}.sh launcher=() mpi=pmi2
    [[ $1 =~ ^(agg|prefill|decode)$ ]] || fail "ROLE: '$1' is not allowed; expected agg, prefill or decode"
    [[ -z ${!devices:-} ]] || export CUDA_VISIBLE_DEVICES="${!devices}"
    [[ $ENGINE =~ ^(tensorrt_llm|embedded)$ ]] || fail "ENGINE: '$ENGINE' is not allowed; expected tensorrt_llm or embedded"
    ranks=$(awk 'BEGIN { n = 1 } /^(tensor|pipeline|context)_parallel_size:/ { n *= $2 } END { print n }' "${ENGINE_CONFIGS:?set it}/$1.yaml")
    [[ $ENGINE == tensorrt_llm ]] || return 0
    launcher=(trtllm-llmapi-launch) mpi=pmix
    [[ "$launch${*:2}" != *[*?[]* && $# == "$(wc -w <<<"$launch ${*:2}")" ]] ||
        fail "trtllm-llmapi-launch splits its arguments again, so none may be empty or have a space, *, ? or [: ${*:2}"
}
