"""What launch/*.sh start, in which order they stop it, and the key that they make: with a stand-in for Python."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support.deployments import ROOT, wait_until
from trtllm_disagg.config.worker_config import SETTINGS
from trtllm_disagg.strategies import disaggregated, spec_of
from trtllm_disagg.tools.up.plan import DeploymentConfig

#: As a worker or a frontend: writes down how it was started, and its role when it is told to stop.
STAND_IN = f"""#!{sys.executable} -P
import os, signal, sys
if "-I" in sys.argv:  # it asks whether all are ready
    ready = os.environ.get("ASK") == "yes"
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]]) if ready else sys.exit(1)
if {{"trtllm_disagg.strategies", "trtllm_disagg.engine.engines", "trtllm_disagg.admin.keys",
    "trtllm_disagg.tools.up.for_scripts"}} & set(sys.argv):
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
role = sys.argv[sys.argv.index("--disaggregation-mode") + 1] if "trtllm_disagg" in sys.argv else "frontend"
def note(file, text):
    with open(os.path.join(os.path.dirname(__file__), file), "a") as out:
        out.write(text + "\\n")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
note("started", " ".join([role, *sys.argv[1:3], os.environ.get("TRTLLM_DISAGG_ADMIN_KEY_FILE", "")]))
note("arguments", " ".join([role, *sys.argv[4:]]))
note("discovery-backend", role + ":" + os.environ["DYN_DISCOVERY_BACKEND"])
note("suffix", role + ":" + os.environ.get("DYN_NAMESPACE_WORKER_SUFFIX", ""))
note("devices", role + ":" + os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
signal.sigwait([signal.SIGTERM])
note("stopped", role)
"""
SECONDS = 30.0


class Scripts:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: list[subprocess.Popen[bytes]] = []
        (directory / "python").write_text(STAND_IN)
        (directory / "python").chmod(0o700)

    def start(self, script: str, *args: str, **variables: str) -> subprocess.Popen[bytes]:
        environment = {
            "PYTHON": str(self._directory / "python"),
            "MODEL": "m",
            "DYN_FILE_KV": str(self._directory / "discovery"),
            "XDG_STATE_HOME": str(self._directory / "state"),
        }
        not_ours = {"TRTLLM_DISAGG_ADMIN_KEY_FILE", "DYN_DISCOVERY_BACKEND", "ETCD_ENDPOINTS"}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in not_ours and not name.endswith("CUDA_VISIBLE_DEVICES")
        }
        process = subprocess.Popen(
            [str(ROOT / "launch" / script), *args], env=inherited | environment | variables
        )
        self._running.append(process)
        return process

    def lines(self, file: str, count: int = 0) -> list[str]:
        """Of what was written down, once there are `count`."""
        path = self._directory / file
        wait_until(lambda: len(self._read(path)) >= count, f"{count} lines in {file}", SECONDS)
        return self._read(path)

    @property
    def key(self) -> Path:
        return self._directory / "state" / "trtllm-disagg" / "admin.key"

    def close(self) -> None:
        for process in self._running:
            process.terminate()
            process.wait(SECONDS)

    def _read(self, path: Path) -> list[str]:
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    made = Scripts(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("strategy", disaggregated())
def test_disagg_script_stops_processes_in_the_strategys_order(scripts: Scripts, strategy: str) -> None:
    running = scripts.start("disagg.sh", strategy)
    scripts.lines("started", 3)
    running.terminate()
    assert running.wait(SECONDS) == 128 + signal.SIGTERM, "it was not ready yet"
    stopped = scripts.lines("stopped")
    assert stopped == [*spec_of(strategy).stop_order, "frontend"]
    assert spec_of(strategy).entry_role in (stopped[0], None)


def test_disagg_script_gives_both_workers_the_arguments_behind_the_strategy(scripts: Scripts) -> None:
    scripts.start("disagg.sh", "auto", "--max-seq-len", "99")
    ends = {line.split()[0]: line.split()[-2:] for line in scripts.lines("arguments", 3)}
    assert ends["prefill"] == ends["decode"] == ["--max-seq-len", "99"]


def test_disagg_script_refuses_a_name_that_it_would_not_wait_for(scripts: Scripts) -> None:
    assert scripts.start("disagg.sh", "auto", "--served-model-name", "x").wait(SECONDS) == 1
    assert not scripts.lines("started", 0)


class Healthy(BaseHTTPRequestHandler):
    """Frontend and workers of a model with a name that JSON writes in another way."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": 'my "odd" model'}]}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_disagg_script_is_ready_when_a_model_is_listed_whose_name_json_escapes(
    scripts: Scripts, capfd: pytest.CaptureFixture[str]
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        Thread(target=server.serve_forever).start()
        port = str(server.server_port)
        ports = dict.fromkeys(("HTTP_PORT", "PREFILL_SYSTEM_PORT", "DECODE_SYSTEM_PORT"), port)
        running = scripts.start("disagg.sh", "auto", SERVED_MODEL_NAME='my "odd" model', ASK="yes", **ports)
        said = ""

        def is_ready() -> bool:
            nonlocal said
            said += capfd.readouterr().out
            return f'ready http://127.0.0.1:{port} model=my "odd" model' in said

        try:
            wait_until(is_ready, "the script is ready", SECONDS)
            running.terminate()
            assert running.wait(SECONDS) == 0
        finally:
            server.shutdown()


@pytest.mark.parametrize("script", ["prefill.sh", "decode.sh", "agg.sh"])
def test_workers_of_every_role_publish_their_kv_events(scripts: Scripts, script: str) -> None:
    scripts.start(script, STRATEGY="prefill_first")
    (arguments,) = scripts.lines("arguments", 1)
    assert "--publish-events-and-metrics" in arguments.split()


@pytest.mark.parametrize(
    ("engine", "drain", "arguments", "seconds"),
    [
        ("embedded", "", "", 30 + 15),
        ("embedded", "12", "", 12 + 15),
        ("embedded", "7.5", "", 7.5 + 15),
        ("embedded", "1e2", "", 100 + 15),
        ("embedded", "008", "", 8 + 15),
        ("embedded", "12", "--drain-seconds 40", 40 + 15),
        ("tensorrt_llm", "", "", 30 + 15 + 60),
    ],
)
def test_a_stop_leaves_a_worker_the_time_to_drain_and_to_end_its_engine(
    engine: str, drain: str, arguments: str, seconds: float
) -> None:
    assert SETTINGS["drain_seconds"].default == 30.0
    script = (
        f"unset STOP_TIMEOUT; source {ROOT / 'launch' / 'lib.sh'}; read_stop_timeout prefill,decode {arguments}; "
        "echo $STOP_TIMEOUT"
    )
    environment = os.environ | {"TRTLLM_DISAGG_DRAIN_SECONDS": drain, "DYN_DISCOVERY_BACKEND": "etcd"}
    environment |= {"MODEL": "m", "ENGINE": engine, "PYTHON": sys.executable}
    said = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert int(said.stdout) == math.ceil(seconds)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1", "node-7"])
def test_clients_are_told_the_same_address_as_by_up(host: str) -> None:
    script = f"source {ROOT / 'launch' / 'lib.sh'}; client_address"
    environment = os.environ | {"HTTP_HOST": host, "HTTP_PORT": "8123", "DYN_DISCOVERY_BACKEND": "etcd"}
    said = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    config = DeploymentConfig("auto", "m", "m", Path("run"), http_host=host, http_port=8123)
    assert f"http://{said.stdout.rstrip()}" == config.base_url


def test_a_given_stop_timeout_is_used() -> None:
    script = f"source {ROOT / 'launch' / 'lib.sh'}; read_stop_timeout prefill,decode; echo $STOP_TIMEOUT"
    environment = os.environ | {"STOP_TIMEOUT": "7", "DYN_DISCOVERY_BACKEND": "etcd", "PYTHON": "/none"}
    said = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "7\n"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("STOP_TIMEOUT", "2.5"),
        ("STOP_TIMEOUT", "abc"),
        ("STARTUP_TIMEOUT", "1.5"),
        ("STARTUP_TIMEOUT", "08"),
        ("HTTP_PORT", "abc"),
        ("DECODE_SYSTEM_PORT", "1x"),
    ],
)
def test_a_number_that_is_none_is_refused_before_anything_starts(
    scripts: Scripts, variable: str, value: str
) -> None:
    assert scripts.start("disagg.sh", "auto", **{variable: value}).wait(SECONDS) == 1
    assert scripts.lines("started") == []


