"""Processes that decode small images for one stream.

A decoder of small PNGs keeps Python's interpreter, and handing it from thread to thread takes as long as the image, so
the threads of one process decode no more than one of them. A worker process gets the checked bytes of some samples
through a socket and writes their pixels into memory that it shares with the stream. What it can't decode is left to
the stream, which finds the reason.

A process ends with the socket to its stream, however the stream's process ends. It imports this module and little
else, because an epoch of small images is over in seconds: OpenCV and Pillow come in when an image needs them.
"""

import itertools
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardset.decode import png
from shardset.errors import DecoderLost, UndecodableImage
from shardset.format.background import Background
from shardset.read.threads import ProcessLock

if TYPE_CHECKING:
    from shardset.decode.image import ImageSpec

_READY = b"+"
_REQUEST = struct.Struct("=QQQ")
"""The head of a request: images, draws for each, bytes of all; those bytes, the draws, where each image goes and the
images' sizes follow. The answer says of each image whether it was decoded."""

_NO_ALGEBRA = {"OPENBLAS_NUM_THREADS": "1"}
"""Else NumPy starts threads for it, which takes a third of the time that a process needs to be ready."""

_COMMAND = (sys.executable, "-P", "-c", "import sys; from shardset.decode.workers import work; work(sys.argv[1:])")
"""Without -P the working folder would come first, which may hold a `shardset.py` of its own."""

_ROOT = str(Path(__file__).parents[2])
"""Where this package lies; `sys.path` may only say so as "", the working folder of an earlier time."""


class SharedImages:
    """Images in memory that a process with `fd` can open too: uint8 [n, size, size, 3], black at first.

    A copy in another process (pickled) is black again; a forked one shares the memory.
    """

    def __init__(self, num_images: int, size: int) -> None:
        self.fd = os.memfd_create("shardset-images")
        os.ftruncate(self.fd, num_images * 3 * size**2)
        self.images_NHWC = _map_images(self.fd, size)

    def __reduce__(self) -> tuple[type["SharedImages"], tuple[int, ...]]:
        return SharedImages, self.images_NHWC.shape[:2]

    def __del__(self) -> None:
        os.close(self.fd)


class DecodeTask(Protocol):
    """What the processes of a stream do."""

    def decode(
        self, images_NHWC: np.ndarray, numbers: np.ndarray, contents: Sequence[bytes], drawn: np.ndarray
    ) -> np.ndarray:
        """Decodes the contents into `images_NHWC[numbers]`; says which of them could be decoded: bool [n]."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeWhole:
    """Decodes images of the wanted size as they are, on a background; leaves others."""

    background: Background

    def decode(
        self, images_NHWC: np.ndarray, numbers: np.ndarray, contents: Sequence[bytes], drawn: np.ndarray
    ) -> np.ndarray:
        """See DecodeTask."""
        pairs = zip(numbers.tolist(), contents, strict=True)
        return np.array([self._decode_into(images_NHWC[n], data) for n, data in pairs], np.bool_)

    def _decode_into(self, image: np.ndarray, data: bytes) -> bool:
        is_png = png.is_png(data)
        if is_png and png.size(data) != image.shape[:2]:
            return False
        pixels = png.decode(data, self.background) if is_png else None
        if pixels is None:
            pixels = _decode_sized(data, image.shape[:2], self.background)
        if pixels is None or pixels.shape != image.shape:
            return False
        image[:] = pixels
        return True


@dataclass(frozen=True, slots=True)
class DecodeCrops:
    """Decodes images and crops them by `spec`."""

    spec: "ImageSpec"

    def decode(
        self, images_NHWC: np.ndarray, numbers: np.ndarray, contents: Sequence[bytes], drawn: np.ndarray
    ) -> np.ndarray:
        """See DecodeTask."""
        done = np.zeros(len(contents), np.bool_)
        if self.spec.crop.keeps_size(self.spec.size):
            done = DecodeWhole(self.spec.background).decode(images_NHWC, numbers, contents, drawn)
            self.spec.crop.put_many(images_NHWC, numbers[done], images_NHWC, numbers[done], drawn[done])
        for at in np.flatnonzero(~done).tolist():
            done[at] = self._crop_into(images_NHWC[numbers[at]], contents[at], drawn[at])
        return done

    def _crop_into(self, row: np.ndarray, data: bytes, drawn: np.ndarray) -> bool:
        from shardset.decode.crops import use_one_opencv_thread
        from shardset.decode.image import decode_into

        use_one_opencv_thread()
        try:
            decode_into(row, data, self.spec, drawn)
        except UndecodableImage:
            return False
        return True


class WorkerPool:
    """Up to `num_processes` processes, started when first asked for; any thread may borrow one.

    With `kept` they write whole images there, each at its own number; without, crops by `spec`, at most `num_images` at
    once, where the next ones replace them. None is lent before it has loaded its libraries, nor after it was lost:
    `start` starts another one. A copy in another process (pickled or forked) starts its own.
    """

    def __init__(
        self, spec: "ImageSpec", num_processes: int, num_images: int, kept: SharedImages | None = None
    ) -> None:
        self.spec, self.num_processes, self.num_images, self.kept = spec, num_processes, num_images, kept
        self._lock = ProcessLock()
        self._all: list[Worker] = []
        self._idle: list[Worker] = []
        self._owner = 0

    def __reduce__(self) -> tuple[type["WorkerPool"], tuple["ImageSpec", int, int, SharedImages | None]]:
        return WorkerPool, (self.spec, self.num_processes, self.num_images, self.kept)

    def start(self) -> None:
        """Starts the processes that this process has not started or has lost."""
        with self._lock:
            if self._owner != os.getpid():
                self._owner, self._all, self._idle = os.getpid(), [], []
                weakref.finalize(self, _end_all, self._owner, self._all)
            self._all[:] = [worker for worker in self._all if not worker.is_lost]
            while len(self._all) < self.num_processes:
                self._all.append(self._start_worker())
                self._idle.append(self._all[-1])

    @contextmanager
    def idle(self) -> "Iterator[Worker | None]":
        """A worker that is ready and has nothing to do, for this thread alone; None without one. Raises DecoderLost."""
        with self._lock:
            self._idle = [worker for worker in self._idle if not worker.is_lost]
            worker = next((each for each in self._idle if each.is_ready()), None)
            if worker is not None:
                self._idle.remove(worker)
        try:
            yield worker
        finally:
            if worker is not None:
                with self._lock:
                    self._idle.append(worker)

    def _start_worker(self) -> "Worker":
        if self.kept is not None:
            return Worker(self.kept, DecodeWhole(self.spec.background))
        return Worker(SharedImages(self.num_images, self.spec.size), DecodeCrops(self.spec))


class Worker:
    """One process, the socket to it and the images that it fills."""

    def __init__(self, images: SharedImages, task: DecodeTask) -> None:
        self.images_NHWC, self._images, self._task = images.images_NHWC, images, task
        self._socket, theirs = socket.socketpair()
        words = [str(theirs.fileno()), str(images.fd), str(self.images_NHWC.shape[1]), pickle.dumps(task).hex()]
        paths = sys.path if _ROOT in sys.path else [_ROOT, *sys.path]
        # In a session of its own, so that a Ctrl-C or a signal to the group reaches only the process it works for.
        self.process = subprocess.Popen(
            [*_COMMAND, *words],
            pass_fds=[theirs.fileno(), images.fd],
            env=os.environ | _NO_ALGEBRA | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,
        )
        theirs.close()
        self._ready = False
        self.is_lost = False
        """Whether it has raised DecoderLost: its process has ended."""

    def is_ready(self) -> bool:
        """Whether it has loaded its libraries."""
        if not self._ready:
            try:
                answer = self._socket.recv(len(_READY), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._lost() from error
            if answer != _READY:
                raise self._lost()
            self._ready = True
        return True

    def decode(self, contents: Sequence[bytes], drawn: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Decodes into `images_NHWC[numbers]` what it can, and says which of them, bool [n]; raises DecoderLost."""
        drawn = drawn if isinstance(self._task, DecodeCrops) else drawn[:, :0]
        done = np.empty(len(contents), np.bool_)
        sizes = np.array([len(content) for content in contents], np.int64)
        try:
            self._socket.sendall(_REQUEST.pack(*drawn.shape, int(sizes.sum())))
            rest = drawn.tobytes(), numbers.astype(np.int64).tobytes(), sizes.tobytes()
            self._socket.sendall(b"".join([*contents, *rest]))
            _receive_into(self._socket, done.data.cast("B"))
        except OSError as error:
            raise self._lost() from error
        return done

    def end(self) -> None:
        """Ends the process, whatever it does: it holds nothing."""
        self._socket.close()
        self.process.kill()
        self.process.wait()

    def _lost(self) -> DecoderLost:
        self.is_lost = True
        self.end()
        code = self.process.returncode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return DecoderLost(
            f"process {self.process.pid}, which decoded images for this one, was ended {how} (by the system if memory "
            "ran out); start again, with num_threads=1 to decode without such processes"
        )


