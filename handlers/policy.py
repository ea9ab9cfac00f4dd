"""What a worker knows and may be told while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_disagg.config.thresholds import Live, Thresholds, read_policy_file
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.handlers.admission import Queued
from trtllm_disagg.handlers.decide import CachedPrefix
from trtllm_disagg.handlers.trace import JourneyCounts

log = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Policy:
    strategy: Live[str]
    thresholds: Live[Thresholds]
    cached: CachedPrefix
    counts: JourneyCounts = field(default_factory=JourneyCounts)
    queued: Queued = field(default_factory=Queued)

    @classmethod
    def of(cls, config: WorkerConfig, block_size: int) -> Policy:
        """Raises ConfigError when the policy file is wrong."""
        policy = cls(Live(config.strategy.value), Live(Thresholds.of(config)), CachedPrefix(block_size))
        if config.policy_file is not None:
            policy.set_thresholds(read_policy_file(Path(config.policy_file)), config.policy_file)
        return policy

    def set_thresholds(self, values: Mapping[str, Any], source: str) -> list[str]:
        """The differences. Raises ConfigError, and then nothing has changed."""
        old = self.thresholds.value
        new = old.changed(values, source)
        differences = old.differences(new)
        if differences:
            self.thresholds.set(new)
            log.info("thresholds changed by %s: %s", source, ", ".join(differences))
        return differences


async def watch_policy_file(path: Path, policy: Policy) -> None:
    """Returns never. A file that is wrong now is reported once, and the old values stay."""
    seen = _stamp(path)
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        stamp = _stamp(path)
        if stamp == seen:
            continue
        seen = stamp
        try:
            policy.set_thresholds(read_policy_file(path), str(path))
        except ConfigError as error:
            log.error("the old thresholds stay: %s", error)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
