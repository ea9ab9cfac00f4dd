"""Whether more comes than is done, and how much is done then: of the times of a point's requests alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

#: Of the requests that come in the second half, so many end in it.
_ENDED_SHARE = 0.9
#: The last quarter takes so many times what the second one takes; and where the second half is a good deal shorter than
#: an answer, so that few of those that are done end in it.
_GROWTH, _GROWTH_SEEN_SHORTLY = 1.2, 1.5
_SHORTLY = 0.8
_FEWEST = 8


def done_share(arrivals: Sequence[float], latencies: Sequence[float]) -> float:
    """1 where what comes is done. Otherwise, of the requests that came in the second half, as many as ended in it: then
    the workers were full. In the order of their arrivals, in seconds.
    """
    count = len(arrivals)
    if count < _FEWEST:
        return 1.0
    middle, last = arrivals[count // 2], arrivals[-1]
    ended = sum(middle < begin + latency <= last for begin, latency in zip(arrivals, latencies, strict=True))
    before = median(latencies[count // 4 : count // 2])
    growth = median(latencies[-(count // 4) :]) / max(before, 1e-9)
    needed = _GROWTH if last - middle >= _SHORTLY * before else _GROWTH_SEEN_SHORTLY
    share = ended / (count - count // 2)
    return share if share < _ENDED_SHARE and growth > needed else 1.0
