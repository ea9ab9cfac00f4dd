#!/usr/bin/env bash
# A worker for both phases, beside launch/frontend.sh: the baseline for every disaggregated run.
# Machine: the GPUs of its engine config, or a few CPU cores with ENGINE=embedded.
# Launch:  MODEL=path/to/model launch/agg_worker.sh [more arguments for the worker]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
become_worker agg 8081 "$@"
