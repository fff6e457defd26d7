"""The contract between the two programs: manifest, tar index, order, storage. Imports neither Beam nor torch."""

from shardset.errors import ShardsetError
from shardset.manifest import Manifest, Shard, Split, load
from shardset.storage import Storage, open_storage
from shardset.version import __version__

__all__ = ["Manifest", "Shard", "ShardsetError", "Split", "Storage", "__version__", "load", "open_storage"]
