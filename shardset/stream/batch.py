"""The batch that a stream yields."""

from typing import Any

Batch = dict[str, Any]
"""One batch: arrays and lists by name, which the stream's options decide; docs/stream.md has their shapes and types."""

BATCH_NAMES = frozenset({"image", "label", "weight", "id", "flip", "key", "source"})
"""Names that no stored field of a batch may have; `source` is the number of the shard set in a mixture."""
