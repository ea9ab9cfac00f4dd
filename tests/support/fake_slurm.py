"""Stand-ins of the programs of Slurm and MPI that launch/ uses. They record their calls, and can run the given command
on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.deployments import ROOT, wait_until

SECONDS = 30.0
#: Recorded environment variables.
NOTED = ("DYN_SYSTEM_PORT", "ETCD_ENDPOINTS", "DYN_DISCOVERY_BACKEND", "PYTHON", "CUDA_VISIBLE_DEVICES")
MPIEXEC = Path(sysconfig.get_path("scripts")) / "mpiexec"

_NOTE = f"""#!{sys.executable} -P
import json, os, signal, sys
name, argv = os.path.basename(__file__), sys.argv[1:]
with open(os.path.join(os.path.dirname(__file__), name + ".calls"), "a") as out:
    noted = {{key: os.environ[key] for key in {NOTED} if key in os.environ}}
    out.write(json.dumps({{"argv": argv, "environment": noted}}) + "\\n")
"""
_WAIT = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.sigwait([signal.SIGTERM])
"""
#: Uses mpich, so that the embedded engine joins its ranks as under srun --mpi=pmi2.
_RUN = f"""
end = next(index for index, word in enumerate(argv) if not word.startswith("--"))
options = dict(word[2:].partition("=")[::2] for word in argv[:end])
by_mpi = [{str(MPIEXEC)!r}, "-n", options["ntasks"]] if options["mpi"] == "pmi2" else []
os.environ["SLURM_STEP_NUM_TASKS"] = options["ntasks"]
command = [*by_mpi, *argv[end:]]
os.execvp(command[0], command)
"""
_SCONTROL = """#!/usr/bin/env bash
[[ "$1 $2" == "show hostnames" ]] || exit 1
tr , '\\n' <<<"$3"
"""
#: Like TensorRT-LLM's: splits its arguments again, runs them in the first rank's background, and waits for the ranks
#: only, even if the command fails.
_LAUNCHER = """#!/usr/bin/env bash
export TLLM_SPAWN_PROXY_PROCESS=1
words="${@:1}"
(set -e; $words) &
exec sleep 600
"""


@dataclass
class FakeSlurm:
    """A job. Its programs are in `directory`, first in the scripts' PATH."""

    directory: Path
    nodes: str = "a,b"
    #: srun runs its command instead of waiting for SIGTERM.
    runs: bool = False
    _running: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir()
        self.program("srun", _NOTE + (_RUN if self.runs else _WAIT))
        self.program("mpirun", _NOTE)
        self.program("scontrol", _SCONTROL)
        self.program("trtllm-llmapi-launch", _LAUNCHER)

    def program(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text)
        path.chmod(0o700)
        return path

    def start(self, script: str | Path, *args: str, **variables: str) -> subprocess.Popen[str]:
        """Start a script of launch/. An empty variable counts as unset."""
        mine = ("SLURM_", "GPUS_", "TRTLLM_DISAGG_", "ETCD_", "DYN_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
        inherited = {name: value for name, value in inherited.items() if "CUDA_VISIBLE" not in name}
        environment = {
            "PATH": f"{self.directory}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": self.nodes,
            "XDG_STATE_HOME": str(self.directory / "state"),
        }
        with (self.directory / "output").open("w") as output:
            process = subprocess.Popen(
                [str(ROOT / "launch" / script), *args],
                env=inherited | environment | variables,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._running.append(process)
        return process

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()

    def calls(self, program: str = "srun", count: int = 0) -> list[Any]:
        """Its calls as {"argv", "environment"}, once there are `count`."""
        path = self.directory / f"{program}.calls"

        def lines() -> list[str]:
            return path.read_text().splitlines() if path.exists() else []

        wait_until(lambda: len(lines()) >= count, f"{count} calls of {program}", SECONDS)
        return [json.loads(line) for line in lines()]

    def close(self) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.wait(SECONDS)
