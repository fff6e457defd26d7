"""Cuts out the part of a JPEG that a window needs, without decoding it.

The blocks between two restart markers, a run, can be decoded alone. If each row of blocks is a
whole number of runs, the runs of a window make a smaller JPEG with the same header, whose pixels
equal the window in the complete image (`shardset build --jpeg-restart` writes such
JPEGs). Without markers, only the rows below the window can be left out: a decoder stops at the last
row of blocks that the header claims.
"""

import struct
from dataclasses import dataclass

import numpy as np

_SEGMENT = struct.Struct(">BBH")
_SOF, _DRI, _SOS, _EOI, _RST = (0xC0, 0xC1), 0xDD, 0xDA, 0xD9, 0xD0
_BASELINE_BITS = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """The runs of a JPEG: `run` blocks each, of the (height, width) `block` in pixels.

    `run` is 0 if the header promises no markers, or markers that `cut` can't use. `size` is the
    (height, width) of the image, `size_at` its offset in the header, `begin` the offset of the
    first run.
    """

    size: tuple[int, int]
    block: tuple[int, int]
    run: int
    size_at: int
    begin: int

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows of blocks, and of runs in a row."""
        return -(-self.size[0] // self.block[0]), -(-self.size[1] // (self.block[1] * self.run))


@dataclass(frozen=True, slots=True)
class JpegPart:
    """A JPEG of a part of an image: `top` and `left` in pixels of the whole, `size` its (height,
    width).
    """

    data: bytearray
    top: int
    left: int
    size: tuple[int, int]


def grid_of(data: bytes) -> Grid | None:
    """The grid of an image whose blocks come row by row, all colours together;
    None if they don't.
    """
    at, run, size, size_at, block, num_parts = 2, 0, (0, 0), 0, (0, 0), 0
    while at + 4 <= len(data):
        begins, kind, length = _SEGMENT.unpack_from(data, at)
        if begins != 0xFF or at + 2 + length > len(data):
            return None
        if kind in _SOF and length >= 8 and data[at + 4] == _BASELINE_BITS:
            size_at, num_parts = at + 5, data[at + 9]
            size = struct.unpack_from(">HH", data, size_at)
            if num_parts not in (1, 3) or length != 8 + 3 * num_parts:
                return None
            factors = data[at + 11 : at + 2 + length : 3]
            block = (
                (8, 8)
                if num_parts == 1
                else (8 * max(f & 15 for f in factors), 8 * max(f >> 4 for f in factors))
            )
        elif kind == _DRI and length == 4:
            run = int.from_bytes(data[at + 4 : at + 6], "big")
        elif kind == _SOS:
            if not num_parts or data[at + 4] != num_parts or min(*size, *block) == 0:
                return None
            fits = run and -(-size[1] // block[1]) % run == 0
            return Grid(size, block, run if fits else 0, size_at, at + 2 + length)
        at += 2 + length
    return None


def cut(data: bytes, grid: Grid, top: int, left: int, bottom: int, right: int) -> JpegPart | None:
    """The runs that hold the pixels [top, bottom) x [left, right) of the image, which may reach
    beyond it.

    None if the markers are not those that the header promises, or if the part would be the whole.
    """
    rows, runs = grid.shape
    height, width = grid.block[0], grid.block[1] * grid.run
    first, last = max(0, top // height), min(rows, -(-bottom // height))
    start, stop = max(0, left // width), min(runs, -(-right // width))
    if (first, start, last, stop) == (0, 0, rows, runs):
        return None
    bounds = _bounds(data, grid.begin, rows * runs)
    if bounds is None:
        return None
    begins, ends = (
        each.reshape(rows, runs)[first:last, start:stop] for each in (bounds[:-1], bounds[1:])
    )
    pieces = [
        data[begin:end]
        for begin, end in zip(begins[:, 0].tolist(), ends[:, -1].tolist(), strict=True)
    ]
    size = (
        min(grid.size[0], last * height) - first * height,
        min(grid.size[1], stop * width) - start * width,
    )
    header = data[: grid.size_at] + struct.pack(">HH", *size) + data[grid.size_at + 4 : grid.begin]
    part = bytearray().join([header, *pieces])
    codes = np.frombuffer(part, np.uint8)
    codes[np.cumsum(ends - begins) + (len(header) - 1)] = _marks(begins.size)
    return JpegPart(part, first * height, start * width, size)


def head(data: bytes, grid: Grid, bottom: int) -> JpegPart | None:
    """The JPEG, claiming to end with the row of blocks that holds `bottom`; None if that is all of
    it, or it is cut.

    A decoder warns that data follow.
    """
    height = -(-bottom // grid.block[0]) * grid.block[0]
    if height >= grid.size[0] or data[-2:] != bytes((0xFF, _EOI)):
        return None
    claimed = bytearray(data)
    struct.pack_into(">H", claimed, grid.size_at, height)
    return JpegPart(claimed, 0, 0, (height, grid.size[1]))


def _bounds(data: bytes, begin: int, num_runs: int) -> np.ndarray | None:
    """The offset of each run, and of the end of the last one, markers included: int64 [num_runs +
    1].

    None unless the markers have the expected order and number.
    """
    codes = np.frombuffer(data, np.uint8)
    escaped = codes[begin:-1] == 0xFF
    escaped &= codes[begin + 1 :] != 0
    marks = np.flatnonzero(escaped)[:num_runs]
    marks += begin + 1
    if codes[marks].tobytes() != _marks(num_runs).tobytes():
        return None
    return np.concatenate(([begin], marks + 1))


def _marks(num_runs: int) -> np.ndarray:
    """The second byte of the marker behind each run: uint8 [num_runs]."""
    marks = (_RST + np.arange(num_runs) % 8).astype(np.uint8)
    marks[-1] = _EOI
    return marks