def work(words: Sequence[str]) -> None:
    """What a worker process runs: `SOCKET IMAGES SIZE TASK`; does the task until the socket is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a run that is told to stop takes its last batches first
    task: DecodeTask = pickle.loads(bytes.fromhex(words[3]))
    images_NHWC = _map_images(int(words[1]), int(words[2]))
    with socket.socket(fileno=int(words[0])) as connection, suppress(ConnectionError):
        connection.sendall(_READY)
        while True:
            connection.sendall(task.decode(images_NHWC, *_receive_request(connection)).tobytes())


def _map_images(fd: int, size: int) -> np.ndarray:
    """The images of `size` behind a file descriptor: uint8 [n, size, size, 3]."""
    return np.frombuffer(mmap.mmap(fd, 0), np.uint8).reshape(-1, size, size, 3)


def _decode_sized(data: bytes, size: tuple[int, ...], background: Background) -> np.ndarray | None:
    """An image of any format; None if it has another size or is undecodable."""
    from shardset.decode.image import decode, image_size

    try:
        return decode(data, background=background) if image_size(data) == size else None
    except UndecodableImage:
        return None


def _receive_request(connection: socket.socket) -> tuple[np.ndarray, list[bytes], np.ndarray]:
    """Where the next images go, their bytes and their draws, float64 [n, m]."""
    num_images, num_draws, num_bytes = _REQUEST.unpack(_receive(connection, _REQUEST.size))
    content = _receive(connection, num_bytes + 8 * num_images * (num_draws + 2))
    drawn = np.frombuffer(content, np.float64, num_images * num_draws, num_bytes).reshape(num_images, num_draws)
    numbers, sizes = np.frombuffer(content, np.int64, 2 * num_images, num_bytes + drawn.nbytes).reshape(2, num_images)
    ends, view = np.cumsum(sizes).tolist(), memoryview(content)
    return numbers, [bytes(view[start:end]) for start, end in itertools.pairwise([0, *ends])], drawn


def _receive(connection: socket.socket, num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    _receive_into(connection, memoryview(content))
    return content


def _receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fills the buffer; raises ConnectionError where the other side has ended."""
    while buffer:
        count = connection.recv_into(buffer, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError
        buffer = buffer[count:]


def _end_all(owner: int, workers: Sequence[Worker]) -> None:
    if owner == os.getpid():
        for worker in workers:
            worker.end()
