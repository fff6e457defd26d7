"""Small images, decoded once: if a whole split fits the memory budget,
later epochs decode nothing.
"""

import numpy as np

from shardset.decode.workers import SharedImages


class MemoryCache:
    """Decoded images of one size by id, for a crop that does not resize them.

    Any thread may put images, and worker processes; a batch is taken only when all of it is there.
    """

    def __init__(self, images: SharedImages) -> None:
        self.images, self.images_NHWC = images, images.images_NHWC
        num_samples, self.size = self.images_NHWC.shape[:2]
        self.labels = np.zeros(num_samples, dtype=np.int64)
        self.filled = np.zeros(num_samples, dtype=bool)

    def put(self, ids: int | np.ndarray, images_NHWC: np.ndarray, labels: int | np.ndarray) -> None:
        """Keeps one image or several of one size; ignores images of another size than the wanted
        one.
        """
        if images_NHWC.shape[-3:-1] != (self.size, self.size):
            return
        self.images_NHWC[ids] = images_NHWC
        self.mark_filled(ids, labels)

    def mark_filled(self, ids: int | np.ndarray, labels: int | np.ndarray) -> None:
        """Marks images as there; a worker process may have put them."""
        self.labels[ids] = labels
        self.filled[ids] = True  # comes last: whoever sees it may read the rest

    def holds(self, ids: np.ndarray) -> bool:
        """Whether all of them are there."""
        return bool(self.filled[ids].all())
