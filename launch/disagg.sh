#!/usr/bin/env bash
# Frontend, one prefill and one decode worker on this machine, by the scripts of the single roles. All end together.
# `trtllm-disagg up` does the same with a live status, more workers and logs in files.
# Machine:  two GPUs (more, as the engine configs say, by PREFILL_ and DECODE_CUDA_VISIBLE_DEVICES=0,1,...), or two CPU cores and 4 GB of memory with ENGINE=embedded
#           and a small model.
# Launch:   MODEL=path/to/model launch/disagg.sh prefill_first|decode_first|auto|router [more arguments for both workers]
#           Prints `ready http://HOST:PORT model=NAME strategy=S`: after seconds for a small model, minutes for a large
#           one. Ctrl-C drains the workers, then the frontend; a second Ctrl-C kills. Exit status: 0 when stopped while
#           serving, 130 (SIGINT) or 143 (SIGTERM) when stopped before, 1 after a failure.
# Settings: launch/lib.sh, and those of the next lines; without DYN_FILE_KV, a discovery directory of its own.
: "${PREFILL_SYSTEM_PORT:=8081}" "${DECODE_SYSTEM_PORT:=8082}"
: "${STARTUP_TIMEOUT:=}" # seconds (300; 3600 on TensorRT-LLM, which loads and warms up for longer)
[[ -n ${DYN_FILE_KV:-} ]] || DYN_FILE_KV=$(mktemp -d) own_discovery=$DYN_FILE_KV
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The second stage stops after the first one, so that requests in flight still find it. The table of strategies has this
# order.
# shellcheck disable=SC2329  # called by the trap
stop_everything() {
    trap - EXIT
    trap 'kill -KILL -- "${started[@]/#/-}" 2>/dev/null; exit 1' INT TERM
    local name
    for name in ${stop_order:-} frontend; do
        [[ -z ${started[$name]:-} ]] || stop "${started[$name]}"
    done
    [[ -z ${own_discovery:-} ]] || rm -rf "$own_discovery"
}

# Whether the frontend lists the model and both workers call themselves healthy.
is_ready() {
    "$PYTHON" -I -c '
import json, sys, urllib.request
frontend, name, *workers = sys.argv[1:]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    for port in workers:
        opener.open(f"http://127.0.0.1:{port}/health", timeout=2)
    models = json.load(opener.open(f"http://{frontend}/v1/models", timeout=2))["data"]
except OSError:
    sys.exit(1)
sys.exit(all(model["id"] != name for model in models))
' "$(client_address)" "$SERVED_MODEL_NAME" "$PREFILL_SYSTEM_PORT" "$DECODE_SYSTEM_PORT"
}

trap stop_everything EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
export STRATEGY="${1:-$STRATEGY}"
worker_args=("${@:2}")
[[ " ${worker_args[*]}" != *" --served-model-name"* ]] ||
    fail "--served-model-name: this script waits for a model of the name SERVED_MODEL_NAME; set that instead"
read_strategy
require_model
engine=$("$PYTHON" -P -m trtllm_disagg.engine.engines "${ENGINE:-${TRTLLM_DISAGG_ENGINE:-auto}}") || exit 1
if [[ $engine == tensorrt_llm ]]; then
    : "${STARTUP_TIMEOUT:=3600}"
    # One GPU for each worker, unless the user has assigned GPUs. Other engines see all of them.
    if [[ -z ${CUDA_VISIBLE_DEVICES+set} ]]; then
        export PREFILL_CUDA_VISIBLE_DEVICES="${PREFILL_CUDA_VISIBLE_DEVICES:-0}"
        export DECODE_CUDA_VISIBLE_DEVICES="${DECODE_CUDA_VISIBLE_DEVICES:-1}"
    fi
    require_gpus prefill,decode "${worker_args[@]}"
fi
: "${STARTUP_TIMEOUT:=300}"
require_number STARTUP_TIMEOUT "a whole number of seconds"
for port in HTTP_PORT PREFILL_SYSTEM_PORT DECODE_SYSTEM_PORT; do
    require_number "$port" "a port"
done
read_stop_timeout prefill,decode "${worker_args[@]}"
start frontend "$launch/frontend.sh"
export gpus_fit=yes
DYN_SYSTEM_PORT=$PREFILL_SYSTEM_PORT start prefill "$launch/prefill.sh" "${worker_args[@]}"
DYN_SYSTEM_PORT=$DECODE_SYSTEM_PORT start decode "$launch/decode.sh" "${worker_args[@]}"
until is_ready; do
    for pid in "${started[@]}"; do
        kill -0 "$pid" 2>/dev/null || fail "a process ended while loading"
    done
    ((SECONDS < STARTUP_TIMEOUT)) || fail "not ready after $STARTUP_TIMEOUT s"
    sleep 0.5
done
trap 'exit 0' INT TERM
echo "ready http://$(client_address) model=$SERVED_MODEL_NAME strategy=$STRATEGY"
wait -n "${started[@]}" || true
fail "a process ended, stopping the others"
