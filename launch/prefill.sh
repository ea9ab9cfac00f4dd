#!/usr/bin/env bash
# A prefill worker: computes the KV of prompts and hands it to decode workers. Beside launch/decode.sh and launch/frontend.sh.
# Machine: the GPUs of its engine config, or a few CPU cores with ENGINE=embedded.
# Launch:  MODEL=path/to/model STRATEGY=prefill_first launch/prefill.sh [more arguments for the worker]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
become_worker prefill 8081 "$@"
