#!/usr/bin/env bash
# Starts a frontend, a prefill and a decode worker by `trtllm-disagg up`, which has more flags.
# Launch: MODEL=path/to/model launch/disagg.sh prefill_first|decode_first|auto|router [more arguments for both workers]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
STRATEGY=${1:-$STRATEGY} && exec_up "${@:2}"
