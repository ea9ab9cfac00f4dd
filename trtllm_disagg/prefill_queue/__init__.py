"""Prefills in a global queue on NATS JetStream: a worker that needs one pushes, prefill workers pull (decision 12)."""

from trtllm_disagg.prefill_queue.queue import NoPrefillQueue, PrefillQueue, open_prefill_queue

__all__ = ["NoPrefillQueue", "PrefillQueue", "open_prefill_queue"]
