"""The name of `trtllm_disagg.engines.embedded` up to 0.1; 0.3 will not have it."""

from __future__ import annotations

import sys
import warnings

from trtllm_disagg.engines import embedded

warnings.warn(
    "trtllm_disagg.embedded is trtllm_disagg.engines.embedded now", DeprecationWarning, stacklevel=2
)
sys.modules[__name__] = embedded
