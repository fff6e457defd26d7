"""Changes of a finished set under a seed: appends, compactions, tags and views by commands that
die, beside readers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import parquet

from pipelines.build import build
from pipelines.sets.compact import compact
from pipelines.sets.retire import Compacted
from pipelines.sets.version_history import tag
from pipelines.sets.view_maker import Choice, make_view
from shardset.errors import ConfigError, ManifestError, ShardsetError, TransientError
from shardset.format import manifest as manifests
from shardset.format import naming, versions
from shardset.format.shards import Group
from shardset.format.versions import Tag
from shardset.format.view import parse_view
from shardset.read.indexes import read_index
from tests.makers.images import image_bytes
from tests.simulation.baton import FOREVER, Baton, Process
from tests.simulation.bucket import CALM, STORMY, Bucket, Object
from tests.simulation.builds import (
    MANIFEST,
    MOST_TRIES,
    OLD,
    OUT,
    RUNNER,
    Builds,
    finished,
    listed_in,
)

SET = OLD.output
RAW, VIEWS = "bucket/raw/", "bucket/views/"
LIMIT_S = 48 * 3600.0

Keys = dict[str, list[str]]
"""The keys of each split, by id."""


def live_through(seed: int) -> Baton:
    """One story of a set; raises Failed where a version is not whole, or a forgotten sample is
    left.
    """
    start, baton = finished(OLD.seed), Baton(seed, LIMIT_S)
    world = Changes(baton, Bucket(baton, STORMY), start)
    with world.installed():
        baton.run(world.live)
    return baton


def keys_at(url: str) -> Keys | None:
    """The keys of a version or view of the set; None if that is gone."""
    try:
        loaded = manifests.load(url)
    except (ManifestError, ConfigError):
        return None
    found = {}
    for name, split in loaded.manifest.splits.items():
        keys = [
            key
            for shard in split.shards
            for key in read_index(loaded.storage, shard, ["key"])["key"].to_pylist()
        ]
        found[name] = [keys[id_] for id_ in loaded.part(name).rows.ids.tolist()]
    return found


def rows_of(index: bytes) -> list[dict[str, Any]]:
    """The rows of an index."""
    rows: list[dict[str, Any]] = parquet.read_table(pa.BufferReader(index)).to_pylist()
    return rows


@dataclass(eq=False)
class Version:
    """What was published: files with their CRC32C, and keys.

    `retired` is when a sample of it was forgotten.
    """

    number: int
    files: dict[str, str]
    keys: Keys
    retired: float = FOREVER

    @property
    def samples(self) -> set[str]:
        """All keys."""
        return {key for keys in self.keys.values() for key in keys}


class Changes(Builds):
    """The owner and the readers of a set, and what is true of it at every moment."""

    def __init__(self, baton: Baton, bucket: Bucket, start: dict[str, Object]) -> None:
        super().__init__(baton, bucket, (OLD,))
        bucket.objects.update(start)
        bucket.generation = max(int(item.generation) for item in start.values())
        self.images = {
            name.removeprefix(RAW).removesuffix(".png"): item.data
            for name, item in start.items()
            if name.startswith(RAW)
        }
        self.grace = timedelta(hours=baton.random.choice([0, 1]))
        self.versions: dict[str, Version] = {}
        self.newest = self._version_of(start[MANIFEST])
        self.names: dict[str, tuple[Version, Keys]] = {}
        """The addresses of tags and views: the version of each, and its keys."""
        self._given_up: list[str] = []
        bucket.on_change.append(self.watch)

    # --- what happens -----------------------------------------------------------------------------

    def live(self) -> None:
        """Some changes, then a last one in peace, which completes what others have left."""
        draw = self.baton.random
        readers = [
            self.baton.start(self._reader, "reader", self.process("reader")) for _ in range(3)
        ]
        for number in range(draw.randint(3, 6)):
            draw.choice(
                [self._append, self._forget, self._give_up, self._give_up, self._tag, self._view]
            )(number)
            self.baton.sleep(draw.choice([0, 60, 3600]))
        self.bucket.faults = CALM
        self.baton.wait_for_peace()
        for reader in readers:
            if reader.error:
                raise reader.error
        forget = partial(self._compact, self.newest.keys["train"][:1])
        forget()
        self.baton.sleep(self.grace.total_seconds())
        forget()
        self._check_end()

    def _append(self, number: int) -> None:
        """Two new images, at times in a split that the set lacks."""
        folder = self.baton.random.choice(["cat", "val/cat"])
        names = [f"{folder}/new{number}{letter}" for letter in "ab"]
        for at, name in enumerate(names):
            self.images[name] = image_bytes(100 + 2 * number + at, "png")
            self.bucket.put(f"bucket/june{number}/{name}.png", self.images[name])
        config = replace(OLD, input=f"gs://bucket/june{number}", append="store", num_shards={"": 2})
        self._until_done(lambda again: build(replace(config, overwrite=again), RUNNER))
        if not {*names} <= self.newest.samples:
            self.baton.fail(f"{names} were appended, but the keys are {self.newest.keys}")

    def _forget(self, number: int) -> None:
        """Samples are dropped, at times with those of a compaction that was given up."""
        also = [key for key in self._given_up if key in self.newest.samples]
        keys = self._some_keys() + self.baton.random.choice([[], also])
        if keys:
            self._until_done(lambda again: self._compact(keys))
        if left := self.newest.samples.intersection(keys):
            self.baton.fail(f"{left} were dropped, but are there")

    def _give_up(self, number: int) -> None:
        """A compaction that dies, sleeps, or is refused since nothing would be left, is not
        repeated.
        """
        keys = self._some_keys()
        if self.baton.random.random() < 0.3:
            keys += self.newest.keys[max(self.newest.keys)]
        else:
            self._given_up += keys
        self._attempt(lambda: self._compact(keys), self.baton.random.choice([FOREVER, 100]))

    def _tag(self, number: int) -> None:
        """The newest version gets a name."""
        self._attempt(lambda: tag(SET, f"tag{number}"))

    def _view(self, number: int) -> None:
        """A sample of each class of the newest version."""
        self._attempt(lambda: make_view(f"gs://{VIEWS}{number}.parquet", SET, Choice(per_class=1)))

    def _compact(self, keys: list[str]) -> Compacted:
        return compact(SET, keys, grace=self.grace, now=self.baton.wall_clock)

    def _some_keys(self) -> list[str]:
        """One or two of the newest version, but never its last two."""
        keys = self.newest.keys["train"]
        return self.baton.random.sample(
            keys[2:], min(len(keys) - 2, self.baton.random.randint(1, 2))
        )

    def _until_done(self, change: Callable[[bool], Any]) -> None:
        """Repeats a command until it succeeds; after an error it is told that it may start over."""
        error = None
        for _ in range(MOST_TRIES):
            is_done, error = self._attempt(partial(change, error is not None))
            if is_done:
                return
            self.baton.sleep(self.baton.random.uniform(1, 60))
        self.baton.fail(f"a command failed {MOST_TRIES} times, at last by {error}")

    def _attempt(
        self, change: Callable[[], Any], patience_s: float = FOREVER
    ) -> tuple[bool, BaseException | None]:
        draw, process = self.baton.random, self.baton.process("command")
        if draw.random() < 0.5:
            process.fate = (
                draw.randrange(120),
                draw.choice([Process.kill, Process.kill, self._stop]),
            )
        return self.attempt(change, process, patience_s)

    def _reader(self) -> None:
        """Begins on the newest version at some time, and ends on it later."""
        draw = self.baton.random
        self.baton.sleep(draw.uniform(0, 7200))
        began = self.newest
        try:
            loaded = manifests.load(SET)
            began = self.versions[loaded.manifest.digest]
            self.baton.sleep(draw.uniform(0, 1800))
            self.read_all(loaded)
        except TransientError:
            return
        except ShardsetError as error:
            if not self._may_go(began):
                self.baton.fail(
                    f"a reader of version {began.number} failed though it is there: {error}"
                )

    # --- what is true -----------------------------------------------------------------------------

    def watch(self, name: str, old: Object | None, new: Object | None) -> None:
        """After each change: every version that may be asked for is there,
        with all of its files.
        """
        own = name.removeprefix(OUT)
        if name == MANIFEST:
            self._published(new)
        elif versions.number_of(own) and old is not None:
            self._changed_older(own, self.versions[manifests.parse(old.data).digest], new)
        elif own.startswith(versions.TAGS) and new is not None:
            version = self.versions[msgspec.json.decode(new.data, type=Tag).digest]
            self.names[f"{SET}@{own.removeprefix(versions.TAGS).removesuffix('.json')}"] = (
                version,
                version.keys,
            )
        elif name.startswith(VIEWS) and new is not None:
            head, splits = parse_view(new.data, name)
            assert head is not None
            version = self.versions[head.parent_digest]
            keys = {
                split: [version.keys[head.split][id_] for id_ in rows.ids]
                for split, rows in splits.items()
            }
            self.names[f"gs://{name}"] = version, version.keys | keys
        elif old is not None and (new is None or new.crc32c != old.crc32c):
            for version in self.versions.values():
                if name in version.files and not self._may_go(version):
                    self.baton.fail(
                        f"{own} of version {version.number} was {'changed' if new else 'removed'}"
                    )

    def _published(self, new: Object | None) -> None:
        if new is None:
            raise self.baton.fail("the manifest is gone")
        self.check_listed(new)
        before, version = self.newest, self._version_of(new)
        stored = self.bucket.objects.get(OUT + versions.path(before.number))
        if version.number > before.number and (
            stored is None or self._version_of(stored) is not before
        ):
            self.baton.fail(
                f"version {version.number} was published, but version {before.number} is not stored"
            )
        for split, keys in before.keys.items():
            kept = [key for key in keys if key in version.samples]
            there = version.keys.get(split, [])
            if there[: len(kept)] != kept:
                self.baton.fail(f"the keys of {split} were {keys} and are {there}")
        self.newest, version.retired = version, FOREVER
        for other in self.versions.values():
            if other.retired == FOREVER and other.samples & (before.samples - version.samples):
                other.retired = self.baton.now

    def _changed_older(self, own: str, version: Version, new: Object | None) -> None:
        """A version goes last, since a rerun learns from it which files are left."""
        kept = {
            name
            for other in self.versions.values()
            if not self._may_go(other)
            for name in other.files
        }
        if new is not None or not self._may_go(version):
            self.baton.fail(f"{own} was {'changed' if new else 'removed'}")
        if left := [
            name for name in version.files if name in self.bucket.objects and name not in kept
        ]:
            self.baton.fail(f"{own} was removed before its files, such as {left[0]}")

    def _may_go(self, version: Version) -> bool:
        return self.baton.now >= version.retired + self.grace.total_seconds()

    def _version_of(self, manifest: Object) -> Version:
        parsed = manifests.parse(manifest.data)
        if parsed.digest not in self.versions:
            files = listed_in(self.bucket, parsed)
            keys = {
                name: [key for group in split.groups for key in self._keys_of(group)]
                for name, split in parsed.splits.items()
            }
            self.versions[parsed.digest] = Version(parsed.number, files, keys)
        return self.versions[parsed.digest]

    def _keys_of(self, group: Group) -> Iterator[str]:
        for number in range(group.num_shards):
            path = OUT + naming.index_path(group.path(number))
            yield from (row["key"] for row in rows_of(self.bucket.objects[path].data))

    def _check_end(self) -> None:
        """Each version, tag and view that is left has its samples; of the others nothing is left in
        the folder.
        """
        left = [version for version in self.versions.values() if version.retired == FOREVER]
        names = {
            f"{SET}@{version.number}": (version, version.keys) for version in self.versions.values()
        } | self.names
        for url, (version, keys) in names.items():
            found, expected = keys_at(url), keys if version in left else None
            if found != expected:
                self.baton.fail(f"{url} has {found}, expected {expected}")
        known = {MANIFEST}.union(*(version.files for version in left))
        known |= {
            OUT + versions.path(version.number) for version in left if version is not self.newest
        }
        known |= {
            OUT + versions.tag_path(url.partition("@")[2])
            for url, (one, _) in self.names.items()
            if one in left
        }
        self.check_known(known)
        contents = {name: self.bucket.objects[name].data for name in self.bucket.names(OUT)}
        for name in contents:
            if name.endswith(".parquet"):
                contents[name] = repr(rows_of(contents[name])).encode()
        for key in self.images.keys() - set[str]().union(*(version.samples for version in left)):
            for name, data in contents.items():
                if self.images[key] in data or key.encode() in data:
                    self.baton.fail(f"{key} was forgotten, but {name} has it")
