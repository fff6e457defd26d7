"""What a process of shardset/decode/workers.py does: decodes what comes through a socket into images that it shares.

It imports little, because an epoch of small images is over in seconds: `image` only once it needs more than
whole 8-bit PNGs.
"""

import itertools
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from shardset.decode import png
from shardset.decode.shared import opened
from shardset.format.background import Background

HELLO = b"+"
HEAD = struct.Struct("=QQQ")
"""Of what is asked: images, draws for each, bytes of all; then come those bytes, the draws, where each image goes (its
number among those that are shared) and the images' sizes. The answer says of each image whether it was decoded."""

Decode = Callable[[np.ndarray, np.ndarray, Sequence[bytes], np.ndarray], np.ndarray]
"""Of all images those of some numbers, from these bytes with these draws; says which could be decoded, bool [n]."""


def main(words: Sequence[str]) -> None:
    """`SOCKET IMAGES SIZE TASK`: does the task until that socket is closed, with images of that size."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a run that is told to stop takes its last batches first
    images_NHWC, decode = opened(int(words[1]), int(words[2])), pickle.loads(bytes.fromhex(words[3])).decode
    with socket.socket(fileno=int(words[0])) as connection, suppress(ConnectionError):
        connection.sendall(HELLO)
        while True:
            connection.sendall(decode(images_NHWC, *_asked(connection)).tobytes())


@dataclass(frozen=True, slots=True)
class Whole:
    """What a process does whose images are kept: whole ones of the wanted size, on a background."""

    background: Background

    def decode(
        self, images_NHWC: np.ndarray, numbers: np.ndarray, contents: Sequence[bytes], drawn: np.ndarray
    ) -> np.ndarray:
        """See Decode."""
        return decode_whole(images_NHWC, numbers, contents, drawn, self.background)


def decode_whole(
    images_NHWC: np.ndarray,
    numbers: np.ndarray,
    contents: Sequence[bytes],
    drawn: np.ndarray,
    background: Background,
) -> np.ndarray:
    """See Decode: as they are, those of the wanted size."""
    pairs = zip(numbers, contents, strict=True)
    return np.array([_whole_into(images_NHWC[n], data, background) for n, data in pairs], np.bool_)


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fills the buffer; raises ConnectionError where the other side has ended."""
    while buffer:
        count = connection.recv_into(buffer, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError
        buffer = buffer[count:]


def _whole_into(image: np.ndarray, data: bytes, background: Background) -> bool:
    is_png = png.is_png(data)
    if is_png and png.size(data) != image.shape[:2]:
        return False
    found = png.decode(data, background) if is_png else None
    if found is None:
        found = _decoded(data, background)
    if found is None or found.shape != image.shape:
        return False
    image[:] = found
    return True


def _decoded(data: bytes, background: Background) -> np.ndarray | None:
    from shardset.decode.image import decode
    from shardset.errors import UndecodableImage

    try:
        return decode(data, background=background)
    except UndecodableImage:
        return None


def _asked(connection: socket.socket) -> tuple[np.ndarray, list[bytes], np.ndarray]:
    """Where the next images go, their bytes and their draws, float64 [n, m]."""
    num_images, num_draws, num_bytes = HEAD.unpack(_receive(connection, HEAD.size))
    content = _receive(connection, num_bytes + 8 * num_images * (num_draws + 2))
    drawn = np.frombuffer(content, np.float64, num_images * num_draws, num_bytes).reshape(num_images, num_draws)
    numbers, sizes = np.frombuffer(content, np.int64, 2 * num_images, num_bytes + drawn.nbytes).reshape(2, num_images)
    ends, view = np.cumsum(sizes).tolist(), memoryview(content)
    return numbers, [bytes(view[start:end]) for start, end in itertools.pairwise([0, *ends])], drawn


def _receive(connection: socket.socket, num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    receive_into(connection, memoryview(content))
    return content


if __name__ == "__main__":
    main(sys.argv[1:])
