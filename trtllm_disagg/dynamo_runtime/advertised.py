"""What a worker's model card tells the frontend besides engine limits: parsers, structural tags, routing."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import msgspec
from dynamo._core import get_reasoning_parser_names, get_tool_parser_names
from dynamo.common.configuration.groups.router_args import build_router_config, parse_worker_router_config
from dynamo.common.configuration.groups.runtime_args import (
    DynamoRuntimeConfig,
    StructuralTagConfig,
    resolve_structural_tag_config,
)
from dynamo.common.model_taints import register_model_taint_route
from dynamo.common.utils.topology import TopologyConfig, read_topology_config

from trtllm_disagg.config.settings import NO, YES
from trtllm_disagg.config.worker_config import WorkerConfig, flag_of
from trtllm_disagg.errors import ConfigError

_TOPOLOGY = "DYN_TOPOLOGY_ENABLED"
_THINKING = "default_thinking_mode"
_SPECULATION = "spec_decode"
#: TensorRT-LLM's llguidance refuses every request with a tag.
_TAGS_BACKEND = "xgrammar"


@dataclass(frozen=True, slots=True)
class Advertised:
    """What a worker advertises; the frontend decides each field that is None."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    thinking_mode: str | None = None
    structural_tag: dict[str, Any] | None = None
    speculation: dict[str, Any] | None = None
    router: Any = None
    excludes_tools: bool = True
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    #: The taints received by `Taints`.
    taints: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, config: WorkerConfig, engine_args: Mapping[str, Any]) -> Advertised:
        """Raises ConfigError for values unknown to Dynamo. May block for 30 s for topology files."""
        _check_name("tool_call_parser", config.tool_call_parser, get_tool_parser_names)
        _check_name("reasoning_parser", config.reasoning_parser, get_reasoning_parser_names)
        return cls(
            config.tool_call_parser,
            config.reasoning_parser,
            config.default_thinking_mode,
            _structural_tag(
                config.structural_tag, engine_args.get("guided_decoding_backend") == _TAGS_BACKEND
            ),
            _speculation(engine_args.get("speculative_config")),
            _router(config.router_flags),
            config.exclude_tools_when_tool_choice_none,
            _topology(config),
        )

    def put_on(self, card: Any) -> None:
        """`card`: Dynamo's ModelRuntimeConfig."""
        card.tool_call_parser = self.tool_call_parser
        card.reasoning_parser = self.reasoning_parser
        if self.thinking_mode is not None:
            card.set_engine_specific(_THINKING, json.dumps(self.thinking_mode))
        if self.speculation is not None:
            card.set_engine_specific(_SPECULATION, json.dumps(self.speculation))
        card.set_structural_tag(self.structural_tag)
        card.exclude_tools_when_tool_choice_none = self.excludes_tools
        if self.topology.enabled:
            for name, value in vars(self.topology).items():
                setattr(card, name, value)


def _check_name(field: str, name: str | None, known_names: Callable[[], Sequence[str]]) -> None:
    known = sorted(known_names())
    if name is None or name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"{close[0]}, or another " if close else ""
    raise ConfigError.bad_value(flag_of(field), name, f"{hint}of Dynamo's: {', '.join(known)}")


def _structural_tag(given: str | None, takes_tags: bool) -> dict[str, Any] | None:
    """The card's tag: as `given`; by default Dynamo's, if the engine takes tags."""
    if given is None:
        given = "true" if takes_tags else "false"
    if (word := given.strip().lower()) in NO:
        return None
    settings = DynamoRuntimeConfig()
    try:
        settings.dyn_structural_tag = word in YES or msgspec.json.decode(given, type=StructuralTagConfig)
        tag: dict[str, Any] | None = resolve_structural_tag_config(settings)
    # Dynamo raises the last two if the installed grammars cannot keep `tool_arguments_any_order`.
    except (msgspec.DecodeError, ValueError, metadata.PackageNotFoundError) as error:
        allowed = f"true, false or a JSON object of Dynamo's ({error})"
        raise ConfigError.bad_value(flag_of("structural_tag"), given, allowed) from error
    return tag


def _speculation(given: Any) -> dict[str, Any] | None:
    """What Dynamo's Planner reads of speculative decoding. The engine reports wrong values later."""
    if not isinstance(given, Mapping):
        return None
    drafted, method = given.get("max_draft_len"), given.get("decoding_type")
    if drafted is None:
        drafted = given.get("num_nextn_predict_layers")
    if not isinstance(drafted, int) or drafted <= 0:
        return None
    return {"nextn": drafted, "source": "backend_config"} | ({"method": str(method)} if method else {})


def _topology(config: WorkerConfig) -> TopologyConfig:
    """This worker's place, and how near the router must keep a pair, by Dynamo's variables and their files."""
    if config.may_switch and os.environ.get(_TOPOLOGY, "").strip().lower() in YES:
        raise ConfigError.bad_value(
            _TOPOLOGY,
            os.environ[_TOPOLOGY],
            f"no value with {flag_of('strategy')} {config.strategy}, where workers choose each other and look at no "
            f"topology; {flag_of('strategy')} router leaves the choice to the frontend",
        )
    try:
        return read_topology_config()
    except SystemExit:
        domain = os.environ.get("DYN_KV_TRANSFER_DOMAIN") or "not set"
        where = os.environ.get("DYN_TOPOLOGY_MOUNT_PATH", "/etc/dynamo/topology")
        allowed = (
            f"no value, or DYN_KV_TRANSFER_DOMAIN ({domain}) that is the name of a file in {where} "
            "(DYN_TOPOLOGY_MOUNT_PATH) with this worker's place in it"
        )
        raise ConfigError.bad_value(_TOPOLOGY, os.environ.get(_TOPOLOGY), allowed) from None
    except ValueError as error:
        raise ConfigError(f"DYN_KV_TRANSFER_PREFERRED_WEIGHT: {error}") from None


def _router(flags: Sequence[str]) -> Any:
    """Dynamo's router configuration from its flags and variables; None if they set no mode."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            config, _ = parse_worker_router_config(list(flags))
        return build_router_config(config)
    except SystemExit:
        why = output.getvalue().strip().rpartition("error: ")[2]
        raise ConfigError(f"{' '.join(flags)}: {why}") from None
    except ValueError as error:
        raise ConfigError(f"{' '.join(flags) or 'DYN_ROUTER_MODE'}: {error}") from error


Route = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Taints:
    """This worker's taints, which Dynamo's router compares with a request's `routing_constraints`; set by POST
    /engine/update/model_taints at the system port. Dynamo changes the current card; this class applies them to later
    cards, after a switch or flip.
    """

    def __init__(self, runtime: Any, endpoint: Any, taints: set[str]) -> None:
        self._runtime, self._taints = runtime, taints
        # Dynamo's function gets this object as the runtime.
        register_model_taint_route(self, endpoint)

    def register_engine_route(self, path: str, update: Route) -> None:
        async def update_and_keep(body: dict[str, Any]) -> dict[str, Any]:
            answer = await update(body)
            self._taints.clear()
            self._taints.update(answer["taints"])
            return answer

        self._runtime.register_engine_route(path, update_and_keep)

    def put_on(self, card: Any) -> None:
        """`card`: Dynamo's ModelRuntimeConfig."""
        if self._taints:
            card.taints = self._taints