def test_an_unknown_strategy_is_refused_with_those_that_are_known(scripts: Scripts) -> None:
    refused = scripts.start("disagg.sh", "sideways")
    assert refused.wait(SECONDS) == 1
    assert scripts.lines("started") == []


def test_nothing_is_imported_from_the_current_directory(scripts: Scripts) -> None:
    scripts.start("disagg.sh", "auto")
    started = {tuple(line.split()[1:3]) for line in scripts.lines("started", 3)}
    assert started == {("-P", "-m")}


def test_discovery_in_files_is_this_users_alone_where_no_directory_is_named(
    scripts: Scripts, tmp_path: Path
) -> None:
    unnamed = {"DYN_FILE_KV": "", "XDG_RUNTIME_DIR": "", "TMPDIR": str(tmp_path)}
    scripts.start("prefill.sh", **unnamed)
    scripts.lines("started", 1)
    made = tmp_path / f"trtllm-disagg-discovery-{os.getuid()}"
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_discovery_directory_that_another_one_put_there_is_refused(
    scripts: Scripts, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"trtllm-disagg-discovery-{os.getuid()}").symlink_to(elsewhere)
    unnamed = {"DYN_FILE_KV": "", "XDG_RUNTIME_DIR": "", "TMPDIR": str(tmp_path)}
    assert scripts.start("decode.sh", **unnamed).wait(SECONDS) == 1
    assert "DYN_FILE_KV: " in capfd.readouterr().err
    assert scripts.lines("started") == []


