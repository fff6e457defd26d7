"""Processes that decode small images for one stream.

Decoders of small PNGs hold the GIL, and handing it from thread to thread takes as long as decoding
the image, so threads are no faster than one. A worker process receives the verified bytes of some
samples through a pipe and writes their pixels into memory that it shares with the stream. It
leaves what it can't decode to the stream, which finds the reason.

A worker ends when its pipe closes, however the stream's process ends. It imports this module and
little else, because an epoch of small images is over in seconds: OpenCV and Pillow are imported
when an image needs them.
"""

import mmap
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardset.decode import png
from shardset.errors import DecoderLost, UndecodableImage
from shardset.format.images.background import Background
from shardset.per_process import PerProcess

if TYPE_CHECKING:
    from shardset.decode.image import ImageSpec

_NO_ALGEBRA = {"OPENBLAS_NUM_THREADS": "1"}
"""Keeps NumPy from starting threads, which would be a third of a worker's start."""

_COMMAND = (
    sys.executable,
    "-P",
    "-c",
    "import sys; from shardset.decode.workers import work; work(sys.argv[1])",
)
"""-P, because the working folder, which would come first otherwise, may hold another `shardset.py`.
"""

_ROOT = str(Path(__file__).parents[2])
"""The folder of this package; in `sys.path` it may be "", which means an earlier working folder."""


class SharedImages:
    """Images in memory that a process with `fd` can open too: uint8 [n, size, size, 3], black at
    first.

    A forked process shares the memory.
    """

    def __init__(self, num_images: int, size: int) -> None:
        self.fd = os.memfd_create("shardset-images")
        os.ftruncate(self.fd, num_images * 3 * size**2)
        self.images_NHWC = _map_images(self.fd, size)

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """Decodes images of the wanted size, on a background and upright if that is wanted, and leaves
    others. With `spec`, it crops all images by that.
    """

    background: Background
    upright: bool = True
    spec: "ImageSpec | None" = None

    def decode(
        self,
        images_NHWC: np.ndarray,
        numbers: np.ndarray,
        contents: Sequence[bytes],
        drawn: np.ndarray,
    ) -> np.ndarray:
        """Decodes the contents into `images_NHWC[numbers]`; returns which could be decoded: bool
        [n].
        """
        spec, done = self.spec, np.zeros(len(contents), np.bool_)
        if spec is None or spec.crop.keeps_size(spec.size):
            pairs = zip(numbers.tolist(), contents, strict=True)
            done[:] = [self._decode_into(images_NHWC[n], data) for n, data in pairs]
        if spec is not None:
            whole = numbers[done]
            spec.crop.put_many(images_NHWC, whole, images_NHWC, whole, drawn[done])
            for at in np.flatnonzero(~done).tolist():
                done[at] = _crop_into(images_NHWC[numbers[at]], contents[at], spec, drawn[at])
        return done

    def _decode_into(self, image: np.ndarray, data: bytes) -> bool:
        pixels = None
        if png.is_png(data):
            if png.size(data) != image.shape[:2]:
                return False
            pixels = png.decode(data, self.background)
        if pixels is None:
            pixels = self._decode_by_any(data, image.shape[:2])
        if pixels is None or pixels.shape != image.shape:
            return False
        image[:] = pixels
        return True

    def _decode_by_any(self, data: bytes, size: tuple[int, ...]) -> np.ndarray | None:
        from shardset.decode.image import decode, image_size

        try:
            if image_size(data, upright=self.upright) != size:
                return None
            return decode(data, background=self.background, upright=self.upright)
        except UndecodableImage:
            return None


def _crop_into(row: np.ndarray, data: bytes, spec: "ImageSpec", drawn: np.ndarray) -> bool:
    from shardset.decode.crops import use_one_opencv_thread
    from shardset.decode.image import decode_into

    use_one_opencv_thread()
    try:
        decode_into(row, data, spec, drawn)
    except UndecodableImage:
        return False
    return True


