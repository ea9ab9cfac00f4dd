"""What the KV router learns from a worker: cache events and load. Or nothing, when publishing is off."""

from __future__ import annotations

from trtllm_disagg.publisher.base import NullPublisher, Publisher

__all__ = ["NullPublisher", "Publisher"]
