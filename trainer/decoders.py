"""Processes that decode small images for one stream.

A decoder of small PNGs keeps Python's interpreter, and giving it from thread to thread costs as much as the image, so
threads of one process decode no more than one of them. A process here gets the checked bytes of a part of a batch and
gives back its pixels. What it can't decode, or a padded crop of another size than the image's, is left to the stream,
which finds the reason if there is one.

A process ends with the socket to its stream, however the stream's process ends.
"""

import itertools
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import cv2
import numpy as np

from trainer.decode import ImageSpec, PadCrop, UndecodableImage, decode, decode_into, pad_crops
from trainer.errors import DecoderLost

_HELLO = b"+"
_HEAD = struct.Struct("=QQQ")
"""Of what is asked: images, draws for each, bytes of all; then come those bytes, the draws and the images' sizes."""


_NO_ALGEBRA = {"OPENBLAS_NUM_THREADS": "1"}
"""Else NumPy starts threads for it, which takes a third of the time that a process needs to be ready."""


@dataclass(frozen=True, slots=True)
class Task:
    """What all processes of a stream do: training images by `spec`, or whole ones of its size to be kept."""

    spec: ImageSpec
    whole: bool

    def decoded(self, images: Sequence[bytes], drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of them could be decoded, bool [n], and their pixels, uint8 [n, size, size, 3]."""
        size, crop = self.spec.size, self.spec.crop
        pixels = np.empty((len(images), size, size, 3), np.uint8)
        if not isinstance(crop, PadCrop):
            done = np.array([self._crop_into(*one) for one in zip(pixels, images, drawn, strict=True)], np.bool_)
            return done, pixels
        done = np.array([_whole_into(row, data) for row, data in zip(pixels, images, strict=True)], np.bool_)
        if self.whole:
            return done, pixels
        crops = np.empty_like(pixels)
        pad_crops(crops, pixels, np.arange(len(images)), crop.padding, drawn)
        return done, crops

    def _crop_into(self, row: np.ndarray, data: bytes, drawn: np.ndarray) -> bool:
        try:
            decode_into(row, data, self.spec, drawn)
        except UndecodableImage:
            return False
        return True


class Decoders:
    """As many processes as `num_processes`, started when first asked for; any thread may borrow one.

    None is lent before it has loaded its libraries. A copy in another process (pickled or forked) starts its own.
    """

    def __init__(self, task: Task, num_processes: int) -> None:
        self.task, self.num_processes = task, num_processes
        self._lock = threading.Lock()
        self._free: list[Decoder] = []
        self._owner = 0

    def __reduce__(self) -> tuple:
        return Decoders, (self.task, self.num_processes)

    def start(self) -> None:
        """Starts the processes, unless this process has."""
        with self._lock:
            if self._owner != os.getpid():
                self._owner = os.getpid()
                self._free = [Decoder(self.task) for _ in range(self.num_processes)]
                weakref.finalize(self, _end, self._owner, list(self._free))

    @contextmanager
    def idle(self) -> "Iterator[Decoder | None]":
        """One that is ready and has nothing to do, if there is one, to oneself; raises DecoderLost."""
        with self._lock:
            decoder = next((one for one in self._free if one.is_ready()), None)
            if decoder is not None:
                self._free.remove(decoder)
        try:
            yield decoder
        finally:
            if decoder is not None:
                with self._lock:
                    self._free.append(decoder)


class Decoder:
    """One process and the socket to it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._socket, theirs = socket.socketpair()
        # In a session of its own, so that a Ctrl-C or a signal to the group is for the process that it works for.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer.decoders", str(theirs.fileno()), pickle.dumps(task).hex()],
            pass_fds=[theirs.fileno()],
            env=os.environ | _NO_ALGEBRA | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        theirs.close()
        self._ready = False

    def is_ready(self) -> bool:
        """Whether it has loaded its libraries."""
        if not self._ready:
            try:
                found = self._socket.recv(len(_HELLO), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._lost() from error
            if found != _HELLO:
                raise self._lost()
            self._ready = True
        return True

    def decode(self, images: Sequence[bytes], drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The images, uint8 [n, size, size, 3], and bool [n]: which of them it could decode; raises DecoderLost."""
        size = self.task.spec.size
        pixels, done = np.empty((len(images), size, size, 3), np.uint8), np.empty(len(images), np.bool_)
        sizes = np.array([len(image) for image in images], dtype=np.int64)
        try:
            self._socket.sendall(_HEAD.pack(*drawn.shape, int(sizes.sum())))
            self._socket.sendall(b"".join([*images, drawn.tobytes(), sizes.tobytes()]))
            for array in (done, pixels):
                _receive_into(self._socket, array.data.cast("B"))
        except OSError as error:
            raise self._lost() from error
        return pixels, done

    def end(self) -> None:
        """Ends the process, whatever it does: it holds nothing."""
        self._socket.close()
        self.process.kill()
        self.process.wait()

    def _lost(self) -> DecoderLost:
        self.process.kill()
        code = self.process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return DecoderLost(
            f"process {self.process.pid}, which decoded images for this one, was ended {how} (by the system if memory "
            "ran out); start again, with num_threads=1 to decode without such processes"
        )


def main(words: Sequence[str]) -> None:
    """`FD TASK`: decodes what comes through that socket until it is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a run that is told to stop takes its last batches first
    cv2.setNumThreads(1)
    task: Task = pickle.loads(bytes.fromhex(words[1]))
    with socket.socket(fileno=int(words[0])) as connection, suppress(ConnectionError):
        connection.sendall(_HELLO)
        while True:
            for array in task.decoded(*_asked(connection)):
                connection.sendall(array.data.cast("B"))


def _asked(connection: socket.socket) -> tuple[list[bytes], np.ndarray]:
    """The next images and their draws, float64 [n, m]."""
    num_images, num_draws, num_bytes = _HEAD.unpack(_receive(connection, _HEAD.size))
    content = _receive(connection, num_bytes + 8 * num_images * (num_draws + 1))
    drawn = np.frombuffer(content, np.float64, num_images * num_draws, num_bytes).reshape(num_images, num_draws)
    sizes = np.frombuffer(content, np.int64, num_images, num_bytes + drawn.nbytes)
    ends = np.cumsum(sizes).tolist()
    return [content[start:end] for start, end in itertools.pairwise([0, *ends])], drawn


def _whole_into(row: np.ndarray, data: bytes) -> bool:
    try:
        image = decode(data)
    except UndecodableImage:
        return False
    if image.shape != row.shape:
        return False
    row[:] = image
    return True


def _end(owner: int, decoders: Sequence[Decoder]) -> None:
    if owner == os.getpid():
        for decoder in decoders:
            decoder.end()


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    content = bytearray(num_bytes)
    _receive_into(connection, memoryview(content))
    return bytes(content)


def _receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fills the buffer; raises ConnectionError where the other side has ended."""
    while buffer:
        count = connection.recv_into(buffer, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError
        buffer = buffer[count:]


if __name__ == "__main__":
    main(sys.argv[1:])
