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
from typing import TYPE_CHECKING, Any

from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.common.machine import check_limits, needs_of_worker
from trtllm_disagg.common.model_directory import servable_model
from trtllm_disagg.common.reports import reporter_of
from trtllm_disagg.common.watchdog import family, watch_over_this_process
from trtllm_disagg.config import args
from trtllm_disagg.config.dynamo_flags import RUNTIME_VARIABLES
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.engine.mpi_start import finalize, keeping_cpus, require_start
from trtllm_disagg.engine.table import resolve_engine
from trtllm_disagg.errors import ERROR_PREFIX, ConfigError, DisaggError, EngineLostError

if TYPE_CHECKING:
    from trtllm_disagg.engine.llm_api import LlmApi

log = logging.getLogger(__name__)

add_arguments = args.add_worker_arguments
prepare = args.with_dotted_flags


def run(namespace: argparse.Namespace) -> ExitCode:
    config, engine_args, api = read_settings(namespace)
    has_peers, backend = config.peer_endpoint_id is not None, config.discovery_backend
    for shortage in check_limits(needs_of_worker(has_peers=has_peers, discovery_backend=backend)):
        log.info("%s", shortage)
    status = ExitStatus()
    try:
        # Imported after checking the settings: these imports take seconds.
        import uvloop

        from trtllm_disagg.worker.worker import run_worker

        if config.frozen_seconds:
            watch_over_this_process(config.frozen_seconds)
        # Until the engine is loaded; then this signal makes the worker leave (`Leaving`).
        signal.signal(signal.SIGTERM, status.interrupt)
        uvloop.run(run_worker(config, engine_args, api))
    except (ConfigError, ModuleNotFoundError):
        status.value = ExitCode.WRONG_SETTING
        raise
    except EngineLostError as error:
        earlier = error.__context__
        if isinstance(earlier, ConfigError):
            status.value = ExitCode.WRONG_SETTING
        # The earlier error is the cause, so print it last, where users look first.
        for shown in (error, earlier):
            if isinstance(shown, DisaggError):
                print(f"{ERROR_PREFIX}{shown}", file=sys.stderr)
        # Not in an exit handler: Python first waits for the engine's threads.
        status.end(config.engine_spec.is_tensorrt_llm)
        raise
    except KeyboardInterrupt:
        # The engine may still be loading, and Python would wait for its threads.
        status.value = status.interrupted
        status.end(config.engine_spec.is_tensorrt_llm)
        raise
    status.value = ExitCode.DONE
    return status.value


def read_settings(namespace: argparse.Namespace) -> tuple[WorkerConfig, dict[str, Any], LlmApi]:
    """The resolved configuration, the engine's arguments, and its API. Raises ConfigError."""
    # `--help` does not need them.
    from trtllm_disagg.config.engine_args import build_engine_args, with_engine_args
    from trtllm_disagg.engine.llm_api import check_model, load_api

    reporter_of(os.environ).report("checking its settings")
    config = args.config_from_namespace(namespace, os.environ)
    # TensorRT-LLM, MPI and NCCL read these while loading.
    os.environ.update(args.with_variables_of_model(os.environ, config.extra_engine_args))
    # Dynamo's runtime reads these at its creation.
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
    # TensorRT-LLM's ranks must compute equal hashes (as in Dynamo's worker); OpenMP's threads would compete with the
    # other engines' threads for the cores.
    name, value = ("PYTHONHASHSEED", "0") if config.engine_spec.is_tensorrt_llm else ("OMP_NUM_THREADS", "1")
    os.environ.setdefault(name, value)
    if config.engine_spec.is_tensorrt_llm:
        require_start(engine_args, os.environ)
    with keeping_cpus():
        api = load_api(config.engine)
    check_model(config.engine, engine_args)
    return config, engine_args, api


class ExitStatus:
    """Ends this process after all later exit handlers, before Python finalises the interpreter.

    Dynamo's threads may call into Python at any time. Finalisation ends such a thread, which Rust treats as an error:
    the process aborts (SIGABRT) and loses its exit status.
    """

    def __init__(self) -> None:
        self.value = ExitCode.FAILED
        #: The status after an interrupt.
        self.interrupted = ExitCode.INTERRUPTED
        atexit.register(self._end_unless_in_a_job)

    def interrupt(self, number: int, frame: object) -> None:
        """Handle SIGTERM like Ctrl-C."""
        self.interrupted = ExitCode.TERMINATED
        signal.raise_signal(signal.SIGINT)

    def _end_unless_in_a_job(self) -> None:
        # `import tensorrt_llm` starts MPI, even as a job of one.
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            if mpi.COMM_WORLD.size > 1:
                return  # the other ranks wait for MPI's finalisation, which Python does later
            self._flush()
            finalize(mpi, self.value)
        self.end()

    def end(self, with_engine: bool = False) -> None:
        """End the process now, with `value` as status. `with_engine`: also kill its child processes, as TensorRT-LLM's
        ranks, which hold GPU memory until they notice.
        """
        for pid in family(os.getpid())[1:] if with_engine else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._flush()
        os._exit(self.value)

    def _flush(self) -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
