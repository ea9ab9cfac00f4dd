#!/usr/bin/env bash
# One decode worker: takes the KV of a prompt from a prefill worker and generates the tokens.
#
# Machine: one GPU (or more, as the engine config says), or a few CPU cores with ENGINE=embedded. When it is not
#          that of launch/prefill.sh: DYN_DISCOVERY_BACKEND=etcd ETCD_ENDPOINTS=http://HOST:2379 on both.
# Time:    seconds for a small model, minutes for a large one; the first stage lists the model, and serves alone until the second one comes.
# Launch:  MODEL=path/to/model STRATEGY=prefill_first launch/decode.sh [more arguments for the worker]
#          with launch/prefill.sh and launch/frontend.sh in other terminals; as many workers of each as you like.
#
# Knobs (environment):
#   MODEL              model directory or Hugging Face name (required)
#   SERVED_MODEL_NAME  the name of the model directory
#   STRATEGY           decode_first; or prefill_first, auto, router. The same for all workers
#   ENGINE             tensorrt_llm or embedded (the worker's default when unset)
#   ENGINE_CONFIGS     directory with decode.yaml (no engine config when unset)
#   NAMESPACE          dynamo
#   DYN_SYSTEM_PORT    8082   health and metrics; one for each worker on a machine, at most 32767
#   DYN_FILE_KV        discovery directory, the same for all processes on one machine
#   TRTLLM_DISAGG_ADMIN_KEY_FILE  key of `trtllm-disagg switch` and `set` (this user's own, made once, when unset)
#   PYTHON             python3
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export DYN_SYSTEM_PORT="${DYN_SYSTEM_PORT:-8082}"
exec_worker decode "$@"
