"""One run of `bench strategies`: what is to be measured, and AIPerf's sweeps of it, one deployment after the other."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from trtllm_disagg.config.thresholds import ADMISSION
from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.bench.aiperf import AIPerf, Load, read_results
from trtllm_disagg.tools.bench.results import Row
from trtllm_disagg.tools.plan.comparison import LayoutSimulation
from trtllm_disagg.tools.plan.layouts import (
    DEFAULT_PATTERNS,
    DEFAULT_WORKERS,
    Layout,
    chosen_layouts,
    layouts_of,
    worker_counts,
)
from trtllm_disagg.tools.plan.modelled_gpus import LONGEST, Engines
from trtllm_disagg.tools.plan.simulation import ModelledWorker
from trtllm_disagg.tools.plan.slo import Slo, slo_of
from trtllm_disagg.tools.plan.workloads import Traffic, chosen_workloads, rates_of
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


@dataclass(frozen=True)
class RunPlan:
    subject: str
    sweeps: tuple[_Sweep, ...]
    slo: Slo
    requests: int
    model: Path
    time_scale: float
    #: None: the deployments are behind `urls`.
    engines: Engines | None
    urls: Mapping[Layout, str]
    worker_args: tuple[str, ...]


def plan_of(args: argparse.Namespace) -> RunPlan:
    """Raises ConfigError for flags that are wrong or do not go together; nothing has been started yet."""
    if not 0.1 <= args.time_scale <= 1000:
        raise ConfigError.bad_value("--time-scale", args.time_scale, "a number from 0.1 to 1000")
    slo, urls = slo_of(args.slo), _layouts_behind(args.url, args.gpus_per_worker or 1)
    engines, layouts = None, tuple(urls)
    if not urls:
        counts = worker_counts(args.workers or ("2" if args.quick else DEFAULT_WORKERS))
        patterns = args.layouts.split(",") if args.layouts else DEFAULT_PATTERNS
        layouts = tuple(each for count in counts for each in chosen_layouts(layouts_of(count), patterns))
        files = args.engine_configs, layouts, args.override_engine_args
        engines = Engines.read(args.engine, args.model, *files)
        layouts = tuple(replace(each, gpus=each.gpus * engines.gpus_per_worker) for each in layouts)
    is_modelled = engines is not None and engines.is_modelled
    if not args.rates and not is_modelled:
        allowed = "rates: without the tables of a modelled engine none are known"
        raise ConfigError.bad_value("--rates", None, allowed)
    names = args.workloads or ("rag" if args.quick and not args.trace else None)
    workloads = chosen_workloads(names, args.trace, engines.longest if engines else LONGEST).values()
    rates = rates_of(args.rates) if args.rates else ()
    # With --rates too: a worker would miss a table only after everything before it was measured.
    workers = engines.workers() if engines and is_modelled else {}
    return RunPlan(
        subject=engines.subject() if engines else default_name(str(args.model)),
        sweeps=tuple(_sweeps(rates, layouts, workloads, slo, workers)),
        slo=slo,
        requests=20 if args.quick else args.requests,
        model=args.model,
        time_scale=args.time_scale if is_modelled else 1.0,
        engines=engines,
        urls=urls,
        worker_args=tuple(args.worker_args),
    )


def _layouts_behind(texts: list[str], gpus_per_worker: int) -> dict[Layout, str]:
    """The values of --url, by layout."""
    urls: dict[Layout, str] = {}
    for text in texts:
        name, _, url = text.partition("=")
        # The workers of "2 agg" or "1P3D router".
        count = sum(map(int, re.findall(r"\d+", name.partition(" ")[0])))
        known = {layout.name: layout for layout in layouts_of(max(2, min(count, 1000)), gpus_per_worker)}
        if name not in known or not url.startswith(("http://", "https://")):
            allowed = "LAYOUT=http://..., as '2 agg=http://...' or '1P3D router=http://...'"
            raise ConfigError.bad_value("--url", text, allowed)
        if known[name] in urls:
            raise ConfigError.bad_value("--url", text, "each layout once")
        urls[known[name]] = url
    return urls


def _sweeps(
    given: tuple[float, ...],
    layouts: tuple[Layout, ...],
    workloads: Iterable[Traffic],
    slo: Slo,
    workers: Mapping[str, ModelledWorker],
) -> Iterator[_Sweep]:
    """`given`: the rates; without any those around the simulated knee of the best layout of as many GPUs."""
    for gpus in sorted({layout.gpus for layout in layouts}):
        same = [layout for layout in layouts if layout.gpus == gpus]
        for traffic in workloads:
            rates = given
            if not given:
                best = LayoutSimulation(same, traffic, workers).best_knee(slo)
                rates = tuple(float(f"{share * best:.2g}") for share in _SHARES)
            shown = ", ".join(f"{rate:g}" for rate in rates)
            say(f"{traffic.name} on {gpus} GPUs: {len(same)} layouts at {shown} requests/s")
            yield from (_Sweep(layout, traffic, rates) for layout in same)


@dataclass(frozen=True)
class Run:
    out: Path
    aiperf: AIPerf
    plan: RunPlan

    async def measure(self) -> None:
        missing = [sweep for sweep in self.plan.sweeps if not self._is_measured(sweep)]
        for layout in dict.fromkeys(sweep.layout for sweep in missing):
            say(f"{layout.name}: starting")
            async with self._serving(layout) as url:
                for sweep in (each for each in missing if each.layout == layout):
                    say(f"{layout.name}: {sweep.traffic.name}")
                    await self._measure(sweep, url)

    def rows(self) -> Iterator[Row]:
        """The results of all measured sweeps, on the modelled clock."""
        for sweep in self.plan.sweeps:
            if self._is_measured(sweep):
                for result in read_results(self._place(sweep)):
                    yield Row.of(sweep.layout, sweep.traffic.name, result, self.plan.time_scale)

    def _place(self, sweep: _Sweep) -> Path:
        return self.out / f"{sweep.layout.name} {sweep.traffic.name}".replace(" ", "_")

    def _is_measured(self, sweep: _Sweep) -> bool:
        """Raises ConfigError where the directory has another run's settings."""
        place = self._place(sweep)
        if not (place / "done").is_file():
            return False
        if (place / "done").read_text() != self._settings(sweep):
            allowed = "a new directory, or the settings of the run that is there"
            raise ConfigError.bad_value("--out", str(self.out), allowed)
        return True

    def _settings(self, sweep: _Sweep) -> str:
        plan, load = self.plan, self._load(sweep, "")
        engines = plan.engines.arguments if plan.engines else {}
        traffic = f"{sweep.traffic.aiperf} {sweep.traffic.description}"
        return f"{traffic} {load.rates} {load.requests} {load.slo} {plan.worker_args} {engines}\n"

    async def _measure(self, sweep: _Sweep, url: str) -> None:
        place = self._place(sweep)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        await self.aiperf.sweep(self._load(sweep, url), place.absolute())
        (place / "done").write_text(self._settings(sweep))

    def _load(self, sweep: _Sweep, url: str) -> Load:
        """The sweep on the wall's clock."""
        scale, slo = self.plan.time_scale, self.plan.slo
        return Load(
            url=url,
            model=default_name(str(self.plan.model)),
            tokenizer=self.plan.model,
            traffic=sweep.traffic,
            rates=tuple(rate / scale for rate in sweep.rates),
            requests=sweep.traffic.at_least(self.plan.requests),
            slo=replace(slo, **{name: limit * scale for name, limit in slo.limits.items()}),
        )

    @asynccontextmanager
    async def _serving(self, layout: Layout) -> AsyncIterator[str]:
        """The URL of a deployment of this layout."""
        if self.plan.engines is None:
            yield self.plan.urls[layout]
            return
        # A Unix socket's path has room for 107 bytes, and layouts' names are long.
        with TemporaryDirectory(prefix="trtllm-disagg-bench-", ignore_cleanup_errors=True) as scratch:
            config = self._deployment(layout, self.plan.engines, Path(scratch))
            try:
                async with running_deployment(config) as deployment:
                    yield deployment.base_url
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
            worker_args=(*_without_bounds(spec.is_worker_side), *layout.flags, *self.plan.worker_args),
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
    limits = dict.fromkeys(ADMISSION, "0")
    if calls_workers:
        limits |= dict.fromkeys(deadlines, f"{_LONGEST_WAIT_SECONDS}")
    return tuple(text for name, value in limits.items() for text in (flag_of(name), value))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
