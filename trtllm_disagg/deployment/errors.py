"""What can go wrong with a deployment as a whole."""

from __future__ import annotations

from trtllm_disagg.errors import ConfigError, DisaggError


class PortInUseError(ConfigError):
    """Somebody else listens where the frontend should."""


class RunDirInUseError(ConfigError):
    """The run directory belongs to a deployment that is still alive."""


class DeploymentFailedError(DisaggError):
    """The deployment did not come up, or cannot go on. The message is a report for people."""
