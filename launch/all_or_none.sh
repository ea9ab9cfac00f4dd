#!/usr/bin/env bash
# COMMAND [ARG...]: a worker under trtllm-llmapi-launch, which runs it beside the first rank and waits for the ranks
# only. When the worker fails, the others would wait for ever: so all of this task ends, and with it (srun
# --kill-on-bad-exit, mpirun) the ranks of the other nodes. launch/mpi.sh and launch/slurm/ start it.
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
fi
trap : INT TERM # they reach the worker too, which drains
"$@"
status=$?
if ((status != 0)); then
    echo "error: the worker ended with status $status; ending its ranks" >&2
    kill -TERM 0
fi
exit "$status"
