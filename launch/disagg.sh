#!/usr/bin/env bash
# Frontend, one prefill and one decode worker on this machine, by `trtllm-disagg up`, which has more flags.
# Launch: MODEL=path/to/model launch/disagg.sh prefill_first|decode_first|auto|router [more arguments for both workers]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
STRATEGY=${1:-$STRATEGY} && exec_up "${@:2}"
