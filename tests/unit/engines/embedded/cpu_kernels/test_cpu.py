"""What may be used of a processor: its own flags, one setting that lowers it, and what torch and numba were told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_disagg.engines.embedded.cpu_kernels.cpu import (
    SETTING,
    CpuFeatures,
    environment_of,
    features_of,
    first_level_cache,
    this_cpu,
)
from trtllm_disagg.errors import ConfigError

AVX2 = frozenset({"sse2", "avx", "avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
BFLOAT16 = AVX512 | {"avx512_bf16"}
AMX = BFLOAT16 | {"amx_bf16", "amx_tile"}


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", AMX, CpuFeatures("avx512", True, True)),
        ("x86_64", BFLOAT16, CpuFeatures("avx512", True)),
        ("x86_64", AVX512, CpuFeatures("avx512")),
        ("x86_64", AVX2, CpuFeatures("avx2")),
        ("x86_64", AVX2 - {"fma"}, CpuFeatures("torch")),
        ("x86_64", frozenset(), CpuFeatures("torch")),
        ("aarch64", frozenset({"asimd", "bf16"}), CpuFeatures("neon")),
        ("riscv64", frozenset(), CpuFeatures("torch")),
    ],
)
def test_cpu_level_follows_the_cpu_flags(machine: str, flags: frozenset[str], expected: CpuFeatures) -> None:
    assert features_of({}, machine, flags) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({SETTING: "native"}, CpuFeatures("avx512", True, True)),
        ({SETTING: ""}, CpuFeatures("avx512", True, True)),
        ({SETTING: "avx2"}, CpuFeatures("avx2")),
        ({SETTING: "torch"}, CpuFeatures("torch")),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, CpuFeatures("avx2")),
        ({"ATEN_CPU_CAPABILITY": "avx512"}, CpuFeatures("avx512", True, True)),
        ({"ONEDNN_MAX_CPU_ISA": "avx2"}, CpuFeatures("avx2")),
        ({"DNNL_MAX_CPU_ISA": "AVX2_VNNI_2"}, CpuFeatures("avx2")),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, CpuFeatures("avx512")),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, CpuFeatures("avx512", True)),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, CpuFeatures("avx512", True, True)),
        ({"NUMBA_CPU_FEATURES": "+avx,+avx2"}, CpuFeatures("avx2")),
        ({"NUMBA_CPU_FEATURES": "+avx2,+avx512f"}, CpuFeatures("avx512", False, True)),
    ],
    ids=str,
)
def test_cpu_level_is_bounded_by_library_variables(
    environment: dict[str, str], expected: CpuFeatures
) -> None:
    assert features_of(environment, "x86_64", AMX) == expected


@pytest.mark.parametrize("value", ["avx512", "AVX2", "fast"])
def test_an_unknown_level_is_refused_with_what_is_allowed(value: str) -> None:
    with pytest.raises(ConfigError, match=f"{SETTING}.*{value}.*native, avx2, torch"):
        features_of({SETTING: value}, "x86_64", AVX2)


def test_a_level_that_the_machine_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"{SETTING}.*avx2.*native or torch"):
        features_of({SETTING: "avx2"}, "aarch64", frozenset({"asimd"}))


def test_cpu_features_text_for_each_level() -> None:
    told = [str(features_of({}, "x86_64", flags)) for flags in (AMX, BFLOAT16, AVX2)]
    assert told == ["avx512 with bfloat16 and AMX", "avx512 with bfloat16", "avx2"]


@pytest.mark.parametrize(("said", "expected"), [("48K\n", 48 << 10), ("", 32 << 10), (None, 32 << 10)])
def test_first_level_cache_is_what_linux_says_or_the_usual_size(
    said: str | None, expected: int, tmp_path: Path
) -> None:
    if said is not None:
        (tmp_path / "size").write_text(said)
    assert first_level_cache(tmp_path) == expected


def test_first_level_cache_of_this_machine_has_a_plausible_size() -> None:
    assert 8 << 10 <= first_level_cache() <= 1 << 20


@pytest.mark.skipif(not this_cpu().level.startswith("avx"), reason="no x86-64")
def test_a_process_at_avx2_finds_torch_and_numba_there() -> None:
    program = """
import torch
from numba.core.registry import cpu_target
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
numba = str(cpu_target.target_context.codegen().magic_tuple())
print(this_cpu(), torch.backends.cpu.get_cpu_capability(), "+avx512f" in numba)
"""
    environment = dict(os.environ) | {SETTING: "avx2"}
    environment |= environment_of(environment)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["avx2", "AVX2", "False"]
