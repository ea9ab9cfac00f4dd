"""`--help` answers at once: no command loads what only its work needs."""

from __future__ import annotations

import subprocess
import sys

#: Each takes longer to load than all that `--help` needs.
LIBRARIES = (
    *(
        "dynamo",
        "huggingface_hub",
        "numpy",
        "prometheus_client",
        "pydantic",
        "rich",
        "tensorrt_llm",
        "textual",
    ),
    *("tokenizers", "torch", "transformers", "uvloop", "zmq"),
)
LOADED = f"""
import sys
from trtllm_disagg.completion import whole_parser
whole_parser().format_help()
print(*sorted(set({LIBRARIES}) & set(sys.modules)))
"""


def test_no_help_loads_a_library_that_only_the_work_needs() -> None:
    ended = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("\n", "")
