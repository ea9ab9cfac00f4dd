"""What launch/*.sh start, and the key that they make: with a stand-in for Python."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dynamo._core import get_reasoning_parser_names, get_tool_parser_names

from tests.support.deployments import ROOT
from tests.support.kubernetes import components, container, rendered
from trtllm_disagg.common.cli import _with_values
from trtllm_disagg.config.args import parse_worker_flags
from trtllm_disagg.strategies import disaggregated
from trtllm_disagg.tools.up.plan import DeploymentConfig, worker_arguments
from trtllm_disagg.tools.up.up_command import add_arguments, engine_configs_in

#: Prints its arguments and environment, and makes keys.
STAND_IN = f"""#!{sys.executable} -P
import json, os, sys
if "trtllm_disagg.tools.admin.user_key" in sys.argv:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""
#: Of each model for TensorRT-LLM: of tool calls and of reasoning.
PARSERS = {
    "deepseek-r1": ("deepseek_v3", "deepseek_r1"),
    "gpt-oss-120b": ("harmony", "gpt_oss"),
    "llama-3.1-8b": ("llama3_json", None),
    "llama-3.3-70b-fp8": ("llama3_json", None),
    "qwen3": ("hermes", "qwen3"),
    "qwen3-235b-a22b-fp8": ("hermes", "qwen3"),
    "qwen3-32b-fp8": ("hermes", "qwen3"),
    "qwen3-32b-fp8-agents": ("hermes", "qwen3"),
}
WORKERS = ("prefill.sh", "decode.sh", "agg_worker.sh")