class WorkerPool:
    """Up to `num_processes` worker processes; any thread may borrow an idle one.

    With `kept`, workers write whole images there, each at its own number. Without it, they crop by
    `spec` into buffers of `num_images` images, which the next request overwrites. A forked process
    starts its own.
    """

    def __init__(
        self,
        spec: "ImageSpec",
        num_processes: int,
        num_images: int,
        kept: SharedImages | None = None,
    ) -> None:
        self.num_processes = num_processes
        task = DecodeTask(spec.background, spec.upright, None if kept else spec)
        make = self._make = partial(Worker, task, spec.size, num_images, kept)
        self._workers = PerProcess(lambda: [make() for _ in range(num_processes)])
        weakref.finalize(self, _end_all, self._workers)

    def start(self) -> "list[Worker]":
        """The workers of this process, which the first call starts."""
        return self._workers()

    @contextmanager
    def idle(self) -> "Iterator[Worker | None]":
        """Lends a worker that is idle and has loaded its libraries, or None if there is none.

        Replaces those that were lost. Raises DecoderLost.
        """
        workers = self.start()
        for number, worker in enumerate(workers):
            if not worker.lock.acquire(blocking=False):
                continue
            try:
                if worker.is_lost:
                    workers[number] = self._make()
                elif worker.is_ready():
                    yield worker
                    return
            finally:
                worker.lock.release()
        yield None


class Worker:
    """One process, the pipe to it and the images that it fills."""

    def __init__(
        self, task: DecodeTask, size: int, num_images: int, kept: SharedImages | None = None
    ) -> None:
        self._images = kept or SharedImages(num_images, size)
        self.images_NHWC, self._task = self._images.images_NHWC, task
        self._pipe, theirs = Pipe()
        given = theirs.fileno(), self._images.fd, size, task
        paths = sys.path if _ROOT in sys.path else [_ROOT, *sys.path]
        # In a separate session, so that Ctrl-C or a signal to the group reaches the stream's
        # process only.
        self.process = subprocess.Popen(
            [*_COMMAND, pickle.dumps(given).hex()],
            pass_fds=[theirs.fileno(), self._images.fd],
            env=os.environ | _NO_ALGEBRA | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,
        )
        theirs.close()
        self.lock = threading.Lock()
        """Held by the thread that has borrowed it."""
        self._ready = False
        self.is_lost = False
        """Whether the process has ended, which raised DecoderLost."""

    def is_ready(self) -> bool:
        """Whether it has loaded its libraries; does not wait. Raises DecoderLost."""
        if not self._ready and self._pipe.poll():
            self._ready = self._answer()
        return self._ready

    def decode(
        self, contents: Sequence[bytes], drawn: np.ndarray, numbers: np.ndarray
    ) -> np.ndarray:
        """Decodes the contents into `images_NHWC[numbers]`; returns which could be decoded, bool
        [n].

        Raises DecoderLost.
        """
        drawn = drawn if self._task.spec else drawn[:, :0]
        done: np.ndarray = self._answer(numbers, contents, drawn)
        return done

    def end(self) -> None:
        """Kills the process; it has nothing to clean up."""
        self.process.kill()
        self.process.wait()
        self._pipe.close()

    def _answer(self, *request: Any) -> Any:
        """The next answer of the process, after a request if there is one."""
        try:
            if request:
                # Not by `send`, whose error keeps the request: CPython has crashed freeing that.
                self._pipe.send_bytes(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
            return self._pipe.recv()
        except (OSError, EOFError) as error:
            self.is_lost = True
            self.end()
            code = self.process.returncode
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            raise DecoderLost(
                f"process {self.process.pid}, which decoded images for this one, was ended {how}"
                " (by the system if memory ran out); start again, with num_threads=1 to decode"
                " without such processes"
            ) from error


def work(given: str) -> None:
    """The program of a worker process: says that it is ready, and does the task until the
    connection is closed.
    """
    # a run that is told to stop takes its last batches first
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    task: DecodeTask
    fd, images_fd, size, task = pickle.loads(bytes.fromhex(given))
    images_NHWC = _map_images(images_fd, size)
    with Connection(fd) as pipe, suppress(ConnectionError, EOFError):
        pipe.send(True)
        while True:
            numbers, contents, drawn = pipe.recv()
            pipe.send(task.decode(images_NHWC, numbers, contents, drawn))


def _map_images(fd: int, size: int) -> np.ndarray:
    """The images of `size` behind a file descriptor: uint8 [n, size, size, 3]."""
    return np.frombuffer(mmap.mmap(fd, 0), np.uint8).reshape(-1, size, size, 3)


def _end_all(workers: PerProcess[list[Worker]]) -> None:
    for started in workers.take():
        for worker in started:
            worker.end()
