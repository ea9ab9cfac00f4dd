"""`trtllm-disagg worker`."""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import replace

from trtllm_disagg.args import add_worker_arguments, config_from_namespace
from trtllm_disagg.deployment.limits import look_at, needs_of_worker
from trtllm_disagg.model_directory import servable_model
from trtllm_disagg.watchdog import watch_over_this_process

log = logging.getLogger(__name__)

__all__ = ["add_arguments", "run"]

add_arguments = add_worker_arguments


def run(namespace: argparse.Namespace) -> int:
    config = config_from_namespace(namespace, os.environ)
    config = replace(config, model=str(servable_model(config.model)), served_model_name=config.model_name)
    has_peers = config.partner_endpoint_id is not None
    for doubt in look_at(needs_of_worker(has_peers=has_peers, discovery_backend=config.discovery_backend)):
        log.info("%s", doubt)
    # After the flags are known to be good: these imports take seconds.
    import uvloop

    from trtllm_disagg.worker import run_worker

    if config.frozen_seconds:
        watch_over_this_process(config.frozen_seconds)
    uvloop.run(run_worker(config))
    return 0