class Scripts:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "python").write_text(STAND_IN)
        (directory / "python").chmod(0o700)

    def run(self, script: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        not_ours = ("TRTLLM_DISAGG_", "DYN_", "ETCD_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(not_ours)}
        environment = {
            "PYTHON": str(self._directory / "python"),
            "MODEL": "m",
            "DYN_FILE_KV": str(self._directory / "discovery"),
            "XDG_STATE_HOME": str(self._directory / "state"),
        }
        command = [str(ROOT / "launch" / script), *args]
        return subprocess.run(
            command, env=inherited | environment | variables, capture_output=True, text=True, timeout=60
        )

    def started(self, script: str, *args: str, **variables: str) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment."""
        done = self.run(script, *args, **variables)
        assert done.returncode == 0, done.stderr
        argv, environment = json.loads(done.stdout)
        assert argv[:2] == ["-P", "-m"], "nothing is imported from the current directory"
        return argv[2:], environment

    @property
    def key(self) -> Path:
        return self._directory / "state" / "trtllm-disagg" / "admin.key"


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def up_flags(argv: list[str]) -> argparse.Namespace:
    assert argv[:2] == ["trtllm_disagg", "up"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(_with_values(argv[2:]))


@pytest.mark.parametrize("strategy", disaggregated())
def test_disagg_script_is_up_with_its_settings(scripts: Scripts, strategy: str) -> None:
    settings = {
        "SERVED_MODEL_NAME": 'my "odd" model',
        "HTTP_PORT": "8123",
        "STOP_TIMEOUT": "7",
        "ENGINE": "modelled",
    }
    more = ("--max-seq-len", "99", "--override-engine-args", '{"max_batch_size": 4}')
    argv, _ = scripts.started("disagg.sh", strategy, *more, STARTUP_TIMEOUT="60", RUN_DIR="run", **settings)
    given = up_flags(argv)
    assert (given.strategy, given.model, given.served_model_name) == (strategy, "m", 'my "odd" model')
    assert (given.http_port, given.stop_timeout, given.startup_timeout) == (8123, 7, 60)
    assert (given.engine, given.run_dir, given.worker_args) == ("modelled", Path("run"), list(more))


def test_agg_script_is_up_with_one_worker(scripts: Scripts) -> None:
    argv, _ = scripts.started("agg.sh", ENGINE_CONFIGS="configs", PUBLISH_METRICS="no", IMAGES="yes")
    given = up_flags(argv)
    assert (given.strategy, given.engine_configs) == ("agg", Path("configs"))
    assert given.worker_args == ["--enable-multimodal", "--no-publish-metrics"]


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("script", WORKERS)
def test_workers_understand_what_the_scripts_give_them(scripts: Scripts, script: str, quiet: bool) -> None:
    given = {"STRATEGY": "prefill_first", "ENGINE": "recording", "ENGINE_CONFIGS": "configs"}
    given |= {"PUBLISH_METRICS": "no", "IMAGES": "yes"} if quiet else {}
    argv, environment = scripts.started(script, "--max-seq-len", "99", **given)
    assert argv[:2] == ["trtllm_disagg", "worker"]
    role = script.removesuffix(".sh").removesuffix("_worker")
    config = parse_worker_flags(argv[2:], environment, is_elsewhere=True)
    assert (config.role, config.engine, config.max_seq_len) == (role, "recording", 99)
    assert (config.extra_engine_args, config.served_model_name) == (f"configs/{role}.yaml", "m")
    assert (config.publish_kv_events, config.publish_metrics, bool(config.images)) == (True, not quiet, quiet)
    assert role == "agg" or config.strategy == "prefill_first"


@pytest.mark.parametrize("model", PARSERS)
def test_up_scripts_and_manifests_start_workers_with_their_models_parsers(
    scripts: Scripts, model: str, tmp_path: Path
) -> None:
    configs = ROOT / "engine_configs" / model
    files = engine_configs_in(configs, "decode_first")
    of_up = worker_arguments(DeploymentConfig("decode_first", "m", "m", tmp_path, engine_configs=files))
    of_script, _ = scripts.started("decode.sh", ENGINE_CONFIGS=str(configs))
    pod = container(components(rendered(ROOT / "deploy" / "k8s" / "decode_first"))["decode"])
    of_pod = [word.replace("/opt/trtllm-disagg/engine_configs/qwen3", str(configs)) for word in pod["args"]]
    for flags in (of_up["decode"], of_script[2:], ["--model", "m", *of_pod]):
        worker = parse_worker_flags(flags, {}, is_elsewhere=True)
        assert (worker.tool_call_parser, worker.reasoning_parser) == PARSERS[model]
        own = parse_worker_flags(flags, {"DYN_TOOL_CALL_PARSER": "default"}, is_elsewhere=True)
        assert own.tool_call_parser == "default", "what is set wins"


def test_dynamo_knows_the_parsers_and_each_model_has_its_own() -> None:
    assert {path.parent.name for path in (ROOT / "engine_configs").glob("*/worker.env")} == set(PARSERS)
    for tools, reasoning in PARSERS.values():
        assert tools in get_tool_parser_names()
        assert reasoning in (*get_reasoning_parser_names(), None)


def test_discovery_in_files_is_this_users_alone_where_no_directory_is_named(
    scripts: Scripts, tmp_path: Path
) -> None:
    unnamed = {"DYN_FILE_KV": "", "XDG_RUNTIME_DIR": "", "TMPDIR": str(tmp_path)}
    scripts.started("prefill.sh", **unnamed)
    made = tmp_path / f"trtllm-disagg-discovery-{os.getuid()}"
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_discovery_directory_that_another_one_put_there_is_refused(
    scripts: Scripts, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"trtllm-disagg-discovery-{os.getuid()}").symlink_to(elsewhere)
    unnamed = {"DYN_FILE_KV": "", "XDG_RUNTIME_DIR": "", "TMPDIR": str(tmp_path)}
    refused = scripts.run("decode.sh", **unnamed)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "DYN_FILE_KV: " in refused.stderr


def test_all_workers_have_one_key_that_only_this_user_can_read(scripts: Scripts) -> None:
    keys = set()
    for script in (*WORKERS, "agg_worker.sh"):
        _, environment = scripts.started(script)
        keys.add((environment["TRTLLM_DISAGG_ADMIN_KEY_FILE"], scripts.key.read_bytes()))
    assert keys == {(str(scripts.key), scripts.key.read_bytes())}
    assert scripts.key.stat().st_mode & 0o777 == 0o600


def test_given_admin_key_file_is_used_and_none_is_made(scripts: Scripts) -> None:
    _, environment = scripts.started("agg_worker.sh", TRTLLM_DISAGG_ADMIN_KEY_FILE="/mine")
    assert environment["TRTLLM_DISAGG_ADMIN_KEY_FILE"] == "/mine"
    assert not scripts.key.exists()


def test_where_no_key_can_be_made_the_worker_starts_without(scripts: Scripts) -> None:
    _, environment = scripts.started("agg_worker.sh", XDG_STATE_HOME="/proc/none")
    assert environment["TRTLLM_DISAGG_ADMIN_KEY_FILE"] == ""


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
def test_frontend_and_workers_use_one_discovery_and_namespace(
    scripts: Scripts, variables: dict[str, str], backend: str
) -> None:
    suffix = {"DYN_NAMESPACE_WORKER_SUFFIX": "blue"}
    argv, environment = scripts.started("agg_worker.sh", **variables, **suffix)
    worker = parse_worker_flags(argv[2:], environment, is_elsewhere=True)
    argv, _ = scripts.started("frontend.sh", **variables)
    frontend = [argv[argv.index(flag) + 1] for flag in ("--namespace", "--discovery-backend")]
    assert [worker.namespace, worker.discovery_backend] == frontend == ["dynamo", backend]


@pytest.mark.parametrize(
    ("lengths", "given", "images", "limit"),
    [
        ((2048, 99), "", "no", "2"),
        ((999, 131_073), "", "", "5"),
        ((2048,), "", "yes", "18"),
        ((2048,), "45", "yes", "45"),
        ((), "", "yes", None),
    ],
)
def test_the_frontend_takes_no_body_much_longer_than_a_prompt_and_no_thresholds_of_clients(
    scripts: Scripts, tmp_path: Path, lengths: tuple[int, ...], given: str, images: str, limit: str | None
) -> None:
    for name, length in enumerate(lengths):
        (tmp_path / f"{name}.yaml").write_text(f"max_batch_size: 4\nmax_seq_len: {length}  # tokens\n")
    configs = str(tmp_path) if lengths else ""
    variables = {"DYN_HTTP_BODY_LIMIT_MB": given, "IMAGES": images}
    _, environment = scripts.started("frontend.sh", ENGINE_CONFIGS=configs, **variables)
    assert (environment["DYN_HTTP_BODY_LIMIT_MB"] or None) == limit
    assert environment["DYN_DISABLE_FRONTEND_ADMIN_API"] == "1"


def test_each_worker_has_the_gpus_of_its_role(scripts: Scripts) -> None:
    given = {"PREFILL_CUDA_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "4"}
    devices = [scripts.started(script, **given)[1]["CUDA_VISIBLE_DEVICES"] for script in WORKERS]
    assert devices == ["0,1", "4", "4"]


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("script", [*WORKERS, "agg.sh", "disagg.sh", "mpi.sh", "slurm/deployment.sh"])
def test_help_prints_the_head_of_the_script_and_the_settings(script: str, flag: str, tmp_path: Path) -> None:
    file = ROOT / "launch" / script
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    said = subprocess.run([file, flag], env=environment, capture_output=True, text=True, check=True)
    assert said.stderr == ""
    assert said.stdout.splitlines()[0] == file.read_text().splitlines()[1].removeprefix("# ")
    assert "  MODEL=  " in said.stdout
    assert "${" not in said.stdout
    assert list(tmp_path.iterdir()) == []
