"""What changes a worker is signed with the deployment's key: fresh, for this worker, once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.clock import Clock
from trtllm_disagg.admin.commands import CONTROL, VALID_SECONDS, Command, Set, Signer, Switch, Verifier
from trtllm_disagg.admin.keys import KEY_BYTES, AdminKey
from trtllm_disagg.errors import CommandRefusedError, ConfigError, InvalidRequestError
from trtllm_disagg.tools.admin.user_key import make_once

ME, ANOTHER = 7, 8
KEY = AdminKey(b"k" * KEY_BYTES)
CHANGES: list[Command] = [Switch("auto"), Set({"max_local_prefill_length": 7})]


@dataclass
class Pair:
    """A signer and a verifier, each with a clock of its own."""

    def __init__(self, key: AdminKey = KEY) -> None:
        self.theirs, self.mine = Clock(1e9), Clock(1e9)
        self._signer = Signer(key, self.theirs)
        self.verifier = Verifier(KEY, ME, self.mine)

    def signed(self, command: Command, instance_id: int = ME) -> Any:
        return self._signer.request(command, instance_id)[CONTROL]


@pytest.mark.parametrize("command", CHANGES)
def test_a_signed_command_is_taken(command: Command) -> None:
    pair = Pair()
    assert pair.verifier.command_of(pair.signed(command)) == command


@pytest.mark.parametrize("command", CHANGES)
def test_an_unsigned_command_is_refused(command: Command) -> None:
    with pytest.raises(CommandRefusedError, match=f"not signed.*{KEY.id}"):
        Verifier(KEY, ME).command_of(msgspec.to_builtins(command))


def test_a_worker_without_key_takes_no_signed_command() -> None:
    with pytest.raises(CommandRefusedError, match=r"no key .* --admin-key-file FILE"):
        Verifier(None, ME).command_of(Pair().signed(Switch("auto")))


def test_a_command_with_another_key_is_refused() -> None:
    other = AdminKey(b"o" * KEY_BYTES)
    pair = Pair(other)
    with pytest.raises(CommandRefusedError, match=f"another key ..{other.id}.. than this worker's .{KEY.id}"):
        pair.verifier.command_of(pair.signed(Switch("auto")))


@pytest.mark.parametrize(
    "change", [{"order": "{}"}, {"signature": "0" * 64}, {"signature": ""}, {"signature": "é"}]
)
def test_a_command_that_was_altered_is_refused(change: dict[str, str]) -> None:
    pair = Pair()
    with pytest.raises(CommandRefusedError, match="another key"):
        pair.verifier.command_of(pair.signed(Switch("auto")) | change)


def test_a_command_for_another_worker_is_refused() -> None:
    pair = Pair()
    with pytest.raises(CommandRefusedError, match="another worker, instance 8"):
        pair.verifier.command_of(pair.signed(Switch("auto"), ANOTHER))


def test_repeated_signed_command_is_refused() -> None:
    pair = Pair()
    signed = pair.signed(Switch("auto"))
    pair.verifier.command_of(signed)
    for seconds in (0.0, VALID_SECONDS / 2, VALID_SECONDS / 2):
        pair.mine.now += seconds
        with pytest.raises(CommandRefusedError, match="already executed this command"):
            pair.verifier.command_of(signed)
    assert pair.verifier.command_of(pair.signed(Switch("auto"))) == Switch("auto")


@pytest.mark.parametrize(
    ("seconds", "is_taken"),
    [
        *((seconds, True) for seconds in (VALID_SECONDS, -VALID_SECONDS)),
        *((seconds, False) for seconds in (VALID_SECONDS + 1, -VALID_SECONDS - 1, float("nan"))),
    ],
)
def test_only_a_command_signed_at_a_distant_time_is_refused(seconds: float, is_taken: bool) -> None:
    pair = Pair()
    pair.mine.now += seconds
    if is_taken:
        assert pair.verifier.command_of(pair.signed(Switch("auto"))) == Switch("auto")
    else:
        with pytest.raises(CommandRefusedError, match="clock"):
            pair.verifier.command_of(pair.signed(Switch("auto")))


@pytest.mark.parametrize(
    "raw",
    [
        *({"signature": 1}, {"signature": "x"}, {"signature": "x", "more": 1}, None, 5),
        *(
            {"order": text, "key": KEY.id, "signature": KEY.signature(text)}
            for text in ("{}", "[]", "nonsense")
        ),
    ],
)
def test_invalid_signed_command_or_one_of_another_version_is_refused(raw: Any) -> None:
    with pytest.raises(InvalidRequestError, match=CONTROL):
        Verifier(KEY, ME).command_of(raw)


# -- the file


def test_a_new_key_is_for_its_owner_only_and_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "key"
    keys = [AdminKey.create(path), AdminKey.create(path)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert AdminKey.read(path, "--key-file").id == keys[1].id != keys[0].id


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    AdminKey.create(tmp_path / "key")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("content", "mode", "named"),
    [
        (b"k" * 32, 0o640, "chmod 600"),
        (b"k" * 32, 0o602, "chmod 600"),
        (b"k" * 31, 0o600, "32 to 4096 random bytes"),
        (b"k" * 5000, 0o600, "32 to 4096 random bytes"),
    ],
)
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes, mode: int, named: str) -> None:
    (path := tmp_path / "key").write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"--key-file: '{path}' is not allowed.*{named}"):
        AdminKey.read(path, "--key-file")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--key-file: .*No such file"):
        AdminKey.read(tmp_path / "key", "--key-file")


def test_a_key_that_cannot_be_put_in_its_place_leaves_no_secret_behind(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="name too long"):
        make_once(tmp_path / ("x" * 256))
    assert list(tmp_path.iterdir()) == []
