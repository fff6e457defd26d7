"""Processes that decode small images for one stream.

A decoder of small PNGs keeps Python's interpreter, and giving it from thread to thread costs as much as the image, so
threads of one process decode no more than one of them. A process here gets the checked bytes of a part of a batch and
puts their pixels into memory that it shares with the stream. What it can't decode, or a padded crop of another size
than the image's, is left to the stream, which finds the reason if there is one.

A process ends with the socket to its stream, however the stream's process ends.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from shardset.decode.image import ImageSpec, PadCrop, decode_into, pad_crops
from shardset.decode.shared import SharedImages
from shardset.decode.worker_main import HEAD, HELLO, Whole, decode_whole, receive_into
from shardset.errors import DecoderLost, UndecodableImage
from shardset.read.threads import ProcessLock

_NO_ALGEBRA = {"OPENBLAS_NUM_THREADS": "1"}
"""Else NumPy starts threads for it, which takes a third of the time that a process needs to be ready."""

_COMMAND = (sys.executable, "-P", "-m", "shardset.decode.worker_main")
"""Without -P the folder that one works in would come first, which may hold a `trainer.py` of its own."""

_ROOT = str(Path(__file__).parents[2])
"""Where this package was found; `sys.path` may only say so as "", the folder that one worked in at that time."""


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """What all processes of a stream do that keeps no whole images: training images by `spec`."""

    spec: ImageSpec

    def decode(
        self, images_NHWC: np.ndarray, numbers: np.ndarray, contents: Sequence[bytes], drawn: np.ndarray
    ) -> np.ndarray:
        """See shardset.decode.worker_main.Decode."""
        cv2.setNumThreads(1)
        if isinstance(self.spec.crop, PadCrop):
            done = decode_whole(images_NHWC, numbers, contents, drawn, self.spec.background)
            pad_crops(images_NHWC, numbers, images_NHWC, numbers, self.spec.crop.padding, drawn)
            return done
        rows = (images_NHWC[number] for number in numbers)
        return np.array([self._crop_into(*one) for one in zip(rows, contents, drawn, strict=True)], np.bool_)

    def _crop_into(self, row: np.ndarray, data: bytes, drawn: np.ndarray) -> bool:
        try:
            decode_into(row, data, self.spec, drawn)
        except UndecodableImage:
            return False
        return True


class Decoders:
    """As many processes as `num_processes`, started when first asked for; any thread may borrow one.

    With `kept` they put whole images there, each at its own number; without, training images by `spec` where the
    next ones replace them, at most `num_images` at once. None is lent before it has loaded its libraries, nor after it
    was lost: `start` puts another one in its place. A copy in another process (pickled or forked) starts its own.
    """

    def __init__(self, spec: ImageSpec, num_processes: int, num_images: int, kept: SharedImages | None = None) -> None:
        self.spec, self.num_processes, self.num_images, self.kept = spec, num_processes, num_images, kept
        self._lock = ProcessLock()
        self._all: list[Decoder] = []
        self._free: list[Decoder] = []
        self._owner = 0

    def __reduce__(self) -> tuple:
        return Decoders, (self.spec, self.num_processes, self.num_images, self.kept)

    def start(self) -> None:
        """Starts the processes that this process has not started or has lost."""
        with self._lock:
            if self._owner != os.getpid():
                self._owner, self._all, self._free = os.getpid(), [], []
                weakref.finalize(self, _end, self._owner, self._all)
            self._all[:] = [decoder for decoder in self._all if not decoder.is_lost]
            while len(self._all) < self.num_processes:
                self._all.append(self._started())
                self._free.append(self._all[-1])

    @contextmanager
    def idle(self) -> "Iterator[Decoder | None]":
        """One that is ready and has nothing to do, if there is one, to oneself; raises DecoderLost."""
        with self._lock:
            self._free = [one for one in self._free if not one.is_lost]
            decoder = next((one for one in self._free if one.is_ready()), None)
            if decoder is not None:
                self._free.remove(decoder)
        try:
            yield decoder
        finally:
            if decoder is not None:
                with self._lock:
                    self._free.append(decoder)

    def _started(self) -> "Decoder":
        if self.kept is not None:
            return Decoder(self.kept, Whole(self.spec.background))
        return Decoder(SharedImages(self.num_images, self.spec.size), DecodeTask(self.spec))


class Decoder:
    """One process, the socket to it and the images that it fills."""

    def __init__(self, images: SharedImages, task: DecodeTask | Whole) -> None:
        self.images_NHWC, self._images, self._task = images.images_NHWC, images, task
        self._socket, theirs = socket.socketpair()
        words = [str(theirs.fileno()), str(images.fd), str(self.images_NHWC.shape[1]), pickle.dumps(task).hex()]
        paths = sys.path if _ROOT in sys.path else [_ROOT, *sys.path]
        # In a session of its own, so that a Ctrl-C or a signal to the group is for the process that it works for.
        self.process = subprocess.Popen(
            [*_COMMAND, *words],
            pass_fds=[theirs.fileno(), images.fd],
            env=os.environ | _NO_ALGEBRA | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,
        )
        theirs.close()
        self._ready = False
        self.is_lost = False
        """Whether a DecoderLost was raised of it: its process has ended."""

    def is_ready(self) -> bool:
        """Whether it has loaded its libraries."""
        if not self._ready:
            try:
                found = self._socket.recv(len(HELLO), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._lost() from error
            if found != HELLO:
                raise self._lost()
            self._ready = True
        return True

    def decode(self, contents: Sequence[bytes], drawn: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Decodes into `images_NHWC[numbers]` what it can, and says which of them, bool [n]; raises DecoderLost."""
        drawn = drawn if isinstance(self._task, DecodeTask) else drawn[:, :0]
        done = np.empty(len(contents), np.bool_)
        sizes = np.array([len(content) for content in contents], np.int64)
        try:
            self._socket.sendall(HEAD.pack(*drawn.shape, int(sizes.sum())))
            rest = drawn.tobytes(), numbers.astype(np.int64).tobytes(), sizes.tobytes()
            self._socket.sendall(b"".join([*contents, *rest]))
            receive_into(self._socket, done.data.cast("B"))
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


def _end(owner: int, decoders: Sequence[Decoder]) -> None:
    if owner == os.getpid():
        for decoder in decoders:
            decoder.end()
