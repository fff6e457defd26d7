"""Images in memory that other processes can fill."""

import mmap
import os

import numpy as np


class SharedImages:
    """Black images at first, uint8 [n, size, size, 3], which a process that gets `fd` can open too.

    A copy in another process (pickled) is black again; a forked one shares the memory.
    """

    def __init__(self, num_images: int, size: int) -> None:
        self.fd = os.memfd_create("shardset-images")
        os.ftruncate(self.fd, num_images * 3 * size**2)
        self.images_NHWC = opened(self.fd, size)

    def __reduce__(self) -> tuple:
        return SharedImages, self.images_NHWC.shape[:2]

    def __del__(self) -> None:
        os.close(self.fd)


def opened(fd: int, size: int) -> np.ndarray:
    """The images of `size` behind a file descriptor: uint8 [n, size, size, 3]."""
    return np.frombuffer(mmap.mmap(fd, 0), np.uint8).reshape(-1, size, size, 3)
