#!/usr/bin/env bash
# Frontend and one worker for both phases on this machine, by `trtllm-disagg up`. The worker alone: launch/agg_worker.sh.
# Launch: MODEL=path/to/model launch/agg.sh [more arguments for the worker]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
STRATEGY=agg && exec_up "$@"
