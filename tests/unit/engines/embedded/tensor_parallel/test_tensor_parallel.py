"""Two ranks answer what one does: in float32 every logit of every schedule, bit for bit."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.ranks import BACKENDS, NEW_TOKENS, PROMPTS, Answers, Logits, record_all
from trtllm_disagg.engines.embedded.params.model_config import FAMILIES

KINDS = [*(f"{family}-auto" for family in FAMILIES), "qwen3-transformers"]
MPIEXEC = str(Path(sysconfig.get_path("scripts")) / "mpiexec")
_SECONDS = 120


@pytest.fixture(scope="module")
def by_two(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """kind -> what two ranks, each with half of the heads, answered."""
    directory = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        (directory / family).symlink_to(checkpoints(family))
    command = [
        MPIEXEC,
        "-n",
        "2",
        sys.executable,
        "-m",
        "tests.support.ranks",
        str(directory / "answers"),
        *KINDS,
    ]
    subprocess.run(command, check=True, timeout=_SECONDS)
    answers: dict[str, Answers] = torch.load(directory / "answers")
    shutil.rmtree(directory)
    return answers


def record_by_one(kind: str, checkpoints: Checkpoints) -> Logits:
    family, _, forward = kind.partition("-")
    answers = record_all(lambda **args: Core(checkpoints(family), embedded={"forward": forward}, **args))
    assert len(answers["solo"]) == len(PROMPTS) * NEW_TOKENS
    return answers["solo"]


def assert_same_bits(answers: Answers, expected: Logits) -> None:
    for schedule, rows in answers.items():
        different = [key for key in rows if not torch.equal(rows[key], expected[key])]
        assert not different, f"{schedule}: (prompt, position) with other bits: {different}"
        assert rows.keys() == expected.keys(), schedule


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_logits_of_one(
    kind: str, by_two: dict[str, Answers], checkpoints: Checkpoints
) -> None:
    answers, expected = by_two[kind], record_by_one(kind, checkpoints)
    assert answers.keys() == {"solo", "reused", "chunked"}
    assert_same_bits(answers, expected)


def test_prefill_and_decode_may_have_other_numbers_of_ranks(
    by_two: dict[str, Answers], checkpoints: Checkpoints
) -> None:
    answers = by_two["handoffs"]
    assert len(answers) == 3 * len(BACKENDS)
    assert_same_bits(answers, record_by_one(KINDS[0], checkpoints))
