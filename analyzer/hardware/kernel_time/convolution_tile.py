"""The product inside a convolution kernel: output tiles, one block of threads each, in waves over multiprocessors."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from analyzer.hardware.device_spec import DeviceSpec

# Rows and columns of output tiles, from the names of cuDNN's kernels (scudnn_128x64, sgemm_128x128, fprop_256x128).
CUDA_CORE_TILES = ((128, 128), (128, 64), (64, 64), (128, 32))
TENSOR_CORE_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64), (64, 32))
_LEAST_DEPTH = 256  # assumed: below it a share of a split product is not worth a block
SUM_BYTES = 4       # partial sums are float32


def product_seconds(rows: int, columns: int, depth: float, batch: int, rate: float, c: Mapping[str, float], pipe: str,
                    device: DeviceSpec, tiles: Sequence[tuple[int, int]]) -> float:
    """Seconds of arithmetic of ``batch`` products [rows, depth] by [depth, columns] by the best tile, largest first.

    A multiprocessor takes whole tiles, so the busiest one decides: ceil(tiles / multiprocessors) of them, each of
    ``depth`` steps and a ``prologue`` to fill its pipeline, at its share of ``rate`` (FLOP/s). Fewer than ``resident``
    blocks cannot hide their own latency, so they take no less than that many would. A smaller tile loads more for each
    product: the rate falls with 1/rows + 1/columns by ``tile_cost``, and is ``rate`` for the first tile.
    """
    assert device.multiprocessors is not None
    multiprocessors, resident = device.multiprocessors, c[f"{pipe}_resident"]
    tile_cost, steps = c[f"{pipe}_tile_cost"], depth + c[f"{pipe}_prologue"]
    best, unit = 0.0, 1 + tile_cost * (1 / tiles[0][0] + 1 / tiles[0][1])
    for tile_rows, tile_columns in tiles:
        blocks = batch * -(-rows // tile_rows) * -(-columns // tile_columns)
        busiest = max(-(-blocks // multiprocessors), resident)
        work = busiest * tile_rows * tile_columns * (1 + tile_cost * (1 / tile_rows + 1 / tile_columns))
        if not best or work < best:
            best = work
    return 2 * best * steps * multiprocessors / (rate * unit)


def split_product_seconds(rows: int, columns: int, depth: int, batch: int, rate: float, c: Mapping[str, float],
                          pipe: str, device: DeviceSpec, tiles: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Seconds of arithmetic, and bytes of partial sums, of products whose few tiles share their depth among blocks."""
    assert device.multiprocessors is not None
    tile_rows, tile_columns = tiles[0]
    blocks = batch * -(-rows // tile_rows) * -(-columns // tile_columns)
    split = min(int(device.multiprocessors * max(1.0, c[f"{pipe}_resident"]) // blocks), depth // _LEAST_DEPTH)
    if split < 2:
        return product_seconds(rows, columns, depth, batch, rate, c, pipe, device, tiles), 0.0
    seconds = product_seconds(rows, columns, depth / split, batch * split, rate, c, pipe, device, tiles)
    return seconds, 2.0 * SUM_BYTES * split * batch * rows * columns
