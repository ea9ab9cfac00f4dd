"""What tests of several tools start."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.pages import Pages

STEPS: dict[str, Any] = {
    "step_ms": 8.0,
    "prefill_token_us": 60.0,
    "decode_token_us": 250.0,
    "kv_pool_tokens": 10**7,
    "kv_bytes_per_token": 131072,
}
MODELLED: dict[str, Any] = {"measured": STEPS, "link_gb_per_second": 50.0, "link_latency_us": 100.0}


@pytest.fixture
def pages() -> Iterator[Pages]:
    with Pages() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def modelled_flags(tmp_path: Path) -> list[str]:
    """A model without weights, and engine files of the modelled engine."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 3072, "max_position_embeddings": 16384}))
    for role in ("agg", "prefill", "decode"):
        content = {"max_seq_len": 16384, "modelled": MODELLED, "enable_chunked_prefill": True}
        (tmp_path / f"{role}.yaml").write_text(yaml.safe_dump(content))
    return ["--model", str(tmp_path), "--engine-configs", str(tmp_path)]
