#!/usr/bin/env bash
# Starts one worker with its ranks under mpirun, by its engine file. (Without mpirun, engines start their ranks.)
# Machine: a GPU for each rank, or a CPU core; Open MPI for TensorRT-LLM, mpich for the embedded engine.
# Launch:  ENGINE=tensorrt_llm MODEL=path/to/model ENGINE_CONFIGS=directory launch/mpi.sh agg|prefill|decode [ARG...]
: "${MPIRUN:=mpirun}" "${MPIRUN_ARGS:=}" # more arguments, divided at spaces: --hostfile FILE -x MODEL -x ENGINE_CONFIGS
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
read_ranks "${1:-}" "${@:2}"
read -ra mpirun_args <<<"$MPIRUN_ARGS"
exec "$MPIRUN" -n "$ranks" "${mpirun_args[@]}" "${launcher[@]}" "$script" "${@:2}"
