"""The wire names of 0.2: this release reads them, and sends phase requests under both; the next does neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PHASE_REQUEST = "errand"  # of 0.2

_KEYS = {"stage": "phase", "taken": "fetched"}  # of 0.2
_PHASES = {"taken": "fetched"}  # of 0.2
_DESCRIPTION = {
    "whole_requests": "client_requests",  # of 0.2
    "is_worker_side": "is_run_by_workers",  # of 0.2
}


def as_in_02(phase_request: Mapping[str, Any]) -> dict[str, Any]:
    """A phase request's JSON with the keys of 0.2 added; workers of 0.2 ignore the others."""
    phase = phase_request["phase"]
    old = {**phase_request, "stage": "taken" if phase == "fetched" else phase}  # of 0.2
    if "fetched" in phase_request:
        old["taken"] = phase_request["fetched"]  # of 0.2
    return old


def with_phase_request(raw: dict[str, Any]) -> dict[str, Any]:
    """The body with a phase request of 0.2 under today's name and keys."""
    if "phase_request" in raw or PHASE_REQUEST not in raw or not isinstance(old := raw[PHASE_REQUEST], dict):
        return raw
    new = {_KEYS.get(key, key): value for key, value in old.items()}
    if isinstance(phase := new.get("phase"), str):
        new["phase"] = _PHASES.get(phase, phase)
    return raw | {"phase_request": new}


def with_new_keys(description: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's description with today's keys."""
    return {_DESCRIPTION.get(key, key): value for key, value in description.items()}
