"""Which of NIXL's packages is used: each reaches GPUs by one major version of CUDA, and CPUs' memory by none."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from trtllm_disagg.errors import ConfigError

#: By CUDA's major version.
_MODULES = {"12": "nixl_cu12", "13": "nixl_cu13"}
_KEY = "cache_transceiver_config.backend"


def nixl_api() -> Any:
    """NIXL's bindings: those for torch's CUDA if installed, else the others. Raises ImportError without any."""
    wanted = _MODULES.get(_cuda_of_torch())
    first, second = sorted(_MODULES.values(), key=lambda name: name != wanted)
    try:
        return import_module(f"{first}._api")
    except ImportError:
        return import_module(f"{second}._api")


def require_package_for_gpus(api: Any) -> None:
    """Raises ConfigError when these bindings are for another CUDA than torch's: they would take a GPU's memory for the
    CPU's.
    """
    wanted, found = _MODULES.get(_cuda_of_torch()), api.__name__.partition(".")[0]
    if wanted is None:
        raise ConfigError.bad_value(_KEY, "NIXL", f"torch for CUDA {' or '.join(_MODULES)} on a CUDA device")
    if found != wanted:
        package = wanted.replace("_", "-")
        raise ConfigError.bad_value(
            _KEY,
            "NIXL",
            f"{package} for torch's CUDA {torch.version.cuda} on a CUDA device, and {found} is what was found: "
            f"pip install {package}==1.5.1",
        )


def _cuda_of_torch() -> str:
    """The major version; empty for a torch without CUDA."""
    return (torch.version.cuda or "").partition(".")[0]