def test_all_workers_have_one_key_that_only_this_user_can_read(scripts: Scripts) -> None:
    for script in ("prefill.sh", "decode.sh", "agg.sh"):
        scripts.start(script)
    keys = {line.split()[3] for line in scripts.lines("started", 3)}
    assert keys == {str(scripts.key)}
    assert scripts.key.stat().st_mode & 0o777 == 0o600
    assert len(key := scripts.key.read_bytes()) == 32
    assert [path.name for path in scripts.key.parent.iterdir()] == ["admin.key"]

    scripts.start("agg.sh")
    scripts.lines("started", 4)
    assert scripts.key.read_bytes() == key


def test_given_admin_key_file_is_used_and_none_is_made(scripts: Scripts) -> None:
    scripts.start("agg.sh", TRTLLM_DISAGG_ADMIN_KEY_FILE="/mine")
    assert scripts.lines("started", 1)[0].split()[3] == "/mine"
    assert not scripts.key.exists()


def test_where_no_key_can_be_made_the_worker_starts_without(scripts: Scripts) -> None:
    scripts.start("agg.sh", XDG_STATE_HOME="/proc/none")
    assert scripts.lines("started", 1)[0].split()[3:] == []


@pytest.mark.parametrize(
    ("variables", "backend"),
    [
        ({}, "file"),
        ({"ETCD_ENDPOINTS": "http://a:2379"}, "etcd"),
        ({"ETCD_ENDPOINTS": "http://a:2379", "DYN_DISCOVERY_BACKEND": "kubernetes"}, "kubernetes"),
        ({"TRTLLM_DISAGG_DISCOVERY_BACKEND": "etcd", "DYN_DISCOVERY_BACKEND": "kubernetes"}, "etcd"),
    ],
    ids=["nothing", "etcd is named", "both", "a worker's variable"],
)
def test_frontend_and_workers_use_one_discovery(
    scripts: Scripts, variables: dict[str, str], backend: str
) -> None:
    scripts.start("agg.sh", **variables)
    scripts.start("frontend.sh", **variables)
    assert set(scripts.lines("discovery-backend", 2)) == {f"agg:{backend}", f"frontend:{backend}"}


def test_workers_are_in_the_namespace_of_the_frontend_whatever_suffix_the_environment_has(
    scripts: Scripts,
) -> None:
    scripts.start("agg.sh", DYN_NAMESPACE_WORKER_SUFFIX="blue")
    assert scripts.lines("suffix", 1) == ["agg:"]


