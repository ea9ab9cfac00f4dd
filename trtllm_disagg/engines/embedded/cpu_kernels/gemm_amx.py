"""bfloat16 products by tiles (AMX), with a weight that oneDNN has packed for them: the bits of its own products.

Such a weight is panels of 32 outputs, with a line of 32 pairs for each pair of inputs. A tile of it is 16 outputs by 32
inputs; up to 16 rows of x are another one, and their products are summed up in a third, of 16 results a row. Two tiles
of rows share what has been read of the weight. Instructions: Intel, Architecture Instruction Set Extensions, on AMX.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic

from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compiled
from trtllm_disagg.engines.embedded.cpu_kernels.llvm_ir import I64, emit_loop, emit_prefetch, emitted

#: Outputs of a panel: half of one of gemm_small_m.py's panels; two of these lie in its place.
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
    """What gemm_small_m.py gets in place of a block for a weight of so many outputs: its panels, negative."""
    return -outputs // TILE_PANEL


def _emit(b: Any, instruction: str, *values: Any) -> None:
    """`instruction` in AT&T's notation, with the values as $0, $1. LLVM itself uses no tiles."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(values))
    constraints = ",".join([*("r" for _ in values), "~{memory}"])
    b.asm(kind, instruction, constraints, list(values), side_effect=True)


@emitted(types.void, types.intp)
def _configure(b: Any, address: Any) -> None:
    _emit(b, "ldtilecfg ($0)", address)


@emitted(types.void)
def _release(b: Any) -> None:
    """Threads without tiles are cheaper to switch."""
    _emit(b, "tilerelease")


@intrinsic  # type: ignore[untyped-decorator]
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
