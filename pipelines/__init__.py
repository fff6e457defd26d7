"""The program `shardset build`, and what other Beam pipelines import from it.

`ReadShards` and `WriteShards` are imported on first use, because Beam takes a second.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.transforms.read_shards import ReadShards, StoredRow
    from pipelines.transforms.write_shards import WriteShards

__all__ = ["ReadShards", "StoredRow", "WriteShards"]

_MODULES = {
    "ReadShards": "read_shards",
    "StoredRow": "read_shards",
    "WriteShards": "write_shards",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'pipelines' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pipelines.transforms.{_MODULES[name]}"), name)
