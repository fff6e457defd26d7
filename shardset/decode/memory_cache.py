"""Small images, decoded once: where a whole split fits the memory budget, later epochs decode nothing."""

import numpy as np

from shardset.decode.crops import PadCrop, pad_crops
from shardset.decode.image import ImageSpec
from shardset.decode.shared import SharedImages


class MemoryCache:
    """Decoded images of `spec.size` for PadCrop, by id.

    Any thread may put; a batch is taken only when all of it is there. With `shared` the images are kept there, where
    other processes may put them too.
    """

    def __init__(self, num_samples: int, size: int, padding: int, shared: SharedImages | None = None) -> None:
        self.size, self.padding, self._shared = size, padding, shared
        self.images_NHWC = shared.images_NHWC if shared else np.zeros((num_samples, size, size, 3), dtype=np.uint8)
        self.labels = np.zeros(num_samples, dtype=np.int64)
        self.filled = np.zeros(num_samples, dtype=bool)

    def __reduce__(self) -> tuple:
        return MemoryCache, (len(self.filled), self.size, self.padding, self._shared)

    @staticmethod
    def num_bytes(num_samples: int, spec: ImageSpec) -> int | None:
        """What a cache for that many images holds; None if the crop needs more than images of the wanted size."""
        if not isinstance(spec.crop, PadCrop):
            return None
        return num_samples * 3 * spec.size**2

    def put(self, ids: int | np.ndarray, images_NHWC: np.ndarray, labels: int | np.ndarray) -> None:
        """Keeps images of the wanted size, or one; those of another size it leaves."""
        if images_NHWC.shape[-3:-1] != (self.size, self.size):
            return
        self.images_NHWC[ids] = images_NHWC
        self.note(ids, labels)

    def note(self, ids: int | np.ndarray, labels: int | np.ndarray) -> None:
        """Says that these images are there; another process may have put them."""
        self.labels[ids] = labels
        self.filled[ids] = True  # last: whoever sees it may read the rest

    def holds(self, ids: np.ndarray) -> bool:
        """Whether all of them are there."""
        return bool(self.filled[ids].all())

    def crop(self, out: np.ndarray, slots: np.ndarray, ids: np.ndarray, drawn: np.ndarray) -> None:
        """The crops that the draws choose, as `decode_into` would make them: into `out[slots]`, uint8 RGB."""
        pad_crops(out, slots, self.images_NHWC, ids, self.padding, drawn)
