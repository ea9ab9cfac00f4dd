#!/usr/bin/env bash
# Starts a frontend and one worker for both phases by `trtllm-disagg up`. For the worker alone: launch/agg_worker.sh.
# Launch: MODEL=path/to/model launch/agg.sh [more arguments for the worker]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
STRATEGY=agg && exec_up "$@"
