"""How a matrix product is cut into blocks: the tile and the split of k that take least time on the multiprocessors.

A library's kernel gives each block of threads one tile of the output, ``rows`` by ``cols``, and blocks are dealt out to
the multiprocessors: a multiprocessor with one block more than the others finishes last (wave quantisation), a tile
that sticks out over the edge is computed whole (tile quantisation). A product with fewer tiles than multiprocessors is
split over k, which costs adding the parts up. See NVIDIA, "Matrix Multiplication Background User's Guide"
(docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication), sections on both quantisations.
"""
from __future__ import annotations

from typing import NamedTuple

Tile = tuple[int, int]

#: Tiles of tensor-core kernels of cuBLAS and CUTLASS, (rows, cols).
TENSOR_TILES: tuple[Tile, ...] = (
    (256, 256), (256, 128), (128, 256), (256, 64), (64, 256), (128, 128), (128, 64), (64, 128), (128, 32), (32, 128),
    (128, 16), (16, 128), (64, 64), (64, 32), (32, 64), (64, 16), (16, 64), (32, 32), (32, 16), (16, 32), (16, 16))
#: Those since Hopper, whose instructions take any multiple of 8 rows: the rows here are the most that a tile has, and
#: tiles share the rows of the product evenly. Their kernels write a tile while the next one is computed.
HOPPER_TILES: tuple[Tile, ...] = (
    (256, 256), (256, 192), (192, 256), (256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (256, 64),
    (128, 64), (64, 256), (64, 128), (64, 64), (32, 128), (32, 64), (16, 128), (16, 64))
#: Tiles of cuBLAS's kernels for the CUDA cores, ``sgemm_COLSxROWS`` in their names.
SIMT_TILES: tuple[Tile, ...] = (
    (128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (64, 32), (32, 64), (32, 32))
#: By generation of compute capability, those for batched float32 products, of which cuBLAS has few.
BATCHED_SIMT_TILES: dict[int, tuple[Tile, ...]] = {
    6: ((64, 128),), 7: ((64, 64), (128, 32), (32, 128), (64, 128)), 8: ((128, 128),)}
LEAST_K = 128  #: assumed: what a split of k leaves to each block at least, some steps of a tile


class Pipe(NamedTuple):
    """What a multiprocessor does for one block of a product, in seconds and bytes.

    - ``flops_per_second``, ``load_bytes_per_second``: of one multiprocessor, arithmetic and reading operands.
    - ``k_seconds``: a block that is alone takes at least this for each element of k, its loads being under way.
    - ``wave_seconds``: a block's start and end, which its own work does not hide.
    - ``split_seconds``: adding up the parts of a product that is split over k, besides its bytes.
    - ``add_bytes_per_second``: at which the whole device moves the parts.
    - ``store_seconds``: of one element of the output.
    - ``element_seconds``: what loading an operand costs besides, an element, where rows are not whole 16 bytes.
    """

    flops_per_second: float
    load_bytes_per_second: float
    k_seconds: float
    wave_seconds: float
    split_seconds: float
    add_bytes_per_second: float
    store_seconds: float
    element_seconds: float = 0.0


class Blocks(NamedTuple):
    """How a product is cut up: its tile, into how many parts k is split at most, and the seconds of its blocks."""

    seconds: float
    rows: int
    cols: int
    split: int


def cut_into_blocks(batch: int, m: int, n: int, k: int, itemsize: float, multiprocessors: int, pipe: Pipe,
                    tiles_at_hand: tuple[Tile, ...] = TENSOR_TILES) -> Blocks:
    """The tile and the split of least time for ``batch`` products [m, k] x [k, n] of ``itemsize`` bytes an element.

    >>> pipe = Pipe(6e12, 90e9, 1.5e-9, 4e-7, 3e-6, 4e12, 1e-10)
    >>> [cut_into_blocks(1, m, 4096, 4096, 2, 132, pipe)[1:] for m in (8, 100, 4096)]
    [(16, 32, 1), (64, 64, 1), (256, 256, 1)]
    """
    flops_rate, load_rate, k_seconds, wave_seconds, split_seconds, add_rate, store, element_seconds = pipe
    best = Blocks(float("inf"), 0, 0, 0)
    is_flexible = tiles_at_hand is HOPPER_TILES
    least_rows = max(m, tiles_at_hand[-1][0])  # no tile is taken of which more than half is empty
    least_cols = max(n, tiles_at_hand[-1][1])
    for rows, cols in tiles_at_hand:
        if rows >= 2 * least_rows or cols >= 2 * least_cols:
            continue
        down = -(-m // rows)
        if is_flexible:
            rows = -(-m // (8 * down)) * 8
        tiles = batch * down * -(-n // cols)
        step = max(2 * rows * cols / flops_rate, (rows + cols) * itemsize / load_rate) + (rows + cols) * element_seconds
        turns = -(-tiles // multiprocessors)  # blocks on the busiest multiprocessor
        tile_seconds = wave_seconds + rows * cols * store
        ends = 1 if is_flexible else turns
        seconds = max(turns * max(k * step, rows * cols * store if is_flexible else 0.0), k * k_seconds)
        seconds += tile_seconds * ends
        if seconds < best[0]:
            best = Blocks(seconds, rows, cols, 1)
        most = min(multiprocessors // tiles, k // LEAST_K)
        if most < 2:
            # assumed from 0.9 on: those that would wait in the last turn take parts of k
            if tiles < 0.9 * turns * multiprocessors:
                seconds = (k * max(tiles / multiprocessors * step, k_seconds) + tile_seconds * ends + split_seconds
                           + multiprocessors * rows * cols * 8 / add_rate)
                if seconds < best[0]:
                    best = Blocks(seconds, rows, cols, 2)
            continue
        for split in (most, most // 2):
            if split > 1:
                seconds = (-(-k // split) * max(step, k_seconds) + tile_seconds + split_seconds
                           + batch * m * n * 4 * (split + 1) / add_rate)
                if seconds < best[0]:
                    best = Blocks(seconds, rows, cols, split)
    return best
