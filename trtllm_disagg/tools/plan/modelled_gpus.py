"""Reads engine files of modelled GPUs, and builds workers from their tables."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trtllm_disagg.config.engine_args import merged_args, override_of
from trtllm_disagg.config.yaml_file import read_mapping, shipped
from trtllm_disagg.engine.table import ENGINES
from trtllm_disagg.engines.modelled import tables
from trtllm_disagg.engines.modelled.build import require_tables
from trtllm_disagg.engines.modelled.config import ModelledArgs, checked
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import WorkerRole, spec_of
from trtllm_disagg.tools.plan.layouts import Layout, layouts_of, worker_counts
from trtllm_disagg.tools.plan.simulation import ModelledWorker
from trtllm_disagg.tools.up.gpus import PARALLEL_SIZES, num_ranks
from trtllm_disagg.tools.up.up_command import default_name

ENGINE_CONFIGS = Path("engine_configs/modelled")


@dataclass(frozen=True)
class Engines:
    """The arguments of each role's workers."""

    model: Path
    arguments: Mapping[WorkerRole, dict[str, Any]]

    @classmethod
    def read(
        cls,
        model: Path,
        directory: Path | None,
        layouts: Sequence[Layout],
        override: str = "",
        base: Mapping[str, Any] | None = None,
    ) -> Engines:
        """`base` overrides the files, and `override` (JSON, as --override-engine-args) both. With `base`, `model` can
        be a name. Raises ConfigError.
        """
        if base is None and not (model / "config.json").is_file():
            raise ConfigError.bad_value("--model", str(model), "a directory with tokenizer and config.json")
        directory = shipped(directory or ENGINE_CONFIGS)
        roles = dict.fromkeys(role for layout in layouts for role in spec_of(layout.strategy).roles)
        missing = [f"{role}.yaml" for role in roles if not (directory / f"{role}.yaml").is_file()]
        if missing:
            allowed = f"a directory with {', '.join(missing)}"
            raise ConfigError.bad_value("--engine-configs", str(directory), allowed)
        files = {role: read_mapping(directory / f"{role}.yaml", "--engine-configs") for role in roles}
        own = override_of(override, ENGINES["modelled"])
        merged = {role: merged_args(merged_args(given, base or {}), own) for role, given in files.items()}
        for given in merged.values():
            checked(given.get("modelled") or {})
        return cls(model, merged)

    @classmethod
    def planned(cls, args: argparse.Namespace) -> Engines:
        """The engines for `plan`; the model can be a name. Raises ConfigError."""
        own: dict[str, Any] = {"system": args.gpu} if args.gpu else {}
        if args.gpu:
            require_tables()
            tables.require_system(args.gpu, "--gpu")
        if not (args.model / "config.json").is_file():
            require_tables()
            if tables.known_model(str(args.model)) is None:
                allowed = f"a directory with a config.json; {tables.known_models()}"
                raise ConfigError.bad_value("--model", str(args.model), allowed)
            own["model"] = str(args.model)
        elif args.engine_configs is None:
            own["model"] = None
        base = {"modelled": own} | ({"max_seq_len": None} if args.engine_configs is None else {})
        files = args.engine_configs, layouts_of(2), args.override_engine_args
        return cls.read(args.model, *files, base)

    @property
    def gpus_per_worker(self) -> int:
        """Raises ConfigError if roles differ, since layouts must have equal numbers of GPUs."""
        counts = {role: num_ranks(given) for role, given in self.arguments.items()}
        if len(set(counts.values())) > 1:
            allowed = f"one {' x '.join(PARALLEL_SIZES)} for all roles"
            raise ConfigError.bad_value("--engine-configs", counts, allowed)
        return next(iter(counts.values()))

    def of_size(self, gpus: int) -> Engines:
        """The same engines with `gpus` GPUs each, which share the experts."""
        sizes = {
            "tensor_parallel_size": gpus,
            "moe_expert_parallel_size": gpus,
            "moe_tensor_parallel_size": None,
        }
        arguments = {role: merged_args(given, sizes) for role, given in self.arguments.items()}
        return replace(self, arguments=arguments)

    @property
    def longest(self) -> int:
        """Max tokens of a request that every role accepts."""
        return min(int(given.get("max_seq_len") or self._positions) for given in self.arguments.values())

    @cached_property
    def _positions(self) -> int:
        config = tables.read_model_config(ModelledArgs.model_validate(next(iter(self._all))))
        return min(int(config.get("max_position_embeddings") or tables.MAX_CONTEXT), tables.MAX_CONTEXT)

    @property
    def model_name(self) -> str:
        return self._modelled.get("model") or default_name(str(self.model))

    @property
    def is_measured(self) -> bool:
        return bool(self._modelled.get("measured"))

    @property
    def gpu(self) -> str:
        """ "H100"; "GPU" if no table names it."""
        system = str(self._modelled.get("system", "h100_sxm"))
        return "GPU" if self.is_measured else system.partition("_")[0].upper()

    @property
    def _modelled(self) -> dict[str, Any]:
        return next(iter(self.arguments.values())).get("modelled") or {}

    @property
    def _all(self) -> Iterator[dict[str, Any]]:
        return ({"model": str(self.model)} | given for given in self.arguments.values())

    def workers(self) -> dict[str, ModelledWorker]:
        """Role -> worker. Raises ConfigError when no table covers the engine."""
        return dict(zip(self.arguments, map(ModelledWorker.of, self._all), strict=True))


@dataclass(frozen=True, slots=True)
class Division:
    """GPUs divided among workers of one size."""

    gpus: int
    engines: Engines
    workers: Mapping[str, ModelledWorker]

    @property
    def smallest_pool(self) -> int:
        return min(each.pool_tokens for each in self.workers.values())


def divisions(args: argparse.Namespace, engines: Engines) -> tuple[list[Division], dict[int, str]]:
    """Returns one division per number in --workers, or per --gpus and --tp (default: powers of two), and the refused
    worker sizes with the reason. Raises ConfigError when none is left.
    """
    if args.workers:
        if args.tp:
            raise ConfigError.bad_value("--tp", args.tp, "--gpus instead of --workers")
        each, workers = engines.gpus_per_worker, engines.workers()
        return [Division(count * each, engines, workers) for count in worker_counts(args.workers)], {}
    if engines.is_measured:
        allowed = "--workers: `modelled.measured` has step times of one worker size"
        raise ConfigError.bad_value("--gpus", args.gpus, allowed)
    totals = worker_counts(args.gpus or "8", "--gpus")
    powers = [1 << power for power in range(max(totals).bit_length())]
    tried = worker_counts(args.tp, "--tp", 1) if args.tp else powers
    sizes = [size for size in tried if any(total % size == 0 for total in totals)]
    if args.tp and sizes != tried:
        raise ConfigError.bad_value("--tp", args.tp, f"sizes that divide --gpus {args.gpus or 8}")
    found, refused = list[Division](), dict[int, str]()
    for size in sizes:
        own = engines.of_size(size)
        try:
            workers = own.workers()
        except ConfigError as error:
            refused[size] = "its weights leave no room for KV" if "no KV budget" in str(error) else str(error)
            continue
        found += [Division(total, own, workers) for total in totals if total % size == 0]
    if not found:
        raise ConfigError("; ".join(f"{size} GPUs a worker: {why}" for size, why in refused.items()))
    return found, refused
