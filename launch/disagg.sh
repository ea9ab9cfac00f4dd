#!/usr/bin/env bash
# Frontend, one prefill and one decode worker on this machine, by the scripts of the single roles. All end together.
# `trtllm-disagg up` does the same with a live status, more workers and logs in files.
#
# Machine: two GPUs (or more, as the engine configs say), or two CPU cores and 4 GB of memory with ENGINE=embedded
#          and a small model.
# Time:    seconds for a small model, minutes for a large one. Prints `ready http://HOST:PORT model=NAME strategy=S`.
# Launch:  MODEL=path/to/model launch/disagg.sh prefill_first|decode_first|auto|router
#          Ctrl-C drains the workers, then the frontend; a second Ctrl-C kills. Exit status: 0 when stopped while serving,
#          130 (SIGINT) or 143 (SIGTERM) when stopped before, 1 after a failure.
#
# Knobs (environment):
#   MODEL                model directory or Hugging Face name (required)
#   SERVED_MODEL_NAME    the name of the model directory
#   STRATEGY             decode_first, when the argument is left out
#   HTTP_HOST            127.0.0.1
#   HTTP_PORT            8000
#   ENGINE               tensorrt_llm or embedded (the worker's default when unset)
#   ENGINE_CONFIGS       directory with prefill.yaml and decode.yaml (no engine config when unset)
#   NAMESPACE            dynamo
#   PREFILL_SYSTEM_PORT  8081   health and metrics, at most 32767
#   DECODE_SYSTEM_PORT   8082
#   STARTUP_TIMEOUT      300 s
#   STOP_TIMEOUT         20 s for requests in flight to end
#   DYN_FILE_KV          discovery directory (a fresh one, removed at the end, when unset)
#   TRTLLM_DISAGG_ADMIN_KEY_FILE  key of `trtllm-disagg switch` and `set` (this user's own, made once, when unset)
#   PYTHON               python3
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [[ -z ${DYN_FILE_KV:-} ]]; then
    DYN_FILE_KV="$(mktemp -d)"
    fresh_discovery=$DYN_FILE_KV
fi
source "$here/lib.sh"

# The stage that is called by the other one stops after it, so that requests in flight still find it: so says the list
# of strategies.
# shellcheck disable=SC2329  # called by the trap
stop_everything() {
    trap - EXIT
    trap kill_everything INT TERM
    local role
    # shellcheck disable=SC2154  # set by check_strategy
    for role in $stop_order; do
        stop "${!role}"
    done
    stop "$frontend"
    [[ -z ${fresh_discovery:-} ]] || rm -rf "$fresh_discovery"
}

# shellcheck disable=SC2329  # called by the trap
kill_everything() {
    kill -KILL -- "${children[@]/#/-}" 2>/dev/null || true
    exit 1
}

frontend="" prefill="" decode="" stop_order="prefill decode"
trap stop_everything EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

export STRATEGY="${1:-$STRATEGY}"
check_strategy
[[ -n $MODEL ]] || fail "MODEL: set it to a model directory or a Hugging Face name"
prefill_port="${PREFILL_SYSTEM_PORT:-8081}"
decode_port="${DECODE_SYSTEM_PORT:-8082}"

start "$here/frontend.sh"
frontend=$!
DYN_SYSTEM_PORT=$prefill_port start "$here/prefill.sh"
prefill=$!
DYN_SYSTEM_PORT=$decode_port start "$here/decode.sh"
decode=$!

wait_until_ready "$prefill_port" "$decode_port"
trap 'exit 0' INT TERM
echo "ready http://$HTTP_HOST:$HTTP_PORT model=$(served_model_name) strategy=$STRATEGY"
wait -n "${children[@]}" || true
fail "a process ended, stopping the others"
