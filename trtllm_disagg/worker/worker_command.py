"""`trtllm-disagg worker`."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_disagg.config.args import add_worker_arguments, config_from_namespace, with_dotted_flags
from trtllm_disagg.config.dynamo_flags import RUNTIME_VARIABLES
from trtllm_disagg.config.thresholds import Thresholds
from trtllm_disagg.config.worker_config import WorkerConfig, flag_of
from trtllm_disagg.config.yaml_file import read_mapping
from trtllm_disagg.engine.engines import resolve_engine
from trtllm_disagg.engine.mpi_start import keeping_cpus, require_start
from trtllm_disagg.errors import ERROR_PREFIX, ConfigError, DisaggError, EngineLostError
from trtllm_disagg.model_directory import servable_model
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.processes.machine import check_limits, needs_of_worker
from trtllm_disagg.processes.reports import reporter_of
from trtllm_disagg.processes.watchdog import family, watch_over_this_process

if TYPE_CHECKING:
    from trtllm_disagg.engine.llm_api import LlmApi

log = logging.getLogger(__name__)

add_arguments = add_worker_arguments
prepare = with_dotted_flags


def run(namespace: argparse.Namespace) -> ExitCode:
    config, engine_args, api = read_settings(namespace)
    has_peers = config.peer_endpoint_id is not None
    for shortage in check_limits(
        needs_of_worker(has_peers=has_peers, discovery_backend=config.discovery_backend)
    ):
        log.info("%s", shortage)
    status = ExitStatus()
    try:
        # Imported only after the settings are checked: these imports take seconds.
        import uvloop

        from trtllm_disagg.worker.worker import run_worker

        if config.frozen_seconds:
            watch_over_this_process(config.frozen_seconds)
        # Until the engine is loaded; then the worker leaves its deployment on this signal (`Leaving`).
        signal.signal(signal.SIGTERM, status.interrupt)
        uvloop.run(run_worker(config, engine_args, api))
    except (ConfigError, ModuleNotFoundError):
        status.value = ExitCode.WRONG_SETTING
        raise
    except EngineLostError as error:
        earlier = error.__context__
        if isinstance(earlier, ConfigError):
            status.value = ExitCode.WRONG_SETTING
        # The earlier error is the reason, so it is printed last, where users look first.
        for shown in (error, earlier):
            if isinstance(shown, DisaggError):
                print(f"{ERROR_PREFIX}{shown}", file=sys.stderr)
        # Not left to the exit handler: Python waits for the engine's threads before it runs any.
        status.end(config.engine_spec.is_tensorrt_llm)
        raise
    except KeyboardInterrupt:
        # The engine may still be loading, and Python would wait for the threads that it has started.
        status.value = status.interrupted
        status.end(config.engine_spec.is_tensorrt_llm)
        raise
    status.value = ExitCode.DONE
    return status.value


def read_settings(namespace: argparse.Namespace) -> tuple[WorkerConfig, dict[str, Any], LlmApi]:
    """The configuration as resolved, the engine's arguments, and its API. Raises ConfigError for what is wrong."""
    # Imported here because `--help` does not need them.
    from trtllm_disagg.config.engine_args import build_engine_args, with_engine_args
    from trtllm_disagg.engine.llm_api import check_model, load_api

    reporter_of(os.environ).tell("checking its settings")
    config = config_from_namespace(namespace, os.environ)
    # Dynamo's runtime reads these variables when it is created.
    for name, value in getattr(namespace, RUNTIME_VARIABLES, {}).items():
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value
    directory = servable_model(config.model, revision=config.revision)
    config = replace(
        config,
        model=str(directory),
        served_model_name=config.model_name,
        engine=resolve_engine(config.engine),
    )
    engine_args = build_engine_args(config)
    config = with_engine_args(config, engine_args)
    # Only a check: the file may change while the engine loads, so it is read again afterwards.
    if (policy := config.policy_file) is not None:
        Thresholds.of(config).changed(read_mapping(Path(policy), flag_of("policy_file")), policy)
    # All ranks of TensorRT-LLM must compute the same hashes (as in Dynamo's worker); the other engines have threads of
    # their own, and those of OpenMP would compete with them for the cores.
    name, value = ("PYTHONHASHSEED", "0") if config.engine_spec.is_tensorrt_llm else ("OMP_NUM_THREADS", "1")
    os.environ.setdefault(name, value)
    if config.engine_spec.is_tensorrt_llm:
        require_start(engine_args, os.environ)
    with keeping_cpus():
        api = load_api(config.engine)
    check_model(config.engine, engine_args)
    return config, engine_args, api


class ExitStatus:
    """Ends this process after all exit handlers registered later have run, before Python finalises the interpreter.

    Dynamo's threads may call into Python at any time. During finalisation Python ends such a thread, which Rust treats
    as an error: the process aborts (SIGABRT) and its exit status is lost.
    """

    def __init__(self) -> None:
        self.value = ExitCode.FAILED
        #: The status after an interrupt.
        self.interrupted = ExitCode.INTERRUPTED
        atexit.register(self._end_unless_in_a_job)

    def interrupt(self, number: int, frame: object) -> None:
        """Handles SIGTERM as Ctrl-C."""
        self.interrupted = ExitCode.TERMINATED
        signal.raise_signal(signal.SIGINT)

    def _end_unless_in_a_job(self) -> None:
        # `import tensorrt_llm` starts MPI, also where it is a job of one.
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            if mpi.COMM_WORLD.size > 1:
                return  # the other ranks wait until this one finalises MPI, which Python does later
            mpi.Finalize()
        self.end()

    def end(self, with_engine: bool = False) -> None:
        """End the process now, with `value` as its status. `with_engine`: kill what it has started, too. TensorRT-LLM's
        ranks are processes that hold GPU memory until they notice.
        """
        for pid in family(os.getpid())[1:] if with_engine else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(self.value)
