#!/usr/bin/env bash
# One prefill worker: reads prompts, computes their KV and hands it over to a decode worker.
# Machine:  one GPU (or more, as the engine config says), or a few CPU cores with ENGINE=embedded.
# Launch:   MODEL=path/to/model STRATEGY=prefill_first launch/prefill.sh [more arguments for the worker], beside
#           launch/decode.sh and launch/frontend.sh; as many workers of each as you like. The first stage lists the
#           model when it has loaded, and serves alone until the second one comes.
# Settings: launch/lib.sh; DYN_SYSTEM_PORT is 8081.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
exec_worker prefill 8081 "$@"
