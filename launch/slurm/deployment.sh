#!/usr/bin/env bash
# Starts a deployment in one Slurm job: frontend and etcd on its first node, workers on all nodes. All end together.
# Launch: ENGINE=tensorrt_llm MODEL=path/to/model ENGINE_CONFIGS=directory PREFILL_WORKERS=2 HTTP_HOST=0.0.0.0 \
#         sbatch --nodes=2 --gpus-per-node=8 --exclusive --wrap="exec launch/slurm/deployment.sh STRATEGY [ARG...]"
: "${AGG_WORKERS:=1}" "${PREFILL_WORKERS:=1}" "${DECODE_WORKERS:=1}" "${FIRST_SYSTEM_PORT:=8081}"
: "${GPUS_PER_NODE:=${SLURM_GPUS_ON_NODE:-}}" "${SRUN_ARGS:=}" "${PLAN_PYTHON:=}" # PLAN_PYTHON: Python of this script; PYTHON: of the nodes
: "${ETCD_PORT:=2379}" "${HEAD_ADDRESS:=}" # of this script's etcd (without ETCD_ENDPOINTS); its peers use the next port
here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/worker.sh ]] || { echo "error: worker.sh is not there; use sbatch --wrap=\"exec launch/slurm/deployment.sh ...\"" >&2 && exit 1; }
source "$here/../lib.sh"
STRATEGY=${1:-$STRATEGY} roles=agg order=agg node=0 used=0
[[ $STRATEGY == agg ]] || { roles="prefill decode" && order=$("${PLAN_PYTHON:-$PYTHON}" -P -m trtllm_disagg.strategies "$STRATEGY"); }
mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}")
[[ -n ${nodes[0]:-} ]] || fail "SLURM_JOB_NODELIST: no nodes; run this inside a job (sbatch --wrap or salloc)"
[[ ${#nodes[@]} == 1 || $ENGINE != embedded && ${DYN_DISCOVERY_BACKEND:-} != file ]] ||
    fail "ENGINE=embedded and DYN_DISCOVERY_BACKEND=file are for one node, and this job has ${#nodes[@]}"
[[ $ENGINE != embedded ]] || GPUS_PER_NODE=64 # needs no GPUs, so any number of workers fits
[[ $GPUS_PER_NODE =~ ^[1-9][0-9]*$ ]] || fail "GPUS_PER_NODE: '$GPUS_PER_NODE' is not allowed; expected a number from 1 up"

places=() # role, nodes and GPUs of each worker. A worker that fits on a node stays on one, others get nodes of their own.
for role in $roles; do
    read_ranks "$role" "${@:2}"
    count=${role^^}_WORKERS share=$((ranks < GPUS_PER_NODE ? ranks : GPUS_PER_NODE))
    for ((worker = 0; worker < ${!count}; worker++)); do
        ((used + share <= GPUS_PER_NODE)) || node=$((node + 1)) used=0
        own=("${nodes[@]:node:ranks/share}")
        ((${#own[@]} * share == ranks)) || fail "${#nodes[@]} nodes of $GPUS_PER_NODE GPUs have no room for $role workers of $ranks ranks"
        places+=("$role $(IFS=, && echo "${own[*]}") $([[ $ENGINE == embedded ]] || seq -s, "$used" $((used + share - 1)))")
        node=$((node + ${#own[@]} - 1)) used=$((used + share))
    done
done
on_head() { exec srun --overlap --cpu-bind=none --nodelist="${nodes[0]}" --nodes=1 --ntasks=1 --mpi=none "${srun_args[@]}" "$@"; }
declare -A started=() && read -ra srun_args <<<"$SRUN_ARGS"
stop_everything() { # callers before callees; a second signal ends the script, and with it the job
    trap - EXIT && trap 'exit 1' INT TERM
    # shellcheck disable=SC2086  # process ids
    for role in $order frontend etcd; do kill ${started[$role]:-} && wait ${started[$role]} || true; done 2>/dev/null
}
trap stop_everything EXIT && trap 'exit 143' INT TERM
export DYN_DISCOVERY_BACKEND=${DYN_DISCOVERY_BACKEND:-etcd}
if [[ $DYN_DISCOVERY_BACKEND == etcd && -z ${ETCD_ENDPOINTS:-} ]]; then
    : "${HEAD_ADDRESS:=$(getent ahostsv4 "${nodes[0]}" | awk 'NR == 1 { print $1 }')}"
    [[ -n $HEAD_ADDRESS && ($HEAD_ADDRESS != 127.* || ${#nodes[@]} == 1) ]] || fail "HEAD_ADDRESS: set it to an address of ${nodes[0]} that all nodes reach"
    export ETCD_ENDPOINTS="http://$HEAD_ADDRESS:$ETCD_PORT" peers="http://127.0.0.1:$((ETCD_PORT + 1))"
    on_head etcd --data-dir "$(mktemp -u -t etcd.XXXXXX)" --log-level warn --listen-client-urls "$ETCD_ENDPOINTS" \
        --advertise-client-urls "$ETCD_ENDPOINTS" --listen-peer-urls "$peers" --initial-advertise-peer-urls "$peers" \
        --initial-cluster "default=$peers" & started[etcd]=$!
    until (: <>"/dev/tcp/$HEAD_ADDRESS/$ETCD_PORT") 2>/dev/null; do kill -0 "${started[etcd]}" && sleep 0.5; done
fi
on_head "$launch/frontend.sh" & started[frontend]=$!
for index in "${!places[@]}"; do
    read -r role NODES CUDA_VISIBLE_DEVICES <<<"${places[index]}" && unset "${role^^}_CUDA_VISIBLE_DEVICES"
    export NODES CUDA_VISIBLE_DEVICES DYN_SYSTEM_PORT=$((FIRST_SYSTEM_PORT + index))
    "$here/worker.sh" "$role" "${@:2}" & started[$role]+=" $!"
done
trap 'exit 0' INT TERM && echo "frontend http://${nodes[0]}:$HTTP_PORT model=${SERVED_MODEL_NAME:-$MODEL} strategy=$STRATEGY"
wait -n || true
fail "a process ended, stopping the others"
