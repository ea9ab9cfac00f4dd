"""One run of `bench strategies`: what is to be measured, and AIPerf's sweeps of it, one deployment after the other."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from trtllm_disagg.config.thresholds import ADMISSION
from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.bench.aiperf import AIPerf, Load, rates_of, read_sweep
from trtllm_disagg.tools.bench.results import Row
from trtllm_disagg.tools.plan.layouts import (
    DEFAULT_PATTERNS,
    Layout,
    chosen_layouts,
    layouts_of,
    worker_counts,
)
from trtllm_disagg.tools.plan.modelled_gpus import LONGEST, Engines
from trtllm_disagg.tools.plan.simulation import Simulations
from trtllm_disagg.tools.plan.slo import Slo, slo_of
from trtllm_disagg.tools.plan.workloads import Traffic, chosen_workloads
from trtllm_disagg.tools.up.lifecycle import running_deployment
from trtllm_disagg.tools.up.plan import DeploymentConfig, ProcessRole
from trtllm_disagg.tools.up.up_command import default_name

#: Without --rates: as shares of the best layout's simulated knee.
_SHARES = (0.35, 0.75, 0.95, 1.25)
#: A run waits so long for an answer, and leases of KV last as long: an overloaded worker answers late, but it answers.
_LONGEST_WAIT_SECONDS = 3600


class _Sweep(NamedTuple):
    """All rates of one workload at one layout."""

    layout: Layout
    traffic: Traffic
    rates: tuple[float, ...]

    @property
    def directory(self) -> str:
        return f"{self.layout.name} {self.traffic.name}".replace(" ", "_")


@dataclass(frozen=True)
class RunPlan:
    subject: str
    sweeps: tuple[_Sweep, ...]
    slo: Slo
    requests: int
    model: Path
    time_scale: float
    #: None: the deployments are behind `urls`, by layout.
    engines: Engines | None
    urls: Mapping[str, str]
    worker_args: tuple[str, ...]


def plan_of(args: argparse.Namespace) -> RunPlan:
    """Raises ConfigError for flags that are wrong or do not go together; nothing has been started yet."""
    if not 0.1 <= args.time_scale <= 1000:
        raise ConfigError.bad_value("--time-scale", args.time_scale, "a number from 0.1 to 1000")
    slo, urls = slo_of(args.slo), _urls(args.url)
    engines = None
    if urls:
        layouts = _layouts_behind(urls, args.gpus_per_worker or 1)
    else:
        counts = worker_counts(args.workers or ("2" if args.quick else "2,4"))
        patterns = args.layouts.split(",") if args.layouts else DEFAULT_PATTERNS
        layouts = tuple(each for count in counts for each in chosen_layouts(layouts_of(count), patterns))
        engines = Engines.read(
            args.engine, args.model, args.engine_configs, layouts, args.override_engine_args
        )
        layouts = tuple(replace(each, gpus=each.gpus * engines.gpus_per_worker) for each in layouts)
    is_modelled = engines is not None and engines.is_modelled
    if not args.rates and not is_modelled:
        raise ConfigError.bad_value(
            "--rates", None, "rates: without the tables of a modelled engine none are known"
        )
    names = args.workloads or ("rag" if args.quick and not args.trace else None)
    workloads = chosen_workloads(names, args.trace, engines.longest if engines else LONGEST)
    return RunPlan(
        subject=engines.subject() if engines else default_name(str(args.model)),
        sweeps=tuple(_sweeps(args, layouts, workloads, slo, engines if is_modelled else None)),
        slo=slo,
        requests=20 if args.quick else args.requests,
        model=args.model,
        time_scale=args.time_scale if is_modelled else 1.0,
        engines=engines,
        urls=urls,
        worker_args=tuple(args.worker_args),
    )


def _urls(texts: list[str]) -> dict[str, str]:
    urls = dict(text.partition("=")[::2] for text in texts)
    for text, url in zip(texts, urls.values(), strict=False):
        if not url.startswith(("http://", "https://")):
            raise ConfigError.bad_value("--url", text, "LAYOUT=http://..., as '1P1D decode_first=http://...'")
    if len(urls) < len(texts):
        raise ConfigError.bad_value("--url", ", ".join(texts), "each layout once")
    return urls


def _layouts_behind(urls: Mapping[str, str], gpus_per_worker: int) -> tuple[Layout, ...]:
    counts = {sum(map(int, _numbers(name))) for name in urls}
    known = {
        layout.name: layout for count in counts if count > 1 for layout in layouts_of(count, gpus_per_worker)
    }
    for name in urls:
        if name not in known:
            raise ConfigError.bad_value("--url", name, "a layout as '2 agg' or '1P3D router'")
    return tuple(known[name] for name in urls)


def _numbers(layout: str) -> list[str]:
    """The numbers of workers of "2 agg" or "1P3D router"."""
    return [text for text in layout.partition(" ")[0].rstrip("D").split("P") if text.isdecimal()]


def _sweeps(
    args: argparse.Namespace,
    layouts: tuple[Layout, ...],
    workloads: Mapping[str, Traffic],
    slo: Slo,
    modelled: Engines | None,
) -> Iterator[_Sweep]:
    given = rates_of(args.rates) if args.rates else None
    for gpus, equals in groupby(sorted(layouts, key=attrgetter("gpus")), key=attrgetter("gpus")):
        same = tuple(equals)
        for traffic in workloads.values():
            rates = given or _rates_around_knee(same, traffic, slo, modelled)
            shown = ", ".join(f"{rate:g}" for rate in rates)
            say(f"{traffic.name} on {gpus} GPUs: {len(same)} layouts at {shown} requests/s")
            yield from (_Sweep(layout, traffic, rates) for layout in same)


def _rates_around_knee(
    layouts: tuple[Layout, ...], traffic: Traffic, slo: Slo, modelled: Engines | None
) -> tuple[float, ...]:
    assert modelled is not None  # `plan_of` wants rates for other engines
    simulations = Simulations(layouts, traffic, modelled.workers(), fewest_requests=100)
    best = max(simulations.knee(layout, slo) for layout in layouts)
    return tuple(float(f"{share * best:.2g}") for share in _SHARES)


@dataclass(frozen=True)
class Run:
    out: Path
    aiperf: AIPerf
    plan: RunPlan

    async def measure(self) -> None:
        for layout, sweeps in groupby(self.plan.sweeps, key=attrgetter("layout")):
            missing = [sweep for sweep in sweeps if not self._is_measured(sweep)]
            if not missing:
                continue
            say(f"{layout.name}: starting")
            async with self._serving(layout) as (url, model):
                for sweep in missing:
                    say(f"{layout.name}: {sweep.traffic.name}")
                    await self._measure(sweep, url, model)

    def rows(self) -> Iterator[Row]:
        """The results of all measured sweeps, on the modelled clock."""
        for sweep in self.plan.sweeps:
            if self._is_measured(sweep):
                for result in read_sweep(self._place(sweep)):
                    yield Row.of(sweep.layout, sweep.traffic.name, result, self.plan.time_scale)

    def _place(self, sweep: _Sweep) -> Path:
        return self.out / sweep.directory

    def _is_measured(self, sweep: _Sweep) -> bool:
        """Raises ConfigError where the directory has another run's settings."""
        place = self._place(sweep)
        if not (place / "done").is_file():
            return False
        if (place / "done").read_text() != self._settings(sweep):
            raise ConfigError.bad_value(
                "--out", str(self.out), "a new directory, or the settings of the run that is there"
            )
        return True

    def _settings(self, sweep: _Sweep) -> str:
        load = self._load(sweep, "URL", "MODEL")
        engines = self.plan.engines.arguments if self.plan.engines else {}
        return f"{load.traffic} {load.rates} {load.requests} {load.slo} {self.plan.worker_args} {engines}\n"

    async def _measure(self, sweep: _Sweep, url: str, model: str) -> None:
        place = self._place(sweep)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        await self.aiperf.sweep(self._load(sweep, url, model), place.absolute())
        (place / "done").write_text(self._settings(sweep))

    def _load(self, sweep: _Sweep, url: str, model: str) -> Load:
        """The sweep on the wall's clock."""
        scale, slo = self.plan.time_scale, self.plan.slo
        return Load(
            url=url,
            model=model,
            tokenizer=self.plan.model,
            traffic=sweep.traffic.aiperf,
            rates=tuple(rate / scale for rate in sweep.rates),
            requests=sweep.traffic.at_least(self.plan.requests),
            slo=replace(slo, **{name: limit * scale for name, limit in slo.limits.items()}),
        )

    @asynccontextmanager
    async def _serving(self, layout: Layout) -> AsyncIterator[tuple[str, str]]:
        """The URL of a deployment of this layout, and the name of its model."""
        if self.plan.engines is None:
            yield self.plan.urls[layout.name], default_name(str(self.plan.model))
            return
        # A Unix socket's path has room for 107 bytes, and layouts' names are long.
        with TemporaryDirectory(prefix="trtllm-disagg-bench-", ignore_cleanup_errors=True) as scratch:
            config = self._deployment(layout, self.plan.engines, Path(scratch))
            try:
                async with running_deployment(config) as deployment:
                    yield deployment.base_url, config.served_model_name
            finally:
                logs = self.out / "logs" / layout.name.replace(" ", "_")
                logs.mkdir(parents=True, exist_ok=True)
                for log in config.run_dir.glob("*.log"):
                    shutil.copy(log, logs)

    def _deployment(self, layout: Layout, engines: Engines, run_dir: Path) -> DeploymentConfig:
        spec, configs = spec_of(layout.strategy), dict[ProcessRole, Path]()
        for role in spec.roles:
            configs[role] = run_dir / f"{role}.yaml"
            configs[role].write_text(yaml.safe_dump(self._arguments(engines.arguments[role])))
        return DeploymentConfig(
            strategy=layout.strategy,
            model=str(engines.model),
            served_model_name=default_name(str(engines.model)),
            run_dir=run_dir,
            agg_workers=max(1, layout.agg_workers),
            prefill_workers=max(1, layout.prefill_workers),
            decode_workers=max(1, layout.decode_workers),
            http_port=0,
            engine=engines.engine,
            engine_configs=configs,
            # Unfinished requests are of no use.
            drain_seconds=1.0,
            worker_args=(
                *_without_bounds(calls_workers=spec.is_worker_side),
                *layout.flags,
                *self.plan.worker_args,
            ),
        )

    def _arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """One role's engine arguments, with the clock of this run and leases that outlast every queue."""
        if self.plan.engines is None or not self.plan.engines.is_modelled:
            return given
        given = given | {"modelled": (given.get("modelled") or {}) | {"time_scale": self.plan.time_scale}}
        if transceiver := given.get("cache_transceiver_config"):
            lease = {"kv_transfer_timeout_ms": 1000 * _LONGEST_WAIT_SECONDS}
            given["cache_transceiver_config"] = transceiver | lease
        return given


def _without_bounds(calls_workers: bool) -> tuple[str, ...]:
    """Requests at overloaded workers wait: one that is refused, or computed again because its KV was released, does not
    show the size of the overload.
    """
    deadlines = ("prefill_timeout", "first_decode_token_timeout", "next_decode_token_timeout")
    limits = {name: f"{_LONGEST_WAIT_SECONDS}" for name in deadlines if calls_workers} | dict.fromkeys(
        ADMISSION, "0"
    )
    return tuple(text for name, value in limits.items() for text in (flag_of(name), value))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
