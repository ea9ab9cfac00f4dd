"""benchmarks/transfer.py: do the bytes arrive, are ranges and rates computed right, is a wrong byte noticed?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import transfer
from trtllm_disagg.engines.embedded.kv_transfer.shared_memory import huge_page_tensor
from trtllm_disagg.errors import KvTransferError

SHAPES, PATTERNS, MEMCPY = transfer.SHAPES, transfer.PATTERNS, transfer.MEMCPY
TINY = transfer.KvShape(
    "tiny", layers=2, kv_heads=1, head_dim=8, dtype="float32", prompt_blocks=8, tokens_per_block=8
)


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


def filled_and_empty() -> tuple[torch.Tensor, torch.Tensor]:
    source, target = huge_page_tensor((1 << 16,), torch.uint8), huge_page_tensor((1 << 16,), torch.uint8)
    transfer.fill(source)
    return source, target


def test_process_vm_readv_moves_exactly_the_ranges() -> None:
    source, target = filled_and_empty()
    # More than one call takes.
    ranges = np.asarray([[16 * i, 16 * (4095 - i), 16] for i in range(0, 4096, 2)], np.int64)
    transfer.reading(os.getpid(), source.data_ptr(), target.data_ptr(), ranges)()
    for remote, local, count in ranges.tolist():
        assert np.array_equal(target.numpy()[local : local + count], transfer.filled_bytes(remote, count))
    assert int((target != 0).sum()) <= len(ranges) * 16


@pytest.mark.parametrize("pattern", PATTERNS)
def test_memcpy_copies_exactly_the_given_blocks(pattern: str) -> None:
    remote, local = TINY.blocks(pattern, seed=1), TINY.blocks(pattern, seed=2)
    source, target = transfer.copy_pools(TINY, "cpu")
    transfer.fill(torch.from_numpy(source))
    transfer.copying((source, target), TINY.ranges(remote, local))()
    assert np.array_equal(target[local], source[remote])
    untouched = [block for block in range(TINY.pool_blocks) if block not in local]
    assert not target[untouched].any()


# -- pulls


@pytest.fixture(params=["NIXL", "SHARED_MEMORY"])
def receiver(request: pytest.FixtureRequest) -> Iterator[Any]:
    with transfer.connected(request.param, TINY) as (_, _, receiver):
        yield receiver


def test_pulls_put_every_byte_in_its_place_and_a_wrong_one_is_noticed(receiver: Any) -> None:
    for pattern in PATTERNS:
        remote, local = TINY.blocks(pattern, seed=1), TINY.blocks(pattern, seed=2)
        assert receiver.pull(remote, local) > 0
        receiver.require_arrived(remote, local)
    receiver.pool[local[3], 1, 0, 2, 0, 5] = 0.0
    with pytest.raises(KvTransferError, match=f"block {remote[3]} did not arrive completely in {local[3]}"):
        receiver.require_arrived(remote, local)
    with pytest.raises(KvTransferError, match="did not arrive completely"):
        receiver.require_arrived(list(reversed(remote)), local)
    receiver.pull([], [])


def test_a_sender_that_cannot_start_is_an_error() -> None:
    with pytest.raises(KvTransferError, match="the sender has ended"), transfer.connected("NONE", TINY):
        pass


# -- the script


def test_it_measures_every_shape_and_transport(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(transfer, "SHAPES", {"tiny": TINY})
    transfer.main(["--rounds", "2", "--json", str(tmp_path / "times.json")])
    printed = capsys.readouterr().out
    nixl, shared = json.loads((tmp_path / "times.json").read_text())
    for result in (nixl, shared):
        assert {len(seconds) for seconds in result["seconds"].values()} == {2}
    assert "tiny over NIXL, cpu: 0 MiB" in printed
    assert printed.count("scattered share of memcpy: ") == 2
    assert printed.count("scattered share of process_vm_readv: ") == 1  # NIXL's alone


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--transport", "SHARED_MEMORY"], "--transport: expected with --device cuda: NIXL"),
        ([], "--device: expected cpu; torch sees no CUDA"),
    ],
)
def test_what_reaches_no_gpu_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        transfer.main(["--device", "cuda", *arguments])
    assert expected in capsys.readouterr().err


def test_shares_of_memcpy_and_of_the_system_call() -> None:
    seconds = {MEMCPY: [0.5, 1.0, 2.0], "contiguous": [0.5, 1.0, 2.0], "scattered": [1.0, 2.0, 4.0]}
    seconds |= {transfer.READV_OF[pattern]: [0.5, 1.0, 2.0] for pattern in PATTERNS}
    assert {what: percent for what, percent, _ in transfer.verdicts(seconds, "NIXL")} == {
        "contiguous share of memcpy": 100.0,
        "contiguous share of process_vm_readv": 100.0,
        "scattered share of memcpy": 50.0,
        "scattered share of process_vm_readv": 50.0,
    }
