"""The manifest of a shard set: its records, their sealed JSON, and how a set is opened."""

from shardset.format.manifest.loading import (
    LoadedSet,
    SetUrl,
    View,
    load,
    load_set,
    load_whole,
    older,
    older_with,
    opened,
    read,
    read_head,
    with_view,
)
from shardset.format.manifest.records import (
    KIND,
    VERSION,
    ClassInfo,
    Manifest,
    Provenance,
    Quarantine,
    Split,
    hash_of_key,
)
from shardset.format.manifest.sealing import check, parse, seal, shards_of, to_json
from shardset.format.shards import IndexFile, Shard
