#!/usr/bin/env bash
# Starts a prefill worker, which computes KV for decode workers. Needs launch/decode.sh and launch/frontend.sh.
# Machine: the GPUs of its engine file, or a few CPU cores with ENGINE=embedded.
# Launch:  MODEL=path/to/model STRATEGY=prefill_first launch/prefill.sh [more arguments for the worker]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
become_worker prefill 8081 "$@"
