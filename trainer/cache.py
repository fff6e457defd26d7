"""Small images, decoded once: where a whole split fits the memory budget, later epochs decode nothing."""

import numpy as np

from trainer.decode import ImageSpec, PadCrop


class DecodedCache:
    """Decoded images of `spec.size` for PadCrop, by id, with the crop's black border around them.

    Any thread may put; a batch is taken only when all of it is there.
    """

    def __init__(self, num_samples: int, size: int, padding: int) -> None:
        self.size, self.padding = size, padding
        side = size + 2 * padding
        self.images_NHWC = np.zeros((num_samples, side, side, 3), dtype=np.uint8)
        self.labels = np.zeros(num_samples, dtype=np.int64)
        self.filled = np.zeros(num_samples, dtype=bool)
        n, down, right, _ = self.images_NHWC.strides
        shape = (num_samples, 2 * padding + 1, 2 * padding + 1, size, 3 * size)
        strides = (n, down, right, down, 1)  # every window at every place, its rows as bytes
        self._windows = np.lib.stride_tricks.as_strided(self.images_NHWC, shape, strides, writeable=False)

    def __reduce__(self) -> tuple:
        return DecodedCache, (len(self.filled), self.size, self.padding)

    @staticmethod
    def num_bytes(num_samples: int, spec: ImageSpec) -> int | None:
        """What a cache for that many images holds; None if the crop needs more than images of the wanted size."""
        if not isinstance(spec.crop, PadCrop):
            return None
        return num_samples * 3 * (spec.size + 2 * spec.crop.padding) ** 2

    def put(self, ids: int | np.ndarray, images_NHWC: np.ndarray, labels: int | np.ndarray) -> None:
        """Keeps images of the wanted size, or one; those of another size it leaves."""
        if images_NHWC.shape[-3:-1] != (self.size, self.size):
            return
        inside = slice(self.padding, self.padding + self.size)
        self.images_NHWC[ids, inside, inside] = images_NHWC
        self.labels[ids] = labels
        self.filled[ids] = True  # last: whoever sees it may read the rest

    def holds(self, ids: np.ndarray) -> bool:
        """Whether all of them are there."""
        return bool(self.filled[ids].all())

    def crop(self, out: np.ndarray, ids: np.ndarray, drawn: np.ndarray) -> None:
        """The crops that the draws choose, as `decode_into` would make them: into uint8 [n, size, size, 3]."""
        places = (drawn[:, 1:3] * (2 * self.padding + 1)).astype(np.int64)
        out.reshape(len(ids), self.size, -1)[:] = self._windows[ids, places[:, 0], places[:, 1]]
