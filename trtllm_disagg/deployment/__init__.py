"""A whole deployment on one machine: `trtllm-disagg up`, and the same for tests."""

from trtllm_disagg.deployment.plan import (
    DeploymentConfig,
    DeploymentFailedError,
    PortInUseError,
    RunDirInUseError,
)
from trtllm_disagg.deployment.running import Deployment, deployment_in_background, running_deployment

__all__ = [
    "Deployment",
    "DeploymentConfig",
    "DeploymentFailedError",
    "PortInUseError",
    "RunDirInUseError",
    "deployment_in_background",
    "running_deployment",
]
