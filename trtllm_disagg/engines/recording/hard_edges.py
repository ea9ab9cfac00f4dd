"""Surprises of TensorRT-LLM behind its API, one switch each; and its errors.

File names are of TensorRT-LLM's source, below `tensorrt_llm/`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


class RequestError(RuntimeError):
    """This request failed; the engine continues. Without a category (executor/utils.py)."""


class EngineDeadError(RuntimeError):
    """The engine has ended (executor/utils.py)."""


class EventLoopShutdownError(Exception):
    """The event loop of an iterator's first caller is closed (llmapi/utils.py)."""


#: Error of a failed KV transfer (_torch/pyexecutor/py_executor.py, and since autumn 2026
#: _torch/disaggregation/orchestration/coordinator.py).
GENERATION_TRANSFER_ERROR = "Error in kv cache transfer for generation requests"


@dataclass(frozen=True, slots=True)
class HardEdges:
    """Off: behaves like the embedded engine."""

    #: `get_stats_async` and `get_kv_cache_events_async` block the calling thread for up to their timeout; then the
    #: iterator waits as long again (executor/proxy.py, executor/rpc_worker_mixin.py, #9980).
    blocks_for_news: bool = False
    #: One iterator of each kind for life, bound to its first caller's event loop. Once that loop is closed, a call
    #: appends one record, raises, and loses the rest; another loop cannot wait for more. Calls that return lists still
    #: work (executor/executor.py `_maybe_initialize_iteration_results`, llmapi/utils.py `AsyncQueue`).
    binds_iterators_to_first_loop: bool = False
    #: Without enable_iter_perf_stats or event_buffer_max_size: no records, and no error (executor/base_worker.py).
    is_silent_when_off: bool = False
    #: `abort` after the last response is logged and dropped, so unfetched KV stays until kv_transfer_timeout_ms is
    #: over (executor/base_worker.py `abort_request`; measured in ai-dynamo/dynamo#14507).
    keeps_kv_of_ended_requests: bool = False
    #: A request that raised is not `finished`; iterating it again waits for ever (executor/result.py).
    never_finishes_after_error: bool = False
    #: Too long prompts raise RequestError: above max_num_tokens in `generate_async` (llmapi/llm.py
    #: `_check_arguments`), from max_seq_len on in the stream (executor/base_worker.py `_deduce_max_tokens`).
    has_request_errors_for_length: bool = False
    #: C++ takes `ctx_info_endpoint` as a string; a list raises an uncaught error that ends the engine's process
    #: (disaggregated_params.py, executor/base_worker.py `_enqueue_request`).
    takes_one_endpoint: bool = False
    #: Without a tokenizer (skip_tokenizer_init) a request must set end_id (llmapi/llm.py `_prepare_sampling_params`).
    needs_end_id_without_tokenizer: bool = False
    #: Writes into the caller's SamplingParams: the tokenizer's end_id and pad_id, and max_tokens 1 for a prefill
    #: (llmapi/llm.py `_prepare_sampling_params`, `generate_async`).
    changes_sampling_params: bool = False
    #: Under attention DP the receiver needs the sender's rank (_torch/disaggregation/native/transfer.py).
    needs_ctx_dp_rank: bool = False
    #: A prefill's answer has its id only as ctx_request_id (executor/result.py), but the Python transceiver finds KV by
    #: disagg_request_id (_torch/disaggregation/base/transfer.py `get_unique_rid`).
    reports_only_ctx_request_id: bool = False
    #: A prefill's answer has the first token only among its tokens: the Python transceiver passes none on, and C++
    #: (`createResult` of the batch manager's llmRequest.cpp) does in some versions.
    omits_first_token_of_handoff: bool = False
    #: Aborting a request that waits behind max_batch_size others removes it from the engine's queue without a response,
    #: so its result never ends (_torch/pyexecutor/py_executor.py `_handle_canceled_requests`).
    forgets_aborted_in_queue: bool = False
    #: A request with more choices than max_batch_size is accepted (llmapi/llm.py `_check_arguments`) and blocks the
    #: engine's queue for ever (`_get_from_waiting_queue` of executor_request_queue.py).
    is_blocked_by_too_many_choices: bool = False
    #: Of several choices only the last to end has a finish reason, in the final response of all
    #: (executor/result.py `_handle_sequence`; `createResult` of the batch manager's llmRequest.cpp).
    reports_only_the_last_end: bool = False
    #: A decode limited to one token makes two: the next step counts the prefill's
    #: (_torch/pyexecutor/py_executor.py `_prepare_disagg_gen_transmission_complete`; #16691).
    decodes_past_a_limit_of_one: bool = False
    #: On an abort before the first output of a request for prompt logprobs, the thread of responses asserts context
    #: logits. It loses all responses of that step, and raises the error for another request
    #: (executor/base_worker.py `_compute_pytorch_prompt_logprobs`).
    fails_others_at_aborted_prompts: bool = False
    #: Prompt logprobs cover the computed tokens but count from the prompt's start, so after a cached prefix they belong
    #: to other tokens (executor/base_worker.py, the same function).
    counts_logprobs_behind_cached: bool = False
    #: Only a step frees KV that was fetched or timed out, and the engine steps only with a request, so the last
    #: statistic still counts it (tests/unittest/llmapi/test_llm_pytorch.py sends a request after the timeout, and finds
    #: no used block in its statistic).
    counts_kv_in_steps: bool = False
    #: Most input processors make text of the tokens of a prompt with images and then other tokens of it, for which they
    #: need the tokenizer (inputs/registry.py, `supports_token_id_mm_expansion`).
    retokenises_prompts_with_images: bool = False
    #: A prefill's answer has `multimodal_hashes` only after an encode worker (executor/result.py `_handle_response`).
    omits_image_hashes: bool = False
    #: A decode has no image hashes, so block reuse finds any image's blocks behind equal text, and fetches only the
    #: others: an answer about another image (llmapi/llm.py `_preprocess`; `getBlockRangeForReceiving` of the batch
    #: manager's cacheFormatter.cpp).
    reuses_other_images_in_decode: bool = False
    #: The next call of any kind raises the cause of the engine process's death; later calls raise that the LLM is
    #: shutting down (executor/executor.py `_handle_background_error`).
    raises_what_it_died_of: bool = False
    #: `_check_health` of a dead engine raises the background threads' error (executor/proxy.py).
    raises_when_unhealthy: bool = False
    #: `abort` sends a message to the engine's process, and blocks once it is dead (executor/proxy.py `abort_request`,
    #: executor/ipc.py).
    blocks_aborts_when_dead: bool = False


FORGIVING = HardEdges()
PESSIMISTIC = HardEdges(**{edge.name: True for edge in fields(HardEdges)})
