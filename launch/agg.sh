#!/usr/bin/env bash
# One aggregated worker: prefill and decode in the same process, the baseline for every disaggregated run.
# Machine:  one GPU (or more, as the engine config says), or a few CPU cores with ENGINE=embedded.
# Launch:   MODEL=path/to/model launch/agg.sh [more arguments for the worker], beside launch/frontend.sh
# Settings: launch/lib.sh; DYN_SYSTEM_PORT is 8081.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
exec_worker agg 8081 "$@"
