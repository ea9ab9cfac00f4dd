#!/usr/bin/env bash
# A whole deployment in one Slurm job: frontend and etcd on its first node, the workers on all of them. All end together.
# Machine:  a Slurm job, its nodes whole (--exclusive); this project in PLAN_PYTHON on the first node, and in PYTHON on all.
# Launch:   ENGINE=tensorrt_llm MODEL=path/to/model ENGINE_CONFIGS=directory PREFILL_WORKERS=2 DECODE_WORKERS=1 \
#           HTTP_HOST=0.0.0.0 sbatch --nodes=2 --gpus-per-node=8 --exclusive \
#           --wrap="exec launch/slurm/deployment.sh prefill_first|decode_first|auto|router|agg [more arguments for the workers]"
#           Prints `frontend http://NODE:PORT model=NAME strategy=S`. It lists the model (/v1/models) when it can be served.
# Settings: launch/lib.sh, launch/slurm/lib.sh, and those of the next lines. Without ETCD_ENDPOINTS, etcd is started: it asks
#           for no password, so its port should be reachable by the job's nodes only.
: "${AGG_WORKERS:=1}" "${PREFILL_WORKERS:=1}" "${DECODE_WORKERS:=1}"
: "${ETCD_PORT:=2379}"   # and the next one, on loopback
: "${HEAD_ADDRESS:=}"    # of the first node, where etcd listens (what the node's name resolves to when unset)
# sbatch runs a copy of its script, in a directory of its own.
[[ -f "$(dirname "${BASH_SOURCE[0]}")/lib.sh" ]] || {
    echo "error: lib.sh is not beside this script; start it with sbatch --wrap=\"exec launch/slurm/deployment.sh ...\"" >&2
    exit 1
}
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# shellcheck disable=SC2329  # called by the trap
stop_everything() {
    trap - EXIT
    trap 'kill -KILL -- "${started[@]/#/-}" 2>/dev/null; exit 1' INT TERM
    local group name
    for group in $stop_order frontend etcd; do
        for name in "${!started[@]}"; do
            [[ $name != "$group"* ]] || stop "${started[$name]}"
        done
    done
}

# Whether etcd answers.
etcd_is_ready() {
    "$PYTHON" -I -c '
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    opener.open(sys.argv[1] + "/health", timeout=2)
except OSError:
    sys.exit(1)
' "$ETCD_ENDPOINTS"
}

start_etcd() {
    if [[ -z $HEAD_ADDRESS ]]; then
        HEAD_ADDRESS=$(getent ahostsv4 "$head" | { read -r address _ && echo "$address"; }) || true
        [[ -n $HEAD_ADDRESS && ($HEAD_ADDRESS != 127.* || ${#nodes[@]} == 1) ]] ||
            fail "HEAD_ADDRESS: set it to an address of $head that the other nodes reach (its name gives '$HEAD_ADDRESS')"
    fi
    export ETCD_ENDPOINTS="http://$HEAD_ADDRESS:$ETCD_PORT"
    local peers="http://127.0.0.1:$((ETCD_PORT + 1))"
    start etcd on_nodes "$head" 1 1 1 none etcd --data-dir "$(mktemp -u -t etcd.XXXXXX)" --log-level warn \
        --listen-client-urls "$ETCD_ENDPOINTS" --advertise-client-urls "$ETCD_ENDPOINTS" \
        --listen-peer-urls "$peers" --initial-advertise-peer-urls "$peers" --initial-cluster "default=$peers"
    until etcd_is_ready; do
        kill -0 "${started[etcd]}" 2>/dev/null || fail "etcd ended"
        sleep 0.5
    done
}

STRATEGY=${1:-$STRATEGY}
worker_args=("${@:2}")
head=${nodes[0]}
if [[ $STRATEGY == agg ]]; then
    stop_order=agg
    plan "agg:$AGG_WORKERS"
    read_stop_timeout agg "${worker_args[@]}"
else
    export STRATEGY
    read_strategy
    plan "prefill:$PREFILL_WORKERS" "decode:$DECODE_WORKERS"
    read_stop_timeout prefill,decode "${worker_args[@]}"
fi
# One value for a role would give all its workers the same GPUs.
unset {AGG,PREFILL,DECODE}_CUDA_VISIBLE_DEVICES
trap stop_everything EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
[[ $DYN_DISCOVERY_BACKEND != etcd || -n ${ETCD_ENDPOINTS:-} ]] || start_etcd
start frontend on_nodes "$head" 1 1 1 none "$launch/frontend.sh"
for index in "${!places[@]}"; do
    DYN_SYSTEM_PORT=$((FIRST_SYSTEM_PORT + index)) start "${places[index]%% *}-$index" worker_at "${places[index]}"
done
trap 'exit 0' INT TERM
echo "frontend http://$head:$HTTP_PORT model=$SERVED_MODEL_NAME strategy=$STRATEGY"
wait -n "${started[@]}" || true
fail "a process ended, stopping the others"
