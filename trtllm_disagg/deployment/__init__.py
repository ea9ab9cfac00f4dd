"""A whole deployment on one machine: `trtllm-disagg up`, and context managers for tests."""

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

if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Loads `lifecycle` at its first use, so that `--help` does not load it."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from trtllm_disagg.deployment import lifecycle

        return getattr(lifecycle, name)
