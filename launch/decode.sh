#!/usr/bin/env bash
# Starts a decode worker, which fetches a prompt's KV from a prefill worker and generates tokens. See launch/prefill.sh.
# Machine: the GPUs of its engine file, or a few CPU cores with ENGINE=embedded.
# Launch:  MODEL=path/to/model STRATEGY=prefill_first launch/decode.sh [more arguments for the worker]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
become_worker decode 8082 "$@"
