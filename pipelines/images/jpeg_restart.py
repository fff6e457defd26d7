"""Restart markers for JPEGs, without loss: readers may then decode the part of an image that a crop needs.

The entropy-coded data is written anew, the coefficients that it codes stay. The only import of jpegio.

Equal coefficients are equal pixels only in a plain JPEG: a decoder smooths a progressive one whose scans are not all
there, and guesses colours from the markers before the image. So of any other JPEG the pixels are compared too.
"""

import io
import re
import struct
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardset.errors import ConfigError

_SOF0, _SOS, _ADOBE, _EOI = 0xC0, 0xDA, 0xEE, b"\xff\xd9"
_PLAIN_SEGMENTS = frozenset({0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)})
"""Tables, the restart interval, comments and what applications add."""

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]")
_ROWS = 256
"""So many rows of two images are compared at once."""

MOST_PIXELS, LEAST_PIXELS = 32, 16
"""How wide a segment may be: narrower ones cost bytes (about 5 each), wider ones are decoded for nothing."""


def with_restarts(jpeg: bytes) -> bytes:
    """The same picture with a restart marker at every segment, each 16 to 32 pixels wide or else a whole row.

    One scan, Huffman coded with tables of its own: 2 to 3 % smaller than a JPEG with the standard tables, up to 2 %
    larger than one with its own. Marker segments (EXIF, colour profile, comment) stay. A JPEG that can't be written in
    this form, or would not decode to the same pixels, stays as it is; readers decode it whole. Raises ConfigError where
    jpegio is not installed.
    """
    jpegio = _library()
    with tempfile.TemporaryDirectory(prefix="shardset-jpeg-") as folder:
        before, after = str(Path(folder, "before.jpg")), str(Path(folder, "after.jpg"))
        Path(before).write_bytes(jpeg)
        try:
            found = jpegio.read(before)
            kept = [plane.copy() for plane in found.coef_arrays]
            found.progressive_mode, found.arith_code, found.optimize_coding = 0, 0, 1
            found.restart_interval = _interval(found)
            jpegio.write(found, after)
            written = jpegio.read(after)
        except (RuntimeError, ValueError):
            return jpeg
        if not (_alike(kept, written.coef_arrays) and _alike(found.quant_tables, written.quant_tables)):
            return jpeg
        rewritten = Path(after).read_bytes()
    return rewritten if is_plain(jpeg) or _same_pixels(jpeg, rewritten) else jpeg


def is_plain(jpeg: bytes) -> bool:
    """Whether it is baseline, in one scan, grey or YCbCr without a doubt, and nothing stands in or behind its scan."""
    at, colours, adobe = 2, 0, False
    while at + 4 <= len(jpeg):
        begins, kind, size = struct.unpack_from(">BBH", jpeg, at)
        body = jpeg[at + 4 : at + 2 + size]
        if begins != 0xFF or len(body) != size - 2:
            return False
        if kind == _SOF0 and not colours and body[:1] == b"\x08" and len(body) > 5:
            colours = body[5]
            if body[6::3] != b"\1\2\3"[:colours] or colours not in (1, 3):
                return False
        elif kind == _ADOBE:
            adobe = adobe or body[:5] == b"Adobe"
        elif kind == _SOS:
            whole = len(body) == 4 + 2 * colours and body[-3:] == b"\0\x3f\0" and body[1:-3:2] == b"\1\2\3"[:colours]
            return colours > 0 and whole and not adobe and _ends_with_its_scan(jpeg, at + 2 + size)
        elif kind not in _PLAIN_SEGMENTS:
            return False
        at += 2 + size
    return False


def libraries() -> dict[str, str]:
    """The library that decides the bytes, with its version."""
    _library()
    return {"pyjpegio": version("pyjpegio")}


def _interval(found: Any) -> int:
    """Blocks (MCUs) of a segment: the most that divide a row evenly and are narrow enough."""
    single = found.num_components == 1
    width = 8 if single else 8 * max(part.h_samp_factor for part in found.comp_info)
    row = -(-found.image_width // width)
    fitting = [n for n in range(1, row + 1) if row % n == 0 and LEAST_PIXELS <= n * width <= MOST_PIXELS]
    return max(fitting, default=row)


def _ends_with_its_scan(jpeg: bytes, start: int) -> bool:
    """Whether only entropy-coded data, with restarts or without, stands between there and the end mark at the end."""
    found = _MARKER.search(jpeg, start)
    return found is not None and found[0] == _EOI and found.end() == len(jpeg)


def _same_pixels(before: bytes, after: bytes) -> bool:
    try:
        with (
            Image.open(io.BytesIO(before), formats=["JPEG"]) as one,
            Image.open(io.BytesIO(after), formats=["JPEG"]) as two,
        ):
            one.load()
            two.load()
            if (one.mode, one.size) != (two.mode, two.size):
                return False
            boxes = [(0, top, one.width, min(top + _ROWS, one.height)) for top in range(0, one.height, _ROWS)]
            return all(one.crop(box).tobytes() == two.crop(box).tobytes() for box in boxes)
    except (OSError, SyntaxError, ValueError):
        return False


def _alike(before: list[np.ndarray], after: list[np.ndarray]) -> bool:
    return len(before) == len(after) and all(map(np.array_equal, before, after))


def _library() -> Any:
    try:
        import jpegio
    except ImportError as error:
        raise ConfigError(
            "--jpeg-restart needs the library pyjpegio wherever shards are written; install 'shardset[pipelines]' there"
        ) from error
    return jpegio
