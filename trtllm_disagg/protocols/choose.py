"""Which protocol `--handoff-protocol` means."""

from __future__ import annotations

from trtllm_disagg.protocols.base import HandoffProtocol
from trtllm_disagg.protocols.bootstrap import BootstrapProtocol
from trtllm_disagg.protocols.dynamo import DYNAMO
from trtllm_disagg.protocols.two_phase import TwoPhaseProtocol

PROTOCOLS: dict[str, HandoffProtocol] = {
    "dynamo": DYNAMO,
    "two_phase": TwoPhaseProtocol(),
    "bootstrap": BootstrapProtocol(),
}


def choose_protocol(name: str) -> HandoffProtocol:
    return PROTOCOLS[name]
