"""Products of a few rows with a packed weight, as fast as memory delivers the weight.

The weight is oneDNN's packed copy (linear.py): panels of 64 outputs; a panel has one line of 64 weights per input
(float32) or per pair of inputs (bfloat16). The inner loop is generated vector code: `rows` x 64 sums stay in registers
while the panel streams by. Sums run over the inputs in order, in blocks of `block` inputs, and the blocks' totals are
added. oneDNN does the same, so both give the same bits. With fewer or narrower registers the kernel reads a panel in
parts, one after the other, for the same sums.

More rows need several passes. All passes process a piece of the panel before the next piece: only the first one waits
for memory, and each prefetches its share of the next piece. Between pieces, sums are in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic

from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compiled
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import first_level_cache, this_cpu
from trtllm_disagg.engines.embedded.cpu_kernels.llvm_ir import (
    CACHE_LINE,
    FLOATS,
    I64,
    LANES,
    Arithmetic,
    constant,
    emit_loop,
    emit_prefetch,
    emitted,
    outlined,
    pointer,
)
from trtllm_disagg.engines.embedded.cpu_kernels.parallel import in_parts

# bfloat16 products by tiles (AMX), with a weight that oneDNN has packed for them: the bits of its own products.
#
# Such a weight is panels of 32 outputs, with a line of 32 pairs for each pair of inputs. A tile of it is 16 outputs by
# 32 inputs; up to 16 rows of x are another one, and their products are summed up in a third, of 16 results a row. Two
# tiles of rows share what has been read of the weight. Instructions: Intel, Architecture Instruction Set Extensions.

#: Outputs of a panel: half of a `PANEL`; two of these lie in its place.
TILE_PANEL = 32
#: Rows of a tile; of x, results, or pairs of inputs of the weight.
TILE_ROWS = 16
#: Inputs of a tile.
TILE_INPUTS = 32
#: Bytes of a row of a tile, of a line of a panel, and of both tiles of a panel.
_TILE_LINE, _PANEL_LINE, _BOTH_TILES = 64, 128, 2048
#: Bytes of the weight that are fetched ahead of their use.
_AHEAD = 4 * _BOTH_TILES
#: Tiles: four of results, two of x, two of the weight.
_RESULTS, _X, _WEIGHTS = ((0, 1), (2, 3)), (4, 5), (6, 7)
#: Places in the 64 bytes that describe the tiles.
_PALETTE, _LINE_BYTES, _ROWS = 0, 16, 48

# LLVM reads inline assembly with it; numba sets up none.
binding.initialize_native_asmparser()


def as_block(outputs: int) -> int:
    """What `multiply` gets in place of a block for such a weight with a number of outputs: its panels, negative."""
    return -outputs // TILE_PANEL


def _emit(b: Any, instruction: str, *values: Any) -> None:
    """`instruction` in AT&T's notation, with the values as $0, $1. LLVM itself uses no tiles."""
    function_type = ir.FunctionType(ir.VoidType(), [I64] * len(values))
    constraints = ",".join([*("r" for _ in values), "~{memory}"])
    b.asm(function_type, instruction, constraints, list(values), side_effect=True)


@emitted(types.void, types.intp)
def _configure(b: Any, address: Any) -> None:
    _emit(b, "ldtilecfg ($0)", address)


@emitted(types.void)
def _release(b: Any) -> None:
    """Threads without tiles are cheaper to switch."""
    _emit(b, "tilerelease")


