"""The workers' descriptions of themselves, over Dynamo's discovery."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from trtllm_disagg.admin.client import quiet_runtime
from trtllm_disagg.commands import NoKeySigner
from trtllm_disagg.errors import DisaggError, PeerUnavailableError

_ANSWER_SECONDS = 5.0
_BACKEND, _ETCD = "DYN_DISCOVERY_BACKEND", "ETCD_ENDPOINTS"


class Discovery:
    def describe(self, namespace: str, variables: Mapping[str, str]) -> dict[int, dict[str, Any]]:
        if not variables.get(_BACKEND) and not variables.get(_ETCD):
            raise PeerUnavailableError("the deployment's discovery is not known here")
        os.environ.update(variables)
        with quiet_runtime(os.environ):
            try:
                return asyncio.run(_described(namespace, variables))
            except DisaggError:
                raise
            except Exception as error:
                raise PeerUnavailableError(f"discovery does not answer: {error}") from error


async def _described(namespace: str, variables: Mapping[str, str]) -> dict[int, dict[str, Any]]:
    from trtllm_disagg.dynamo_runtime import controller

    async with controller(
        backend=variables.get(_BACKEND) or "etcd",
        request_plane=variables.get("DYN_REQUEST_PLANE") or "tcp",
        event_plane=variables.get("DYN_EVENT_PLANE") or "zmq",
        namespace=namespace,
        signer=NoKeySigner(),
        timeout=_ANSWER_SECONDS,
    ) as workers:
        return {each.instance_id: each.description for each in await workers.workers()}
