"""The engine files of modelled GPUs, and what their tables say of a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_disagg.config.engine_args import merged_args, override_of
from trtllm_disagg.config.yaml_file import read_mapping, shipped
from trtllm_disagg.engines.modelled.config import checked
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import WorkerRole, spec_of
from trtllm_disagg.tools.plan.layouts import Layout
from trtllm_disagg.tools.plan.simulation import ModelledWorker
from trtllm_disagg.tools.up.gpus import PARALLEL_SIZES, num_ranks
from trtllm_disagg.tools.up.up_command import default_name

#: Tokens of the longest request, where no engine file says it.
LONGEST = 1 << 17


@dataclass(frozen=True, slots=True)
class Engines:
    """What the workers of each role are started with."""

    engine: str
    model: Path
    arguments: Mapping[WorkerRole, dict[str, Any]]

    @classmethod
    def read(
        cls, engine: str, model: Path, directory: Path, layouts: Sequence[Layout], override: str = ""
    ) -> Engines:
        """`override`: JSON over the files of all roles, as a worker's --override-engine-args. Raises ConfigError."""
        if not (model / "config.json").is_file():
            raise ConfigError.bad_value(
                "--model", str(model), "a directory with a tokenizer and a config.json"
            )
        directory = shipped(directory)
        roles = dict.fromkeys(role for layout in layouts for role in spec_of(layout.strategy).roles)
        missing = [f"{role}.yaml" for role in roles if not (directory / f"{role}.yaml").is_file()]
        if missing:
            allowed = f"a directory with {', '.join(missing)}"
            raise ConfigError.bad_value("--engine-configs", str(directory), allowed)
        files = {role: read_mapping(directory / f"{role}.yaml", "--engine-configs") for role in roles}
        own = override_of(override, is_strict=False)
        merged = {role: merged_args(given, own) for role, given in files.items()}
        if engine == "modelled":
            for given in merged.values():
                checked(given.get("modelled") or {})
        return cls(engine, model, merged)

    @property
    def is_modelled(self) -> bool:
        return self.engine == "modelled"

    @property
    def gpus_per_worker(self) -> int:
        """Raises ConfigError if the roles differ: the layouts would not have the same number of GPUs."""
        counts = {role: num_ranks(given) for role, given in self.arguments.items()}
        if len(set(counts.values())) > 1:
            allowed = f"one {' x '.join(PARALLEL_SIZES)} for all roles"
            raise ConfigError.bad_value("--engine-configs", counts, allowed)
        return next(iter(counts.values()))

    @property
    def longest(self) -> int:
        """Tokens of the longest request that every role accepts."""
        return min(int(given.get("max_seq_len") or LONGEST) for given in self.arguments.values())

    @property
    def model_name(self) -> str:
        return self._modelled.get("model") or default_name(str(self.model))

    @property
    def gpu(self) -> str:
        """ "H100"; "GPU" where no table names one."""
        is_named = self.is_modelled and not self._modelled.get("measured")
        return self._modelled.get("system", "h100_sxm").partition("_")[0].upper() if is_named else "GPU"

    def subject(self) -> str:
        """What is served, as "llama-3.1-8b on 1 H100 a worker"."""
        count = self.gpus_per_worker
        return f"{self.model_name} on {count} {self.gpu}{'s' * (count != 1)} a worker"

    @property
    def _modelled(self) -> dict[str, Any]:
        return next(iter(self.arguments.values())).get("modelled") or {}

    def workers(self) -> dict[str, ModelledWorker]:
        """The modelled workers by role. Raises ConfigError for what no table covers."""
        return {
            role: ModelledWorker.of({"model": str(self.model)} | given)
            for role, given in self.arguments.items()
        }