@intrinsic
def _panel(typing: Any, x: Any, tiles: Any, addresses: Any) -> Any:
    """One or two tiles of rows by one panel: (x, its stride, weights, steps, out, its stride), in bytes. Nothing for an
    x that is not bfloat16: there are processors without these instructions.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if x.dtype == types.uint16:
            with builder.if_else(builder.icmp_signed("==", values[1], I64(1))) as (one, two):
                with one:
                    _emit_panel(builder, 1, *unpack_tuple(builder, values[2]))
                with two:
                    _emit_panel(builder, 2, *unpack_tuple(builder, values[2]))
        return context.get_dummy_value()

    return types.void(x, types.intp, types.UniTuple(types.intp, 6)), generate


def _emit_panel(
    b: Any, tiles: int, x: Any, x_stride: Any, weights: Any, steps: Any, out: Any, out_stride: Any
) -> None:
    results, rows = _RESULTS[:tiles], [I64(TILE_ROWS * each) for each in range(tiles)]
    for result in (each for pair in results for each in pair):
        _emit(b, f"tilezero %tmm{result}")

    def step(number: Any, _: Any) -> None:
        line = b.add(weights, b.mul(number, I64(_BOTH_TILES)))
        soon = b.add(line, I64(_AHEAD))
        for offset in range(0, _BOTH_TILES, _TILE_LINE):
            emit_prefetch(b, b.add(soon, I64(offset)), 2)
        for half, tile in enumerate(_WEIGHTS):
            _emit(
                b, f"tileloadd ($0,$1,1), %tmm{tile}", b.add(line, I64(_TILE_LINE * half)), I64(_PANEL_LINE)
            )
        inputs = b.add(x, b.mul(number, I64(_TILE_LINE)))
        for row, tile, pair in zip(rows, _X, results, strict=False):
            _emit(b, f"tileloadd ($0,$1,1), %tmm{tile}", b.add(inputs, b.mul(x_stride, row)), x_stride)
            for result, weight in zip(pair, _WEIGHTS, strict=True):
                _emit(b, f"tdpbf16ps %tmm{weight}, %tmm{tile}, %tmm{result}")

    emit_loop(b, I64(0), steps, 1, [], step)
    for row, pair in zip(rows, results, strict=True):
        start = b.add(out, b.mul(out_stride, row))
        for half, result in enumerate(pair):
            place = b.add(start, I64(_TILE_LINE * half))
            _emit(b, f"tilestored %tmm{result}, ($0,$1,1)", place, out_stride)


@compiled()
def multiply_tiles(x: Any, weight: Any, out: Any, first: Any, last: Any) -> None:
    """out (rows, at least 32 * last) float32 = x (rows, inputs) bfloat16 as uint16, by panels `first` to `last` of 32
    outputs of the weight at address `weight`; inputs are a multiple of 32.
    """
    rows, inputs = x.shape
    x_stride, out_stride = x.strides[0], out.strides[0]
    described = np.zeros(64, np.uint8)
    described[_PALETTE] = 1
    for tile in range(8):
        described[_LINE_BYTES + 2 * tile] = _TILE_LINE
        described[_ROWS + tile] = TILE_ROWS
    configured = 0
    for panel in range(first, last):
        w, o = weight + panel * inputs * _TILE_LINE, out.ctypes.data + panel * _PANEL_LINE
        for row in range(0, rows, 2 * TILE_ROWS):
            count = min(rows - row, 2 * TILE_ROWS)
            tiles = 1 if count <= TILE_ROWS else 2
            if count != configured:
                configured = count
                upper = min(count, TILE_ROWS)
                described[_ROWS] = described[_ROWS + 1] = described[_ROWS + 4] = upper
                if tiles == 2:
                    lower = count - TILE_ROWS
                    described[_ROWS + 2] = described[_ROWS + 3] = described[_ROWS + 5] = lower
                _configure(described.ctypes.data)
            a = x.ctypes.data + row * x_stride
            _panel(x, tiles, (a, x_stride, w, inputs // TILE_INPUTS, o + row * out_stride, out_stride))
    _release()


# Other products, by vectors.

PANEL = 64
#: More rows than this in one pass do not fit the registers.
_MAX_ROWS = 6
_VECTORS = PANEL // LANES
#: Minimum products of two numbers for a thread that takes a part: about 20 us.
_PRODUCTS_OF_A_PART = 1 << 20
#: Bytes of a panel that one step, four bytes of a row of x, is multiplied with.
_STEP_BYTES = 4 * PANEL


def _vectors_at_once(rows: int) -> int:
    """Number of a panel's vectors summed up at a time: as many sums as fit the registers beside every row's input
    and two weights.
    """
    registers, floats = this_cpu().vector_registers
    each = -(-LANES // floats)
    fitting = (n for n in (_VECTORS, _VECTORS // 2) if rows * n * each + rows + 2 <= registers)
    return next(fitting, 1)


def _prefetches(rows: int) -> bool:
    """One or two rows that read whole lines, one after the other, leave it to the processor, which does it better."""
    return rows > 2 or _vectors_at_once(rows) < _VECTORS


def _steps_in_cache(bytes_: int) -> int:
    """A power of two: it, as much again that is prefetched, and the rows' inputs have room in these bytes."""
    return 1 << ((bytes_ // 3 // _STEP_BYTES).bit_length() - 1)


#: Steps of a piece. Up to three passes with wide registers wait for memory more than they compute: their weights stay
#: in the first-level cache, at the price of sums that are stored more often (docs/log/cpu-kernels.md).
_FEW_PASSES = 3
_SHORT, _LONG = _steps_in_cache(first_level_cache()), 256
if this_cpu().level != "avx512":
    _SHORT = _LONG
_FEWEST_PREFETCHING = next(rows for rows in range(1, _MAX_ROWS) if _prefetches(rows))


def _pass_of(rows: int) -> Any:
    """`rows` rows through a piece of one panel, as a function that numba code can call:

    (x as an array, (address of the rows, their stride, weights, steps, kept sums, continue?, out, row stride of out,
    add?, prefetched address, bytes a prefetch)), addresses and strides in bytes. `continue?` 0: sums begin with zero,
    else with the kept ones, (rows, 64). `add?` 0: out is written, else added to.
    """
    at_once = _vectors_at_once(rows)

    def emit(b: Any, arithmetic: Arithmetic, *arguments: Any) -> None:
        *given, prefetched, by = arguments
        for first in range(0, _VECTORS, at_once):
            before = b.mul(b.mul(given[3], by), I64(first))
            vectors = range(first, first + at_once)
            values = [*given, b.add(prefetched, before), by]
            _emit_pass(b, arithmetic, rows, vectors, *values)

    return outlined(f"gemm_{rows}", emit, 11)


def _emit_pass(
    b: Any,
    arithmetic: Arithmetic,
    rows: int,
    vectors: range,
    x: Any,
    x_stride: Any,
    weights: Any,
    steps: Any,
    kept: Any,
    continues: Any,
    out: Any,
    out_stride: Any,
    add: Any,
    prefetched: Any,
    by: Any,
) -> None:
    def sums_at(address: Any, stride: Any) -> list[list[Any]]:
        starts = [b.add(address, b.mul(stride, I64(r))) for r in range(rows)]
        return [[pointer(b, b.add(start, I64(CACHE_LINE * v)), FLOATS) for v in vectors] for start in starts]

    starts = [b.add(x, b.mul(x_stride, I64(r))) for r in range(rows)]
    before, load = b.block, b.append_basic_block("load")
    loop, after = b.append_basic_block("steps"), b.append_basic_block("sums")
    b.cbranch(b.icmp_signed("!=", continues, I64(0)), load, loop)
    b.position_at_end(load)
    kept_sums = [[b.load(place, align=4) for place in row] for row in sums_at(kept, I64(4 * PANEL))]
    b.branch(loop)
    b.position_at_end(loop)
    step, line, offset, soon = (b.phi(I64) for _ in range(4))
    totals = [[b.phi(FLOATS) for _ in vectors] for _ in range(rows)]
    if _prefetches(rows):
        for i in range(len(vectors)):
            emit_prefetch(b, b.add(soon, b.mul(by, I64(i))), arithmetic.cache_level)
    inputs = [arithmetic.emit_input(b, b.add(start, offset)) for start in starts]
    sums: list[list[Any]] = [[] for _ in range(rows)]
    for i, v in enumerate(vectors):
        line_weights = arithmetic.emit_weights(b, b.add(line, I64(CACHE_LINE * v)))
        for r in range(rows):
            sums[r].append(arithmetic.emit_sum(b, totals[r][i], inputs[r], line_weights))
    advances = (
        (step, I64(0), I64(1)),
        (line, weights, I64(_STEP_BYTES)),
        (offset, I64(0), I64(4)),
        (soon, prefetched, b.mul(by, I64(len(vectors)))),
    )
    for counter, start, amount in advances:
        counter.add_incoming(start, before)
        counter.add_incoming(start, load)
        counter.add_incoming(b.add(counter, amount), loop)
    for total_row, kept_row, row in zip(totals, kept_sums, sums, strict=True):
        for total, old, new in zip(total_row, kept_row, row, strict=True):
            total.add_incoming(constant(FLOATS, 0.0), before)
            total.add_incoming(old, load)
            total.add_incoming(new, loop)
    b.cbranch(b.icmp_signed("<", b.add(step, I64(1)), steps), loop, after)
    b.position_at_end(after)
    adds = b.icmp_signed("!=", add, I64(0))
    for places, row in zip(sums_at(out, out_stride), sums, strict=True):
        for place, new in zip(places, row, strict=True):
            b.store(b.select(adds, b.fadd(b.load(place, align=4), new), new), place, align=4)


_pass_1, _pass_2, _pass_3, _pass_4, _pass_5, _pass_6 = (_pass_of(rows) for rows in range(1, _MAX_ROWS + 1))


@compiled()
def multiply(x: Any, weight: Any, block: Any, out: Any, first: Any, last: Any) -> None:
    """out (rows, at least 64 * last) float32 = x (rows, inputs) float32, or bfloat16 as uint16, by panels `first` to
    `last` of the weight at address `weight`. x and out have their rows' elements side by side; for bfloat16 `block` is
    even. A negative one is `as_block` of a weight that lies as tiles need it.
    """
    if block < 0:
        multiply_tiles(x, weight, out, 2 * first, min(2 * last, -block))
        return
    rows, inputs = x.shape
    item, x_stride, out_stride = x.itemsize, x.strides[0], out.strides[0]
    passes = (rows + _MAX_ROWS - 1) // _MAX_ROWS
    # Passes of equal rows: each has time for an equal share of the prefetches (docs/log/cpu-kernels.md).
    fewest, larger = rows // passes, rows % passes
    by = (CACHE_LINE + passes - 1) // passes
    piece = _SHORT if passes <= _FEW_PASSES else _LONG
    if rows < _FEWEST_PREFETCHING:
        piece = block
    kept = np.empty(rows * PANEL + 16 if block * item > 4 * piece else 16, np.float32)
    aligned = -kept.ctypes.data % CACHE_LINE
    for panel in range(first, last):
        for start in range(0, inputs, block):
            steps = min(block, inputs - start) * item // 4
            for step in range(0, steps, piece):
                here = min(piece, steps - step)
                w = weight + (panel * inputs + start) * item * PANEL + step * _STEP_BYTES
                prefetched = w + here * _STEP_BYTES
                # From the array each time: numba frees one that is not named any more, though its address is in use.
                kept_at = kept.ctypes.data + aligned
                to, to_stride, add = kept_at, 4 * PANEL, 0
                if step + here == steps:
                    to, to_stride, add = out.ctypes.data + 4 * PANEL * panel, out_stride, start
                row = 0
                for number in range(passes):
                    count = fewest + (1 if number < larger else 0)
                    a = x.ctypes.data + row * x_stride + item * start + 4 * step
                    k, o = kept_at + row * 4 * PANEL, to + row * to_stride
                    _run_pass(count, x, (a, x_stride, w, here, k, step, o, to_stride, add, prefetched, by))
                    prefetched += here * _VECTORS * by
                    row += count


@compiled(inner=True)
def multiply_part(part: Any, panels: Any, x: Any, weight: Any, block: Any, out: Any) -> None:
    first = part * panels
    multiply(x, weight, block, out, first, min(first + panels, out.shape[1] // PANEL))


_multiply_in_parts = in_parts(multiply_part)


def multiply_by_all(x: np.ndarray, weight: int, block: int, out: np.ndarray) -> None:
    """`multiply` by every panel, on several threads where there is enough for them to do."""
    num_panels = out.shape[1] // PANEL
    panels = -(-_PRODUCTS_OF_A_PART // max(1, x.size * PANEL))
    _multiply_in_parts(-(-num_panels // panels), panels, x, weight, block, out)


@compiled(inline="always")
def _run_pass(count: Any, x: Any, addresses: Any) -> None:
    if count == 1:
        _pass_1(x, addresses)
    elif count == 2:
        _pass_2(x, addresses)
    elif count == 3:
        _pass_3(x, addresses)
    elif count == 4:
        _pass_4(x, addresses)
    elif count == 5:
        _pass_5(x, addresses)
    else:
        _pass_6(x, addresses)
