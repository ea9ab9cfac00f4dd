"""A worker, by its arguments, on the stand-in of TensorRT-LLM: at SIGUSR1 its engine dies, and never shuts down."""

from __future__ import annotations

import signal
import sys
import threading

from trtllm_disagg.cli import main
from trtllm_disagg.testing.mounted import mounted_recording_llm
from trtllm_disagg.testing.recording import LLM


def _die_at_the_signal() -> None:
    signal.sigwait([signal.SIGUSR1])
    for llm in LLM.instances:
        llm.may_shut_down.clear()
        llm.die(RuntimeError("rank 3 is gone"))


if __name__ == "__main__":
    # For that thread alone: the others inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    threading.Thread(target=_die_at_the_signal, daemon=True).start()
    with mounted_recording_llm():
        main(["worker", *sys.argv[1:]])
