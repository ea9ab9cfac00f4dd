"""Decides which features of this processor the engine may use; no other file does.

`TRTLLM_DISAGG_CPU_LEVEL` lowers the level. torch, oneDNN and numba detect the processor when they are imported, so the
engine's process gets a lower level through their own variables. If a user has set those, the level is at most theirs.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from trtllm_disagg.errors import ConfigError

#: torch: no compiled kernel and no operator that is private to torch.
Level = Literal["avx512", "avx2", "neon", "torch"]
SETTING = "TRTLLM_DISAGG_CPU_LEVEL"
_LOWERED = ("avx2", "torch")
_ALLOWED = ("native", *_LOWERED)

_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX2 = {"avx2", "fma"}
#: As oneDNN orders them, from the first that counts as AVX-512; what is not here is below.
_ONEDNN_WITHOUT_BFLOAT16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
_ONEDNN_WITHOUT_AMX = (*_ONEDNN_WITHOUT_BFLOAT16, "AVX512_CORE_BF16", "AVX512_CORE_FP16")
_ONEDNN_UNBOUND = ("", "ALL", "DEFAULT")
#: LLVM's x86-64-v3, which is AVX2 with what every such processor has besides.
_X86_64_V3 = (
    "avx avx2 bmi bmi2 cmov cx16 cx8 f16c fma fxsr lzcnt mmx movbe popcnt sahf "
    "sse sse2 sse3 sse4.1 sse4.2 ssse3 xsave"
)
_AVX2_ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NUMBA_CPU_NAME": "x86-64-v3",
    "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in _X86_64_V3.split()),
}
#: How OpenMP's threads wait for work, and for each other: 20 us, then asleep. Threads that spin for longer starve
#: other workers; those that sleep at once come late to each product of a prefill (docs/log/cpu-kernels.md).
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
#: arch/x86/include/uapi/asm/prctl.h, and the system call's number on x86-64.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
#: Of the first processor: its first-level cache of data, as Linux tells it.
_FIRST_LEVEL = Path("/sys/devices/system/cpu/cpu0/cache/index0")
_MALLOC = "GLIBC_TUNABLES"
#: With it glibc's malloc asks for huge pages, which Linux gives to processes that ask. With pages of 4 KiB a processor
#: spends much of a small step, which reads every weight once, on looking up addresses (docs/log/cpu-kernels.md).
_HUGE_PAGES = "glibc.malloc.hugetlb"


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    level: Level
    #: Multiplies bfloat16 numbers. Else bfloat16 only stores float32.
    has_bfloat16: bool = False
    #: Multiplies tiles of bfloat16.
    has_amx: bool = False

    @property
    def compiles(self) -> bool:
        """May kernels be compiled for it?"""
        return self.level != "torch"

    @property
    def vector_registers(self) -> tuple[int, int]:
        """Their number, and the float32 numbers in each."""
        return {"avx512": (32, 16), "avx2": (16, 8), "neon": (32, 4), "torch": (16, 4)}[self.level]

    def __str__(self) -> str:
        more = [name for name, has in (("bfloat16", self.has_bfloat16), ("AMX", self.has_amx)) if has]
        return " with ".join([self.level, " and ".join(more)] if more else [self.level])


def this_cpu() -> CpuFeatures:
    """The processor as this process may use it. Raises ConfigError for an unknown level."""
    return features_of(os.environ, platform.machine(), _flags())


@cache
def may_use_tiles() -> bool:
    """Whether this process may use AMX. Linux kills one that has not asked for it; oneDNN asks, too."""
    if not this_cpu().has_amx:
        return False
    asked = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return bool(asked == 0)


def environment_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process needs before it imports torch or numba, for the level in `environment`. Raises
    ConfigError for an unknown level.
    """
    machine, flags = platform.machine(), _flags()
    features = features_of(environment, machine, flags)
    if features.level != "avx2" or _native(machine, flags).level == "avx2":
        return {}
    return {name: environment.get(name) or value for name, value in _AVX2_ENVIRONMENT.items()}


def on_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that put weights on huge pages. A choice in `environment` stays."""
    tunables = [each for each in environment.get(_MALLOC, "").split(":") if each]
    if any(each.startswith(_HUGE_PAGES) for each in tunables):
        return {}
    return {_MALLOC: ":".join([*tunables, f"{_HUGE_PAGES}=1"])}


def features_of(environment: Mapping[str, str], machine: str, flags: frozenset[str]) -> CpuFeatures:
    """`machine`, `flags`: the Linux kernel's names. Raises ConfigError for an unknown level."""
    wanted = environment.get(SETTING) or "native"
    native = _native(machine, flags)
    if wanted not in _ALLOWED:
        raise ConfigError.bad_value(SETTING, wanted, f"one of {', '.join(_ALLOWED)}")
    if wanted == "avx2" and native.level not in ("avx512", "avx2"):
        raise ConfigError.bad_value(SETTING, wanted, "native or torch: this CPU has no AVX2")
    if wanted == "torch":
        return CpuFeatures("torch")
    return CpuFeatures("avx2") if wanted == "avx2" else _bounded(native, environment)


def _native(machine: str, flags: frozenset[str]) -> CpuFeatures:
    if flags >= _AVX512 | _AVX2:
        return CpuFeatures("avx512", "avx512_bf16" in flags, {"avx512_bf16", "amx_bf16"} <= flags)
    if flags >= _AVX2:
        return CpuFeatures("avx2")
    # What oneDNN packs there, and how it multiplies bfloat16, has not been tried; float32 is proven at every start.
    return CpuFeatures("neon" if machine in ("aarch64", "arm64") else "torch")


def _bounded(features: CpuFeatures, environment: Mapping[str, str]) -> CpuFeatures:
    """`features`, lowered to what the variables of torch, oneDNN and numba allow."""
    if features.level != "avx512":
        return features
    onednn = (environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or "").upper()
    numba = environment.get("NUMBA_CPU_FEATURES")
    if (
        environment.get("ATEN_CPU_CAPABILITY", "avx512").lower() in ("avx2", "default")
        or not (onednn in _ONEDNN_UNBOUND or onednn.startswith(("AVX512", "AVX10")))
        or (numba is not None and "+avx512f" not in numba)
    ):
        return CpuFeatures("avx2")
    return replace(
        features,
        has_bfloat16=features.has_bfloat16
        and onednn not in _ONEDNN_WITHOUT_BFLOAT16
        and (numba is None or "+avx512bf16" in numba),
        has_amx=features.has_amx and onednn not in _ONEDNN_WITHOUT_AMX,
    )


def first_level_cache(folder: Path = _FIRST_LEVEL) -> int:
    """Bytes of data that the fastest cache of a core holds; what most processors have, where Linux does not say."""
    try:
        kibibytes = int((folder / "size").read_text().strip().removesuffix("K"))
    except (OSError, ValueError):
        kibibytes = 32
    return kibibytes << 10


@cache
def _flags() -> frozenset[str]:
    """Of the first processor; `flags` on x86, `Features` on Arm."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
