"""Another user of the machine, against a running deployment: gets nothing, changes nothing, kills nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml

from tests.support.attacks import EVERY_DOOR, MAP_A_STOLEN_FILE, NIXL_WITH_A_STOLEN_CARD
from tests.support.deployments import MODEL_NAME, Served, demo_config, served
from tests.support.pools import pool_in_a_child
from tests.support.strangers import UID, as_stranger, require
from trtllm_disagg.engines.embedded.kv_transfer.base import PeerMetadata, decoded_address
from trtllm_disagg.engines.embedded.kv_transfer.control import ControlClient
from trtllm_disagg.engines.embedded.kv_transfer.nixl import NixlAddress

TRANSPORTS = ("NIXL", "SHARED_MEMORY")
#: Of a pool in a child: float32 0 and 1.
FIRST_NUMBERS = b"\0\0\0\0\0\0\x80?".hex()
STREAM, DATAGRAM = "0001", "0002"


@pytest.fixture(scope="module", params=TRANSPORTS)
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    require()
    directory = tmp_path_factory.mktemp("attacked")
    config = demo_config("prefill_first", directory / "run")
    changed: dict[Any, Path] = {}
    for role, file in config.engine_configs.items():
        settings = yaml.safe_load(file.read_text())
        settings["cache_transceiver_config"]["backend"] = request.param
        changed[role] = directory / f"{role}.yaml"
        changed[role].write_text(yaml.safe_dump(settings))
    attacked = demo_config("prefill_first", directory / "run", engine_configs=changed, startup_timeout=280.0)
    with served(attacked) as made:
        yield made


def processes(deployment: Served) -> list[psutil.Process]:
    roots = [psutil.Process(process.pid) for process in deployment.deployment.processes]
    return [*roots, *(child for root in roots for child in root.children(recursive=True))]


def listening(pids: set[int]) -> list[tuple[str, int]]:
    """The addresses that these processes listen on."""
    return [
        (each.laddr.ip, each.laddr.port)
        for each in psutil.net_connections("inet")
        if each.pid in pids and each.status == psutil.CONN_LISTEN and each.laddr
    ]


def unix_sockets(pids: set[int], kind: str) -> list[str]:
    """The named ones of these processes, abstract ones with an @ in front."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({row[7] for row in rows if len(row) > 7 and row[4] == kind and row[6] in inodes})


def shared_memory_files() -> list[str]:
    found = []
    for path in Path("/dev/shm").iterdir():
        # Those of other tests come and go.
        with suppress(FileNotFoundError):
            if path.owner() == "root":
                found.append(str(path))
    return found


def metadata_cache(names: list[str]) -> list[PeerMetadata]:
    """What only peers get: the test runs as the deployment's user."""
    client = ControlClient()
    try:
        return [client.metadata(f"unix://{name}", 5.0) for name in names if Path(name).name.startswith("kv-")]
    finally:
        client.close()


def answers(deployment: Served) -> list[str]:
    """Token-exact: greedy, and of prompts that went through both stages."""
    return [
        deployment.openai.completions.create(
            model=MODEL_NAME, prompt=f"{number} how are you today? " * 6, max_tokens=16, temperature=0
        )
        .choices[0]
        .text
        for number in range(4)
    ]


def test_attack_on_every_port_and_socket_as_another_user_gains_nothing(deployment: Served) -> None:
    before = answers(deployment)
    alive = processes(deployment)
    pids = {process.pid for process in alive}
    stolen = metadata_cache(unix_sockets(pids, STREAM))
    assert len(stolen) == 2
    transport = stolen[0].transport
    base = decoded_address(stolen[0], NixlAddress).base if transport == "NIXL" else 0
    aim = {
        "tcp": listening(pids),
        "stream": unix_sockets(pids, STREAM),
        "datagram": unix_sockets(pids, DATAGRAM),
        "pids": sorted(pids),
        "shm": shared_memory_files(),
        "address": base,
    }

    with ThreadPoolExecutor(1) as beside:
        meanwhile = beside.submit(answers, deployment)
        result = as_stranger(EVERY_DOOR, json.dumps(aim), seconds=280)

    assert result["got"] == []
    heard = bytes.fromhex(result["heard"])
    assert heard, "Dynamo's ports and the frontend do answer"
    for card in stolen:
        assert card.address not in heard
        assert card.sender.encode() not in heard
    assert b"layout" not in heard
    assert meanwhile.result() == before
    unharmed(deployment, alive, before)


def test_no_port_is_open_to_other_hosts(deployment: Served) -> None:
    pids = {process.pid for process in processes(deployment)}
    open_to_all = [place for place in listening(pids) if not place[0].startswith("127.")]
    assert open_to_all == []


def test_stolen_transfer_metadata_gives_another_user_no_kv(deployment: Served) -> None:
    """Even when all is known that peers are told."""
    alive = processes(deployment)
    stolen = metadata_cache(unix_sockets({process.pid for process in alive}, STREAM))
    before = answers(deployment)
    if stolen[0].transport == "NIXL":
        nothing_by_nixl(stolen[0])
    else:
        assert map_file(stolen[0]) == {"read": ""}
    unharmed(deployment, alive, before)


def nothing_by_nixl(metadata: PeerMetadata) -> None:
    address = decoded_address(metadata, NixlAddress)
    nowhere = msgspec.structs.replace(address, base=1 << 20)
    for tls, aim in (("tcp", address), ("tcp", nowhere), ("posix,cma,self", address), ("all", address)):
        result = attack(metadata, aim, tls)
        assert (result["read"], result["wrote"]) == ("", False), result


def test_the_same_attacks_succeed_where_a_port_or_the_user_is_open() -> None:
    """So the ones above would show it."""
    require()
    with pool_in_a_child("NIXL", "tcp") as (card, _):
        result = attack(card, decoded_address(card, NixlAddress), "tcp")
    assert result["read"].startswith(FIRST_NUMBERS), result
    assert result["wrote"]
    with pool_in_a_child("SHARED_MEMORY") as (card, _):
        assert map_file(card, uid=os.geteuid())["read"].startswith(FIRST_NUMBERS)


def map_file(metadata: PeerMetadata, uid: int = UID) -> Any:
    address = msgspec.msgpack.decode(metadata.address)
    aim = {"pid": address["process"]["pid"], "fd": address["fd"]}
    return as_stranger(MAP_A_STOLEN_FILE, json.dumps(aim), uid=uid)


def attack(metadata: PeerMetadata, address: NixlAddress, tls: str) -> Any:
    aim = {"name": metadata.sender, "metadata": address.metadata.hex(), "base": address.base, "bytes": 4096}
    mode = "none" if tls == "posix,cma,self" else "peer"
    return as_stranger(
        NIXL_WITH_A_STOLEN_CARD,
        json.dumps(aim),
        packages=("numpy", "nixl_cu13._api"),
        env={"UCX_TLS": tls, "ERROR_MODE": mode, "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"},
    )


def unharmed(deployment: Served, alive: list[psutil.Process], before: list[str]) -> None:
    assert [process.pid for process in alive if not process.is_running()] == []
    assert answers(deployment) == before
    deployment.wait_until_idle()
