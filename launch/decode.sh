#!/usr/bin/env bash
# One decode worker: takes the KV of a prompt from a prefill worker and generates the tokens.
# Machine:  one GPU (or more, as the engine config says), or a few CPU cores with ENGINE=embedded.
# Launch:   MODEL=path/to/model STRATEGY=prefill_first launch/decode.sh [more arguments for the worker]; see
#           launch/prefill.sh
# Settings: launch/lib.sh; DYN_SYSTEM_PORT is 8082.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
exec_worker decode 8082 "$@"
