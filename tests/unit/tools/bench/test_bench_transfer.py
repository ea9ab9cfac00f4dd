"""`bench transfer`: do the bytes arrive, are ranges and rates computed right, is a wrong byte noticed?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from trtllm_disagg import cli
from trtllm_disagg.engines.embedded.kv_transfer import transports
from trtllm_disagg.engines.embedded.kv_transfer.shared_memory import huge_page_tensor
from trtllm_disagg.errors import ConfigError, KvTransferError
from trtllm_disagg.tools.bench import kv_shapes
from trtllm_disagg.tools.bench.figures import Figure
from trtllm_disagg.tools.bench.kv_ends import (
    CopyPools,
    ProcessVmReadv,
    Receiver,
    connected,
    fill,
    filled_bytes,
)
from trtllm_disagg.tools.bench.kv_shapes import SHAPES, KvShape
from trtllm_disagg.tools.bench.report import figures_of
from trtllm_disagg.tools.bench.transfer import (
    MEMCPY,
    NO_BLOCK,
    ONE_BLOCK,
    PATTERNS,
    PullTimes,
    memcpy_of,
    readv_of,
    section_of,
)

TINY = KvShape(
    "tiny", layers=2, kv_heads=1, head_dim=8, dtype="float32", prompt_tokens=64, tokens_per_block=8
)


# -- shapes and blocks


@pytest.mark.parametrize(("name", "mib"), [("8b-bf16", 512), ("0.5b-fp32", 96)])
def test_a_4k_prompt_has_the_bytes_of_its_shape(name: str, mib: int) -> None:
    assert SHAPES[name].prompt_tokens == 4096
    assert SHAPES[name].prompt_bytes == mib << 20
    assert SHAPES[name].pool_bytes == 2 * SHAPES[name].prompt_bytes


def test_every_transport_of_the_engine_can_be_chosen() -> None:
    assert tuple(transports.TRANSPORTS) == kv_shapes.TRANSPORTS


def test_contiguous_blocks_are_one_run_and_scattered_ones_have_no_neighbours() -> None:
    run = TINY.blocks("contiguous", seed=1)
    assert run == list(range(run[0], run[0] + 8))
    remote, local = TINY.blocks("scattered", seed=1), TINY.blocks("scattered", seed=2)
    assert remote != local
    for blocks in (remote, local):
        assert len(set(blocks)) == 8
        assert max(blocks) < TINY.pool_blocks
        assert 1 not in np.abs(np.diff(blocks))


def test_ranges_merge_neighbours_on_both_sides_only() -> None:
    size = TINY.block_bytes
    assert TINY.ranges([2, 3, 4], [7, 8, 9]).tolist() == [[2 * size, 7 * size, 3 * size]]
    assert len(TINY.ranges([2, 3, 4], [7, 9, 8])) == 3
    assert TINY.ranges([5, 2, 3], [1, 8, 9]).tolist() == [
        [2 * size, 8 * size, 2 * size],
        [5 * size, size, size],
    ]


# -- the yardsticks


def test_process_vm_readv_moves_exactly_the_ranges() -> None:
    source, target = huge_page_tensor((1 << 16,), torch.uint8), huge_page_tensor((1 << 16,), torch.uint8)
    fill(source)
    ranges = np.asarray([[256 * i, 256 * (255 - i), 256] for i in range(0, 256, 2)], np.int64)
    ProcessVmReadv(os.getpid(), source.data_ptr(), target.data_ptr(), ranges)()
    for remote, local, count in ranges.tolist():
        assert np.array_equal(target.numpy()[local : local + count], filled_bytes(remote, count))
    assert int((target != 0).sum()) <= len(ranges) * 256


def test_process_vm_readv_takes_more_ranges_than_one_call_does() -> None:
    source, target = huge_page_tensor((1 << 16,), torch.uint8), huge_page_tensor((1 << 16,), torch.uint8)
    fill(source)
    ranges = np.asarray([[16 * i, 16 * i, 16] for i in range(4096)], np.int64)
    ProcessVmReadv(os.getpid(), source.data_ptr(), target.data_ptr(), ranges)()
    assert torch.equal(source, target)


def test_process_vm_readv_of_no_process_is_an_error() -> None:
    with pytest.raises(OSError, match="No such process"):
        ProcessVmReadv(2**22 + 1, 4096, 4096, np.asarray([[0, 0, 16]], np.int64))()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_memcpy_copies_exactly_the_given_blocks(pattern: str) -> None:
    remote, local = TINY.blocks(pattern, seed=1), TINY.blocks(pattern, seed=2)
    pools = CopyPools(TINY)
    fill(torch.from_numpy(pools.source))
    pools.copying(TINY.ranges(remote, local))()
    assert np.array_equal(pools.target[local], pools.source[remote])
    untouched = [block for block in range(TINY.pool_blocks) if block not in local]
    assert not pools.target[untouched].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_page_memory_is_zeroed_aligned_and_writable(dtype: torch.dtype) -> None:
    pool = huge_page_tensor((3, 2, 5, 7), dtype)
    assert (pool.shape, pool.dtype, pool.is_contiguous()) == ((3, 2, 5, 7), dtype, True)
    assert pool.data_ptr() % (2 << 20) == 0
    assert not pool.any()
    pool[2, 1, 4, 6] = 1
    assert pool.flatten()[-1] == 1


# -- pulls


@pytest.fixture(params=["NIXL", "SHARED_MEMORY"])
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with connected(request.param, TINY) as (_, receiver):
        yield receiver


def test_pulls_put_every_byte_in_its_place_and_a_wrong_one_is_noticed(receiver: Receiver) -> None:
    for pattern in PATTERNS:
        remote, local = TINY.blocks(pattern, seed=1), TINY.blocks(pattern, seed=2)
        assert receiver.pull(remote, local) > 0
        receiver.require_arrived(remote, local)
    receiver.pool[local[3], 1, 0, 2, 0, 5] = 0.0
    with pytest.raises(KvTransferError, match=f"block {remote[3]} did not arrive whole in {local[3]}"):
        receiver.require_arrived(remote, local)
    with pytest.raises(KvTransferError, match="did not arrive whole"):
        receiver.require_arrived(list(reversed(remote)), local)
    receiver.pull([], [])


def test_a_sender_that_cannot_start_is_an_error() -> None:
    with (
        pytest.raises(KvTransferError, match=r"kv_ends:Sender: .*NONE"),
        connected("NONE", TINY),
    ):
        pass


# -- the command


def test_the_command_prints_figures_of_every_shape_and_transport(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    arguments = ["bench", "transfer", "--shape", "tiny", "--rounds", "2", "--json"]
    assert cli.run(arguments) == 0
    printed = capsys.readouterr()
    figures = {entry["figure"]: Figure(**entry) for entry in json.loads(printed.out)}
    for backend in ("NIXL", "SHARED_MEMORY"):
        assert f"tiny, {backend}: warming up" in printed.err
        assert figures[f"tiny {backend} contiguous share of memcpy"].target == ">= 85"
        assert figures[f"tiny {backend} scattered share of memcpy"].target == ">= 65"
        of_readv = figures[f"tiny {backend} scattered share of process_vm_readv"]
        assert of_readv.target == (">= 95" if backend == "NIXL" else None)
        assert figures[f"tiny {backend} blocks per request"].value == 8
        assert figures[f"tiny {backend} contiguous descriptors per request"].value == 1
        assert figures[f"tiny {backend} scattered descriptors per request"].value == 8
        assert figures[f"tiny {backend} one block"].unit == "ms"
        assert figures[f"tiny {backend} one block"].value > 0


def times_of(**seconds: list[float]) -> PullTimes:
    names = [MEMCPY, ONE_BLOCK, NO_BLOCK, *(of(p) for p in PATTERNS for of in (str, readv_of, memcpy_of))]
    every = {name: [0.5, 1.0, 2.0] for name in names}
    every |= seconds
    return PullTimes(SHAPES["8b-bf16"], "NIXL", 0.1, {"contiguous": 1, "scattered": 128}, every)


def test_a_transport_that_reaches_no_gpu_is_refused_with_those_that_do() -> None:
    expected = "--transport: 'SHARED_MEMORY' is not allowed; expected with --device cuda: NIXL"
    with pytest.raises(ConfigError, match=expected):
        cli.run(["bench", "transfer", "--device", "cuda", "--transport", "SHARED_MEMORY"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_gpu_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(
        ConfigError, match="--device: 'cuda' is not allowed; expected cpu; torch sees no CUDA"
    ):
        cli.run(["bench", "transfer", "--device", "cuda"])


def test_pulls_on_a_gpu_are_told_by_their_names_and_have_no_system_call_beside_them() -> None:
    seconds = {MEMCPY: [1.0], NO_BLOCK: [0.1], ONE_BLOCK: [0.2]}
    for pattern in PATTERNS:
        seconds |= {memcpy_of(pattern): [1.0], pattern: [2.0]}
    times = PullTimes(SHAPES["8b-bf16"], "NIXL", 0.1, dict.fromkeys(PATTERNS, 1), seconds, "cuda")
    figures = {f.figure: f for f in figures_of([section_of(times, "an H100")])}
    assert figures["8b-bf16 NIXL cuda contiguous share of memcpy"].value == 50.0
    assert not any("process_vm_readv" in name for name in figures)


def test_rates_and_shares_of_memcpy() -> None:
    times = times_of(contiguous=[0.5, 1.0, 2.0], scattered=[1.0, 2.0, 4.0])
    assert times.rate(MEMCPY).median == 0.5  # 512 MiB in one second
    assert times.share("contiguous").values == (100.0, 100.0, 100.0)
    assert times.share("scattered").median == 50.0
    figures = {figure.figure: figure for figure in figures_of([section_of(times)])}
    assert figures["8b-bf16 NIXL contiguous share of memcpy"].ok is True
    assert figures["8b-bf16 NIXL scattered share of memcpy"].ok is False
    assert figures["8b-bf16 NIXL contiguous share of process_vm_readv"].ok is True
    assert figures["8b-bf16 NIXL scattered share of process_vm_readv"].ok is False
    assert figures["8b-bf16 NIXL one block"].value == 1000.0
    assert figures["8b-bf16 NIXL first pull"].value == 100.0
