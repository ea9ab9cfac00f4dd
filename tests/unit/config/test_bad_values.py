"""Values that make no sense are refused by name before anything is built, however odd they are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker_args import parse_worker_args
from trtllm_disagg.config.engine_args import build_engine_args, dump_config, with_engine_args
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.handlers.services import LiveState
from trtllm_disagg.tools.up.ports import free_http_port
from trtllm_disagg.tools.up.run_dir import RunDir
from trtllm_disagg.tools.up.up_command import add_arguments, config_from

HUGE = "99999999999999999999999"
LONG = "x" * 5000


def built(*flags: str) -> WorkerConfig:
    """As far as a worker gets before it loads anything."""
    config = parse_worker_args(["--model", "org/model", "--engine", "embedded", *flags], {})
    config = with_engine_args(config, build_engine_args(config))
    LiveState.of(config, 16)
    return config


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(
            (flag, HUGE)
            for flag in (
                "--breaker-failures",
                "--max-batch-size",
                "--max-num-tokens",
                "--max-seq-len",
                "--tensor-parallel-size",
            )
        ),
        # What has failed a request travels with it, and that list is bounded.
        ("--max-tries", "65"),
    ],
)
def test_number_above_the_flags_bound_is_refused(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag}: {value} .* from 1 to"):
        built("--disaggregation-mode", "decode", flag, value)
    assert built("--disaggregation-mode", "decode", "--max-tries", "64").max_tries == 64


@pytest.mark.parametrize(
    "url",
    [
        "nats://127.0.0.1:99999",
        "nats://127.0.0.1:port",
        "nats://[::1:4222",
        "nats://:4222",
        "nats://",
        "nats://one:4222,nats://two:x",
        "http://127.0.0.1:4222",
        "me:secret@h:1",
        "nats://me:secret@h:x",
        "nats://a:1,me:secret@h",
        "nats://me:secret@,secret@:4222",
    ],
)
def test_invalid_nats_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--nats-server: .* nats://host:port") as raised:
        built("--disaggregation-mode", "decode", "--prefill-dispatch", "queue", "--nats-server", url)
    assert "secret" not in str(raised.value)
    assert ("***@" in str(raised.value)) is ("@" in url)


@pytest.mark.parametrize("url", ["nats://h", "nats://[::1]:4222", "tls://u:p@h:1,nats://b"])
def test_every_form_of_a_nats_address_is_taken(url: str) -> None:
    assert built("--nats-server", url).nats_server == url


@pytest.mark.parametrize(
    "flag", ["--extra-engine-args", "--policy-file", "--custom-jinja-template", "--model"]
)
@pytest.mark.parametrize("path", [LONG, "/" + LONG, "nul\0"], ids=["long", "absolute", "nul"])
def test_impossible_path_is_refused_in_a_short_message(flag: str, path: str) -> None:
    if flag == "--model" and not path.startswith("/"):
        pytest.skip("a name on the hub")
    with pytest.raises(ConfigError, match=flag) as raised:
        built("--disaggregation-mode", "decode", flag, path)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("flag", ["--extra-engine-args", "--custom-jinja-template", "--dump-config-to"])
def test_home_of_an_unknown_user_is_refused_by_the_flags_name(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: '~no_such_user/file' is not allowed"):
        dump_config(built(flag, "~no_such_user/file"), {})


@pytest.mark.parametrize("text", ["9" * 5000, '{"max_batch_size": ' + "9" * 5000 + "}", "[" * 100_000])
def test_json_that_python_cannot_read_is_refused_in_a_short_message(text: str) -> None:
    with pytest.raises(ConfigError, match="--override-engine-args is not JSON: ") as raised:
        built("--override-engine-args", text)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "text", ['{"dtype": "auto", "dtype": "auto"}', '{"kv_cache_config": {"dtype": "auto", "dtype": "auto"}}']
)
def test_json_with_a_key_that_is_there_twice_is_refused_as_in_yaml(text: str) -> None:
    with pytest.raises(ConfigError, match="dtype is there twice in"):
        built("--override-engine-args", text)


UNREADABLE = {
    "a date that is none": "max_batch_size: 2020-13-45",
    "too deep": "[" * 3000,
    "half a list": "max_batch_size: [",
    "a tab": "a:\n\tb: 1",
}


@pytest.mark.parametrize("flag", ["--extra-engine-args", "--policy-file"])
@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_is_no_yaml_is_refused_by_its_path(flag: str, content: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as raised:
        built("--disaggregation-mode", "decode", flag, str(file))
    assert str(file) in str(raised.value)
    assert "YAML" in str(raised.value)


def test_yaml_alias_bomb_is_refused_in_a_short_message(tmp_path: Path) -> None:
    """Nine lists, each of nine times the one before: 4 million names in 300 bytes."""
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 7)]
    file = tmp_path / "settings.yaml"
    file.write_text("\n".join([*lines, "max_batch_size: *l6"]))
    with pytest.raises(ConfigError, match=r"settings.yaml .* has more than 1000000 values") as raised:
        built("--extra-engine-args", str(file))
    assert len(str(raised.value)) < 5000


def up(*flags: str) -> Any:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from(parser.parse_args(["--strategy", "agg", "--model", "m", *flags]), Path("run"))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--engine-configs", LONG),
        ("--startup-timeout", "nan"),
        ("--stop-timeout", "nan"),
        ("--http-host", ""),
        ("--http-host", " "),
    ],
)
def test_impossible_value_of_up_is_refused_by_its_flag(flag: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: "):
        up(flag, value, "--run-dir", str(tmp_path))


@pytest.mark.parametrize("host", ["a..b", "x" * 100])
def test_http_host_without_an_address_is_refused_by_its_flag(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--http-host: .* is not allowed; expected an address or a name"):
        free_http_port(host, 0)


@pytest.mark.parametrize("path", ["file", "file/run", "/proc/run", LONG])
def test_run_directory_that_cannot_be_created_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--run-dir: .* a directory that"):
        RunDir.claim(tmp_path / path)
