"""Where TensorRT-LLM is harder than its API looks, one switch each; its errors, and what its versions differ in.

The file names are those of TensorRT-LLM's source, below `tensorrt_llm/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from trtllm_disagg.engine.trtllm_version import TrtllmVersion
from trtllm_disagg.engines.embedded.params.request_params import get_global_disagg_request_id


class RequestError(RuntimeError):
    """This request failed; the engine goes on. It has no category (executor/utils.py)."""


class EngineDeadError(RuntimeError):
    """The engine has ended (executor/utils.py)."""


class EventLoopShutdownError(Exception):
    """The event loop of an iterator's first caller is closed (llmapi/utils.py)."""


#: What becomes of a KV transfer that failed (_torch/pyexecutor/py_executor.py, and since autumn 2026
#: _torch/disaggregation/orchestration/coordinator.py).
GENERATION_TRANSFER_ERROR = "Error in kv cache transfer for generation requests"


@dataclass(frozen=True, slots=True)
class HardEdges:
    """Off: as the embedded engine has it."""

    #: `get_stats_async` and `get_kv_cache_events_async` keep the calling thread for up to their timeout before there
    #: is an iterator, which waits as long again for more (executor/proxy.py, executor/rpc_worker_mixin.py, #9980).
    blocks_for_news: bool = False
    #: There is one iterator of each kind for life, bound to the event loop of its first caller. Once that loop is
    #: closed, a call appends one record, raises, and loses the rest; another loop cannot wait for more. The calls that
    #: return lists go on (executor/executor.py `_maybe_initialize_iteration_results`, llmapi/utils.py `AsyncQueue`).
    binds_iterators_to_first_loop: bool = False
    #: Without enable_iter_perf_stats or event_buffer_max_size there is nothing, and no error (executor/base_worker.py).
    is_silent_when_off: bool = False
    #: `abort` after the last response is logged and dropped, so KV that no decode fetches stays until
    #: kv_transfer_timeout_ms is over (executor/base_worker.py `abort_request`; measured in ai-dynamo/dynamo#14507).
    keeps_kv_of_ended_requests: bool = False
    #: A request that raised is not `finished`, and to iterate it once more waits for ever (executor/result.py).
    never_finishes_after_error: bool = False
    #: A prompt that is too long is a RequestError: out of `generate_async` above max_num_tokens (llmapi/llm.py
    #: `_check_arguments`), out of the stream from max_seq_len on (executor/base_worker.py `_deduce_max_tokens`).
    has_request_errors_for_length: bool = False
    #: `ctx_info_endpoint` is a string for C++; a list fails where nothing catches it, and the engine's process ends
    #: (disaggregated_params.py, executor/base_worker.py `_enqueue_request`).
    takes_one_endpoint: bool = False
    #: Without a tokenizer (skip_tokenizer_init) a request has to name its end_id (llmapi/llm.py
    #: `_prepare_sampling_params`).
    needs_end_id_without_tokenizer: bool = False
    #: The caller's SamplingParams become the request's: the tokenizer's end_id and pad_id are written into them, and
    #: max_tokens 1 for a prefill (llmapi/llm.py `_prepare_sampling_params`, `generate_async`).
    changes_sampling_params: bool = False
    #: Under attention DP the receiver has to be told the sender's rank (_torch/disaggregation/native/transfer.py).
    needs_ctx_dp_rank: bool = False
    #: The answer to a prefill tells its id as ctx_request_id alone (executor/result.py), and the Python transceiver
    #: finds KV by disagg_request_id (_torch/disaggregation/base/transfer.py `get_unique_rid`).
    tells_ctx_request_id_alone: bool = False
    #: An abort takes a request that waits behind max_batch_size others out of the engine's queue, and no response is
    #: sent: its result never ends (_torch/pyexecutor/py_executor.py `_handle_canceled_requests`).
    forgets_aborted_in_queue: bool = False
    #: More choices than max_batch_size are accepted (llmapi/llm.py `_check_arguments`), and the request waits for ever
    #: at the head of the engine's queue, with all behind it (`_get_from_waiting_queue` of executor_request_queue.py).
    is_blocked_by_too_many_choices: bool = False
    #: Of several choices only the one that ends last has a finish reason: it comes with the response that is final for
    #: all of them (executor/result.py `_handle_sequence`; `createResult` of the batch manager's llmRequest.cpp).
    tells_the_last_end_alone: bool = False
    #: A decode that may make one token makes two: the prefill's is not counted before the next step
    #: (_torch/pyexecutor/py_executor.py `_prepare_disagg_gen_transmission_complete`; #16691 is about it).
    decodes_past_a_limit_of_one: bool = False
    #: KV that a decode has fetched, or that its timeout has ended, is let go of in a step, and the engine takes none
    #: without a request, so the last statistic still counts it (tests/unittest/llmapi/test_llm_pytorch.py sends a
    #: request behind the timeout, and finds no block used in the one statistic of that).
    counts_kv_in_steps: bool = False
    #: What the engine's process has died of is raised out of the next call, of whichever kind it is; those behind it
    #: are told that the LLM is shutting down (executor/executor.py `_handle_background_error`).
    raises_what_it_died_of: bool = False
    #: `_check_health` of a dead engine raises (executor/proxy.py hands on what the background threads met).
    raises_when_unhealthy: bool = False
    #: `abort` is a message to the engine's process, which its rank does not take once it is dead (executor/proxy.py
    #: `abort_request`, executor/ipc.py).
    blocks_aborts_when_dead: bool = False


FORGIVING = HardEdges()
PESSIMISTIC = HardEdges(**{edge.name: True for edge in fields(HardEdges)})


#: llmapi/disagg_utils.py: the first release that may have the function (`llm_api/1.2.0rc.json` has none), and the first
#: that splits its argument in two.
FIRST_WITH_GLOBAL_IDS = TrtllmVersion.parse("1.3.0rc1")
FIRST_WITH_PROCESS_ID = TrtllmVersion.parse("1.3.0rc22")


def _id_of_machine(machine_id: int) -> int:
    """Ten bits, as it was before there were processes."""
    if not 0 <= machine_id < 1 << 10:
        raise ValueError(f"machine_id must be in [0, 1024), got {machine_id}")
    return get_global_disagg_request_id(*divmod(machine_id, 64))


def global_id_function(version: str) -> Callable[..., int] | None:
    """`get_global_disagg_request_id` of llmapi/disagg_utils.py; None in a release without it."""
    wanted = TrtllmVersion.parse(version, "version")
    if wanted < FIRST_WITH_GLOBAL_IDS:
        return None
    return _id_of_machine if wanted < FIRST_WITH_PROCESS_ID else get_global_disagg_request_id
