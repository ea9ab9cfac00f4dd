#!/usr/bin/env bash
# One worker with its ranks under mpirun, as many as its engine config says. On TensorRT-LLM behind
# trtllm-llmapi-launch; the ranks of the embedded engine know what to do. (Without mpirun, both engines start the ranks of
# one machine by themselves.)
# Machine:  a GPU for each rank, or a CPU core with ENGINE=embedded; an MPI that the engine was built with: Open MPI for
#           TensorRT-LLM, mpich for the embedded engine (pip install 'trtllm-disagg[mpi]').
# Launch:   MODEL=path/to/model ENGINE_CONFIGS=directory launch/mpi.sh agg|prefill|decode [more arguments for the worker]
# Settings: launch/lib.sh, and those of the next lines. On several machines MPIRUN_ARGS also names those that mpirun should
#           pass on: '--hostfile hosts -x MODEL -x ENGINE_CONFIGS -x DYN_DISCOVERY_BACKEND -x ETCD_ENDPOINTS'.
: "${MPIRUN:=mpirun}"   # or mpiexec
: "${MPIRUN_ARGS:=}"    # more arguments for it, divided at spaces; --allow-run-as-root, for example
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
role=${1:-}
read_ranks "$role" "${@:2}"
take_gpus "$role"
command -v "$MPIRUN" >/dev/null || fail "MPIRUN: '$MPIRUN' is not a program here"
read -ra mpirun_args <<<"$MPIRUN_ARGS"
exec "$MPIRUN" -n "$ranks" "${mpirun_args[@]}" "${launcher[@]}" "$launch/$role.sh" "${@:2}"
