"""The process that compiles a grammar before the engine core does, and may be ended over it. `python -m`, started by
trials.py.

Standard input: a TrialStart, then one grammar a line, all JSON. Standard output: an empty line when it has started,
and one for each grammar that was compiled or refused in time. A grammar that takes more ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

import msgspec

from trtllm_disagg.engines.embedded.guided_decoding.grammars import Matchers, read_guide_tokenizer
from trtllm_disagg.engines.embedded.guided_decoding.trials import TrialStart
from trtllm_disagg.errors import InvalidRequestError


def main() -> None:
    # These reach the whole process group; this process ends with its standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=TrialStart)
    matchers = Matchers(read_guide_tokenizer(Path(start.tokenizer)), start.vocab_size, start.end_ids)
    _limit_memory(start.memory_bytes)
    print(flush=True)
    for line in sys.stdin.buffer:
        grammar = json.loads(line)
        # Its signal ends the process wherever it is.
        signal.setitimer(signal.ITIMER_PROF, start.cpu_seconds)
        _try(matchers, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(flush=True)


def _try(matchers: Matchers, grammar: str) -> None:
    try:
        matchers.compile(grammar)
    except InvalidRequestError:
        """The engine core finds the same, and tells the client."""


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
