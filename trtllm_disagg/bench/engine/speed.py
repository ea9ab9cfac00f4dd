"""What was measured of the embedded engine beside its peers and the hardware's roofs."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtllm_disagg.bench.engine.contestants import EMBEDDED, LLAMA_CPP
from trtllm_disagg.bench.engine.plan import ITEM_BYTES, Size, computed_in
from trtllm_disagg.bench.engine.targets import judged
from trtllm_disagg.bench.figures import Figure, Sample, paired_ratio

PREFILL = "prefill"
_TOLERATED_WAIT = 0.05


def decode_of(batch: int) -> str:
    return f"decode b{batch}"


@dataclass(slots=True)
class Speeds:
    """One size, dtype and number of threads. Values at the same place are of the same round."""

    size: Size
    dtype: str
    threads: int
    #: Tokens a second, by test and contestant.
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    #: GB/s and GFLOP/s.
    read: list[float] = field(default_factory=list)
    multiply: list[float] = field(default_factory=list)
    #: Why a peer did not take part.
    absent: dict[str, str] = field(default_factory=dict)
    #: Of the peers: greedy answers that are the embedded engine's, of so many.
    agreeing: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: How much of their time all contestants waited for a core that somebody else had; 0 on a calm machine.
    waited: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.size.name} {self.dtype} {self.threads}t"

    @property
    def contestants(self) -> list[str]:
        return list(next(iter(self.rates.values())))

    @property
    def is_crowded(self) -> bool:
        """No verdict then: who spins while waiting for its own threads loses most."""
        return self.waited > _TOLERATED_WAIT

    def drop(self, peer: str, reason: str) -> None:
        """It failed; what it did so far is forgotten."""
        self.absent[peer] = reason
        self.agreeing.pop(peer, None)
        for rates in self.rates.values():
            rates.pop(peer, None)

    def rate(self, test: str, contestant: str) -> Sample:
        return Sample(tuple(self.rates[test][contestant]))

    def best_peer(self, test: str) -> str | None:
        peers = [name for name in self.rates[test] if name != EMBEDDED]
        return max(peers, key=lambda name: self.rate(test, name).median, default=None)

    def against(self, test: str, peer: str) -> Sample:
        """Times as fast as the peer, in pairs."""
        return paired_ratio(self.rates[test][EMBEDDED], self.rates[test][peer])

    def prefill_share(self) -> Sample:
        """Percent of the measured matrix product's rate; attention and the head are not counted as work."""
        flops = 2e-9 * self.size.layer_parameters
        ratios = paired_ratio([flops * rate for rate in self.rates[PREFILL][EMBEDDED]], self.multiply)
        return Sample(tuple(100 * ratio for ratio in ratios.values))

    def read_share(self) -> Sample:
        """Percent of the read bandwidth at batch 1; only weights are counted."""
        gigabytes = 1e-9 * self.size.streamed_parameters * ITEM_BYTES[computed_in(self.dtype)]
        ratios = paired_ratio([gigabytes * rate for rate in self.rates[decode_of(1)][EMBEDDED]], self.read)
        return Sample(tuple(100 * ratio for ratio in ratios.values))


def figures_of(speeds: Speeds) -> list[Figure]:
    judge = Figure if speeds.is_crowded else judged
    figures: list[Figure] = []
    for test, rates in speeds.rates.items():
        name = f"{speeds.name} {test}"
        figures += [Figure(f"{name} {who}", speeds.rate(test, who).median, "tok/s") for who in rates]
        if test == PREFILL and LLAMA_CPP in rates:
            ratio = speeds.against(test, LLAMA_CPP).median
            figures.append(judge(f"{name} {EMBEDDED} / {LLAMA_CPP}", ratio, "x"))
        if test != PREFILL and (peer := speeds.best_peer(test)) is not None:
            figures.append(judge(f"{name} {EMBEDDED} / best peer", speeds.against(test, peer).median, "x"))
    figures += [
        Figure(f"{speeds.name} waiting for a core", 100 * speeds.waited, "%"),
        Figure(f"{speeds.name} read bandwidth", Sample(tuple(speeds.read)).median, "GB/s"),
        Figure(f"{speeds.name} matrix product's rate", Sample(tuple(speeds.multiply)).median, "GFLOP/s"),
        judge(
            f"{speeds.name} prefill share of the matrix product's rate", speeds.prefill_share().median, "%"
        ),
    ]
    if decode_of(1) in speeds.rates:
        share = speeds.read_share().median
        figures.append(judge(f"{speeds.name} decode b1 share of the read bandwidth", share, "%"))
    return figures + [
        Figure(f"{speeds.name} greedy answers equal, {peer}", 100 * equal / of, "%")
        for peer, (equal, of) in speeds.agreeing.items()
    ]