@pytest.mark.parametrize(
    ("variables", "prefill", "decode"),
    [
        ({"ENGINE": "tensorrt_llm"}, "0", "1"),
        ({"TRTLLM_DISAGG_ENGINE": "tensorrt_llm"}, "0", "1"),
        ({}, "all", "all"),
        ({"PREFILL_CUDA_VISIBLE_DEVICES": "0,1", "DECODE_CUDA_VISIBLE_DEVICES": "2"}, "0,1", "2"),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, "4,5", "4,5"),
        ({"CUDA_VISIBLE_DEVICES": "", "ENGINE": "tensorrt_llm"}, "", ""),
        ({"ENGINE": "embedded"}, "all", "all"),
    ],
    ids=["one each", "by its variable", "embedded by default", "by role", "for all", "none", "embedded"],
)
def test_each_worker_has_the_gpus_of_its_role(
    scripts: Scripts, variables: dict[str, str], prefill: str, decode: str
) -> None:
    scripts.start("disagg.sh", "decode_first", **variables)
    frontend = variables.get("CUDA_VISIBLE_DEVICES", "all")
    assert set(scripts.lines("devices", 3)) == {
        f"prefill:{prefill}",
        f"decode:{decode}",
        f"frontend:{frontend}",
    }


FRACTIONS = "tensor_parallel_size: {tp}\nkv_cache_config: {{free_gpu_memory_fraction: {fraction}}}\n"
SHARED = {"PREFILL_CUDA_VISIBLE_DEVICES": "0,1", "DECODE_CUDA_VISIBLE_DEVICES": "1,2"}


@pytest.fixture
def engine_configs(tmp_path: Path) -> Callable[[float, int], dict[str, str]]:
    def write(fraction: float, tp: int) -> dict[str, str]:
        for role in ("prefill", "decode"):
            (tmp_path / f"{role}.yaml").write_text(FRACTIONS.format(fraction=fraction, tp=tp))
        return {"ENGINE_CONFIGS": str(tmp_path), "ENGINE": "tensorrt_llm"}

    return write


@pytest.mark.parametrize(
    ("script", "fraction", "more"),
    [
        ("disagg.sh", 0.6, ()),
        ("prefill.sh", 0.4, ("--trtllm.kv_cache_config.free_gpu_memory_fraction", "0.7")),
    ],
    ids=["both", "one, by its own flag"],
)
def test_gpus_that_overlap_are_refused_before_any_worker_starts_where_the_memory_does_not_fit(
    scripts: Scripts,
    script: str,
    fraction: float,
    more: tuple[str, ...],
    engine_configs: Callable[[float, int], dict[str, str]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    refused = scripts.start(script, *more, **engine_configs(fraction, 2), **SHARED)
    assert refused.wait(SECONDS) == 1
    assert scripts.lines("started") == []
    said = capfd.readouterr().err
    assert said.startswith(
        "error: PREFILL_CUDA_VISIBLE_DEVICES and DECODE_CUDA_VISIBLE_DEVICES: '1' is not allowed; expected GPUs of "
        "their own, or kv_cache_config.free_gpu_memory_fraction that add up to at most 1 on one that they share; they "
        f"are {more[1] if more else fraction} for prefill and {fraction} for decode"
    )


def test_gpus_of_lists_that_overlap_are_taken_where_the_memory_fits(
    scripts: Scripts, engine_configs: Callable[[float, int], dict[str, str]]
) -> None:
    scripts.start("disagg.sh", "decode_first", **engine_configs(0.5, 2), **SHARED)
    assert len(scripts.lines("started", 3)) == 3


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize(
    "script",
    [
        *("agg", "prefill", "decode", "frontend", "disagg", "mpi"),
        *("slurm/worker", "slurm/deployment"),
    ],
)
def test_help_prints_the_head_of_the_script_and_the_settings_and_leaves_nothing_behind(
    script: str, flag: str, tmp_path: Path
) -> None:
    file = ROOT / "launch" / f"{script}.sh"
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    said = subprocess.run([file, flag], env=environment, capture_output=True, text=True, check=True)
    assert said.stderr == ""
    assert said.stdout.splitlines()[0] == file.read_text().splitlines()[1].removeprefix("# ")
    assert "  MODEL=  " in said.stdout
    assert "${" not in said.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_all_or_none_prints_its_head_and_ends_no_process(flag: str) -> None:
    """As a command, the flag would fail, and with it the whole process group of the shell that asks."""
    file = ROOT / "launch" / "all_or_none.sh"
    said = subprocess.run(
        ["bash", "-c", '"$0" "$1"; echo "$?, and still here"', file, flag],
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert said.stderr == ""
    assert said.stdout.startswith("COMMAND [ARG...]: a worker under trtllm-llmapi-launch")
    assert said.stdout.endswith("0, and still here\n")
