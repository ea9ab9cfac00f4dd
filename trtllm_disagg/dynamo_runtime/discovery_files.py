"""What Dynamo's file discovery holds of one worker."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from trtllm_disagg.config.settings import parse_endpoint_id


class DiscoveryFiles:
    """The files of a worker's instances. Each process touches its own ones every few seconds, and removes others that
    have not been touched for 10 s, for example because nothing could be written. Dynamo does not write them again.
    """

    def __init__(self, instance_id: int) -> None:
        store = os.environ.get("DYN_FILE_KV") or Path(tempfile.gettempdir()) / "dynamo_store_kv"
        self._directory = Path(store) / "v1" / "instances"
        self._instance_id = instance_id
        #: Only a file that was there can be lost: another version of Dynamo may write other ones.
        self._seen: set[str] = set()

    def has_lost(self, endpoint_ids: Iterable[str]) -> bool:
        """Whether the file of one of these endpoints, where this worker is in discovery, was there and is no more.
        False as long as the directory cannot be read.
        """
        try:
            there = {unquote(name) for name in os.listdir(self._directory)}
        except OSError:
            return False
        keys = {self._key(each) for each in endpoint_ids}
        self._seen = (self._seen | there) & keys
        return not self._seen <= there

    def _key(self, endpoint_id: str) -> str:
        return f"{parse_endpoint_id(endpoint_id).dotted.replace('.', '/')}/{self._instance_id:x}"
