#!/usr/bin/env bash
# One aggregated worker: prefill and decode in the same process, the baseline for every disaggregated run.
#
# Machine: one GPU (or more, as the engine config says), or a few CPU cores with ENGINE=embedded.
# Time:    seconds for a small model, minutes for a large one, until the frontend lists the model.
# Launch:  launch/frontend.sh in one terminal, in another
#          MODEL=path/to/model launch/agg.sh [more arguments for the worker]
#
# Knobs (environment):
#   MODEL              model directory or Hugging Face name (required)
#   SERVED_MODEL_NAME  the name of the model directory
#   ENGINE             tensorrt_llm or embedded (the worker's default when unset)
#   ENGINE_CONFIGS     directory with agg.yaml (no engine config when unset)
#   NAMESPACE          dynamo
#   DYN_SYSTEM_PORT    8081   health and metrics; one for each worker on a machine, at most 32767
#   DYN_FILE_KV        discovery directory, the same for all processes on one machine
#   PYTHON             python3
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export DYN_SYSTEM_PORT="${DYN_SYSTEM_PORT:-8081}"
exec_worker agg "$@"
