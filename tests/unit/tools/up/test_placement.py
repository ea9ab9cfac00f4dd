"""Which nodes and GPUs the workers of a Slurm job get, and how many ranks a worker has."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.for_scripts import WorkerGroup, describe_ranks, main, place
from trtllm_disagg.tools.up.plan import BEYOND_DRAIN_SECONDS

FOUR = ("0", "1", "2", "3")
WORKER = ("--model", "m", "--disaggregation-mode", "prefill")


def lines(nodes: str, *groups: str, gpus: tuple[str, ...] = FOUR) -> list[str]:
    return [
        str(each) for each in place([WorkerGroup.parse(group) for group in groups], nodes.split(","), gpus)
    ]


def test_workers_of_one_node_have_gpus_of_their_own() -> None:
    assert lines("a", "prefill:2:1", "decode:1:2") == [
        "prefill a 1 1 1 0",
        "prefill a 1 1 1 1",
        "decode a 1 2 2 2,3",
    ]


def test_a_worker_over_two_nodes_has_them_whole() -> None:
    assert lines("a,b,c", "prefill:1:2", "decode:1:8") == ["prefill a 1 2 2 0,1", "decode b,c 2 8 4 0,1,2,3"]


def test_a_worker_that_fits_on_a_node_is_not_divided() -> None:
    assert lines("a,b", "prefill:1:3", "decode:1:3") == ["prefill a 1 3 3 0,1,2", "decode b 1 3 3 0,1,2"]


def test_a_later_worker_fills_a_node_that_is_not_full() -> None:
    assert lines("a,b", "prefill:1:3", "decode:1:4", "agg:1:1")[-1] == "agg a 1 1 1 3"


def test_without_gpus_workers_take_turns_on_the_nodes() -> None:
    placed = lines("a,b", "prefill:2:2", "decode:1:1", gpus=())
    assert placed == ["prefill a 1 2 2 -", "prefill b 1 2 2 -", "decode a 1 1 1 -"]


@pytest.mark.parametrize(
    ("nodes", "group", "words"),
    [
        ("a", "prefill:1:8", "1 nodes with 4 GPUs each have no room for 1 prefill workers of 8 ranks"),
        ("a", "decode:3:2", "no room for 3 decode workers of 2 ranks"),
        ("a,b", "decode:1:6", "a decode worker has 6 ranks, and a node 4 GPUs"),
        ("a", "prefill:0:1", "PREFILL_WORKERS: '0' is not allowed; expected a number from 1 up"),
        ("a", "agg:two:1", "AGG_WORKERS: 'two' is not allowed"),
    ],
)
def test_what_does_not_fit_is_refused(nodes: str, group: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lines(nodes, group)


@pytest.mark.parametrize(
    ("engine", "sizes", "told"),
    [
        (
            "tensorrt_llm",
            "tensor_parallel_size: 4\npipeline_parallel_size: 2",
            "8 yes pmix trtllm-llmapi-launch",
        ),
        ("tensorrt_llm", "max_batch_size: 8", "1 yes pmix trtllm-llmapi-launch"),
        ("embedded", "tensor_parallel_size: 2", "2 no pmi2"),
    ],
)
def test_a_worker_has_the_ranks_of_its_engine_config(
    tmp_path: Path, engine: str, sizes: str, told: str
) -> None:
    config = tmp_path / "prefill.yaml"
    config.write_text(f"{sizes}\ncache_transceiver_config: {{backend: DEFAULT}}\n")
    arguments = (*WORKER, "--engine", engine, "--extra-engine-args", str(config))
    assert describe_ranks(arguments, {}) == told


def test_a_size_of_the_command_line_counts_in_both_spellings() -> None:
    agg = ("--model", "m", "--engine", "tensorrt_llm")
    assert describe_ranks((*agg, "--tensor-parallel-size", "2"), {}).split()[0] == "2"
    assert describe_ranks((*agg, "--trtllm.tensor_parallel_size", "4"), {}).split()[0] == "4"


@pytest.mark.parametrize("there", ["--model", "--custom-jinja-template"])
def test_files_that_only_the_nodes_container_has_are_left_to_the_worker(there: str) -> None:
    agg = ("--model", "m", "--engine", "tensorrt_llm", "--tensor-parallel-size", "2", there, "/in/container")
    assert describe_ranks(agg, {}) == "2 yes pmix trtllm-llmapi-launch"


def test_a_worker_with_a_model_of_its_container_has_its_time_to_stop(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["stop", "--model", "/in/container", "--engine", "tensorrt_llm"])
    assert int(capsys.readouterr().out) == 30 + BEYOND_DRAIN_SECONDS + 60


def test_worker_flags_that_the_worker_would_refuse_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'/none\.yaml' is not allowed; expected a YAML file that exists"):
        describe_ranks((*WORKER, "--engine", "embedded", "--extra-engine-args", "/none.yaml"), {})
