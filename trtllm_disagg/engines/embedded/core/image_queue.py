"""Requests that wait for the vision tower."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from trtllm_disagg.engines.embedded.ipc.messages import AddRequest
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence
from trtllm_disagg.errors import EngineError

if TYPE_CHECKING:
    from trtllm_disagg.engines.embedded.model.vision import VisionTower

log = logging.getLogger(__name__)


class ImageQueue:
    """First come, first served, one image a call: running requests wait for one image at most."""

    def __init__(self, tower: VisionTower | None = None) -> None:
        self._tower = tower
        self._waiting: deque[tuple[AddRequest, Seq[Sequence]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: AddRequest, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            sequence.vectors = sequences[0].vectors
        self._waiting.append((request, sequences))

    def encode_one(self) -> Seq[Sequence]:
        """Encode an image; the choices of its request if that was the last one. If the tower fails, drops the request
        and raises EngineError.
        """
        request, sequences = self._waiting[0]
        vectors = sequences[0].vectors
        image, pixels = request.images[len(vectors)], request.pixels[len(vectors)]
        timer = sequences[0].timer
        try:
            assert self._tower is not None
            if timer is not None:
                timer.encodes()
            vectors[image.start] = self._tower.encode(pixels)
            if timer is not None:
                timer.encodes()
        except Exception as error:
            log.exception("an image could not be encoded")
            self._waiting.popleft()
            raise EngineError(f"an image could not be encoded: {error}") from error
        if len(vectors) < len(request.images):
            return ()
        self._waiting.popleft()
        return sequences

    @property
    def next_request(self) -> int:
        """Id of the request that `encode_one` works on."""
        return self._waiting[0][0].request_id

    def abort(self, request_id: int) -> Seq[Sequence]:
        """Drop the request; its choices, if it waits here."""
        for waiting in self._waiting:
            if waiting[0].request_id == request_id:
                self._waiting.remove(waiting)
                return waiting[1]
        return ()
