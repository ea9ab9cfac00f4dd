"""`python -m trtllm_disagg.worker`: `trtllm-disagg worker`, for scripts that can name a module only."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "worker")
    runpy.run_module("trtllm_disagg", run_name="__main__", alter_sys=True)
