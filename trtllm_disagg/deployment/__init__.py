"""A whole deployment on one machine: `trtllm-disagg up`, and the same for tests."""

from typing import TYPE_CHECKING, Any

from trtllm_disagg.deployment.plan import (
    DeploymentConfig,
    DeploymentFailedError,
    PortInUseError,
    RunDirInUseError,
)

if TYPE_CHECKING:
    from trtllm_disagg.deployment.lifecycle import Deployment, deployment_in_background, running_deployment

__all__ = [
    "Deployment",
    "DeploymentConfig",
    "DeploymentFailedError",
    "PortInUseError",
    "RunDirInUseError",
    "deployment_in_background",
    "running_deployment",
]

if not TYPE_CHECKING:  # a type checker would take every name for defined

    def __getattr__(name: str) -> Any:
        """What runs processes is loaded by what runs them, and not by `--help`."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from trtllm_disagg.deployment import lifecycle

        return getattr(lifecycle, name)
