#!/usr/bin/env bash
# Starts a worker for both phases, the baseline of disaggregated runs. Needs launch/frontend.sh.
# Machine: the GPUs of its engine file, or a few CPU cores with ENGINE=embedded.
# Launch:  MODEL=path/to/model launch/agg_worker.sh [more arguments for the worker]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
become_worker agg 8081 "$@"
