"""Builds under a seed: killed, stopped for hours, beside each other, over a cruel network."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np

from pipelines import sources
from pipelines.build import build
from pipelines.config import BuildConfig
from pipelines.plan import layout
from pipelines.write.set_files import listed_by
from shardset.checksum import crc32c_text
from shardset.errors import ManifestError, ShardsetError, TransientError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import LoadedSet, Manifest
from shardset.read.indexes import read_index
from shardset.storage.checked import read_object
from tests.makers.images import image_bytes
from tests.simulation import runner
from tests.simulation.baton import FOREVER, Baton, Process
from tests.simulation.bucket import CALM, STORMY, Bucket, Object

_open_source = sources.open_source

OUT = "bucket/out/"
MANIFEST = OUT + naming.MANIFEST
RUNNER = ["--runner", f"{runner.__name__}.{runner.SimRunner.__name__}", "--any-runner"]
CALM_AFTER_S = 3000.0
MOST_TRIES = 30

OLD = BuildConfig(
    source="folder", input="gs://bucket/raw", output="gs://bucket/out", num_shards={"": 3}
)
NEW = replace(OLD, seed=7, overwrite=True)
RIVAL = replace(OLD, overwrite=True)
STORIES: dict[str, tuple[BuildConfig, ...]] = {
    "one build": (OLD,),
    "the same build twice at once": (OLD, OLD),
    "a build over another set": (NEW,),
    "the same build twice over another set": (NEW, NEW),
    "two builds for one place": (RIVAL, NEW),
}


def live_through(seed: int) -> Baton:
    """One story of builds; raises Failed where a set is not whole, or not the one that was asked
    for.
    """
    baton = Baton(seed)
    story = baton.random.choice(list(STORIES))
    runs_over = finished(OLD.seed) if "over another" in story else {}
    for config in STORIES[story]:
        contents(config.seed)
    world = Builds(baton, Bucket(baton, STORMY), STORIES[story])
    world.bucket.on_change.append(world.watch)
    if runs_over:
        world.bucket.objects.update(runs_over)
        world.bucket.generation = max(int(object_.generation) for object_ in runs_over.values())
        world.watch(MANIFEST, None, world.bucket.objects[MANIFEST])
    with world.installed():
        baton.run(world.live)
    return baton


@cache
def finished(seed: int) -> dict[str, Object]:
    """All objects after an undisturbed build into an empty place."""
    baton = Baton(0)
    world = Builds(baton, Bucket(baton, CALM), (replace(OLD, seed=seed),))
    with world.installed():
        baton.run(world.build_once)
    return dict(world.bucket.objects)


@cache
def contents(seed: int) -> list[str]:
    """The CRC32C of each tar of an undisturbed build."""
    objects = finished(seed)
    return [objects[name].crc32c for name in sorted(objects) if name.endswith(".tar")]


class Builds:
    """The users of one output, and what is true of it at every moment."""

    def __init__(self, baton: Baton, bucket: Bucket, configs: tuple[BuildConfig, ...]) -> None:
        self.baton, self.bucket, self.configs = baton, bucket, configs
        self._listed: dict[str, str] = {}
        self._seeds = {config.seed for config in configs}
        for number in range(8):
            name = f"bucket/raw/{'cat' if number % 2 else 'dog'}/{number}.png"
            if name not in bucket.objects:
                bucket.put(name, image_bytes(number, "png"))
        runner.new_worker = lambda: self.process("worker")
        runner.new_job = lambda: self.process("job")

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A block in which this bucket is reached, and eight images are enough for several of
        everything.
        """
        with (
            runner.quick_beam(),
            self.bucket.reached(),
            patch.object(
                sources,
                "open_source",
                lambda config: replace(_open_source(config), entries_per_unit=4),
            ),
            patch.object(layout, "MIN_GROUP", 4),
            patch.object(layout, "MAX_GROUP", 4),
        ):
            yield

    def process(self, name: str) -> Process:
        """A process with a connection, and often with a fate."""
        draw, process = self.baton.random, self.baton.process(name)
        if self.bucket.faults is STORMY and draw.random() < 0.15:
            most = {"launcher": 60, "job": 4, "worker": 40}.get(name, 30)
            process.fate = (
                draw.randrange(most),
                draw.choice([Process.kill, Process.kill, self._stop]),
            )
        return process

    def _stop(self, process: Process) -> None:
        process.resumes = self.baton.now + self.baton.random.choice([30, 300, 2000])

    # --- what happens -----------------------------------------------------------------------------

    def live(self) -> None:
        """Everything, to the end."""
        draw = self.baton.random
        users = [
            self.baton.start(lambda config=config: self._user(config), "user")
            for config in self.configs
        ]
        readers = [
            self.baton.start(self._reader, "reader", self.process("reader")) for _ in range(2)
        ]
        self.baton.start(self._calm_down, "calm")
        self.baton.wait(lambda: all(task.is_over for task in users))
        self.bucket.faults = CALM
        self.baton.wait_for_peace()  # who was stopped wakes up and finds that all is done
        for task in [*users, *readers]:
            if task.error:
                raise task.error
        if not any(task.result for task in users) or draw.random() < 0.2:
            self.build_once()
        self.check_end()

    def build_once(self) -> None:
        """A build in peace."""
        build(self.configs[0], RUNNER)

    def _calm_down(self) -> None:
        self.baton.sleep(CALM_AFTER_S)
        self.bucket.faults = CALM

    def _user(self, config: BuildConfig) -> bool:
        """Runs the same command until it succeeds; whether it did, and not another build."""
        for _ in range(MOST_TRIES):
            is_done, error = self.attempt(lambda: build(config, RUNNER), self.process("launcher"))
            if is_done:
                return True
            if isinstance(error, ManifestError) and len(self._seeds) > 1:
                return False
            self.baton.sleep(self.baton.random.uniform(1, 60))
        raise self.baton.fail(f"a build failed {MOST_TRIES} times, at last by {error}")

    def attempt(
        self, command: Callable[[], Any], process: Process, patience_s: float = FOREVER
    ) -> tuple[bool, BaseException | None]:
        """Whether a command has succeeded, in a process that may die or sleep, and its error."""
        task = self.baton.start(command, "command", process)
        self.baton.wait(lambda: task.is_over, patience_s)
        how = task.error or ("finished" if task.is_done else "killed or asleep")
        self.baton.note(f"the command ended: {how}")
        if task.error and not isinstance(task.error, ShardsetError):
            raise task.error
        return task.is_done and task.error is None, task.error

    def _reader(self) -> None:
        """Reads all tars and indexes at some time: those of one set, or an error that says that it
        is gone.
        """
        self.baton.sleep(self.baton.random.uniform(0, 300))
        digest = None
        try:
            loaded = manifests.load(OLD.output)
            digest = loaded.manifest.digest
            self.read_all(loaded)
        except TransientError:
            return
        except ShardsetError as error:
            current = self.bucket.objects.get(MANIFEST)
            if (
                current is not None
                and digest is not None
                and manifests.parse(current.data).digest == digest
            ):
                self.baton.fail(f"a reader failed though its set is there: {error}")

    def read_all(self, loaded: LoadedSet) -> None:
        """Reads all tars and indexes of a set;
        raises DamagedShard for other bytes than it lists.
        """
        for split in loaded.manifest.splits.values():
            for shard in split.shards:
                read_object(
                    loaded.storage, shard.path, shard.num_bytes, shard.crc32c, "build again"
                )
                read_index(loaded.storage, shard)

    # --- what is true -----------------------------------------------------------------------------

    def watch(self, name: str, old: Object | None, new: Object | None) -> None:
        """After each change: whatever the manifest lists is there."""
        if name == MANIFEST:
            if new is None and len(self._seeds) == 1:
                self.baton.fail("the manifest is gone")
            self._listed = self.check_listed(new) if new else {}
        elif name in self._listed and (new is None or self._listed[name] not in ("", new.crc32c)):
            self.baton.fail(
                f"{name} was {'changed' if new else 'removed'}, though the manifest lists it"
            )

    def check_listed(self, manifest: Object) -> dict[str, str]:
        """What a new manifest lists, which must be there."""
        listed = listed_in(self.bucket, manifests.parse(manifest.data))
        for path, crc32c in listed.items():
            found = self.bucket.objects.get(path)
            if found is None or crc32c not in ("", found.crc32c):
                self.baton.fail(f"{path} is not what the new manifest lists")
        return listed

    def check_known(self, known: set[str]) -> None:
        """All files in the folder but the plan's must be known."""
        plan = OUT + naming.PLAN_FOLDER
        names = (name for name in self.bucket.names(OUT) if not name.startswith(plan))
        if unknown := [name for name in names if name not in known]:
            self.baton.fail(f"nothing lists {', '.join(unknown)}")

    def check_end(self) -> None:
        """One whole set, that of one of the users, and no file of unknown origin."""
        current = self.bucket.objects.get(MANIFEST)
        if current is None:
            raise self.baton.fail("no set was published")
        manifest = manifests.parse(current.data)
        if tars_of(self.bucket) != contents(manifest.seed) or manifest.seed not in self._seeds:
            self.baton.fail(
                f"the tars are not those of an undisturbed build with seed {manifest.seed}"
            )
        self.check_known({MANIFEST, *self._listed})


def tars_of(bucket: Bucket) -> list[str]:
    """The CRC32C of each tar that the manifest lists."""
    listed = listed_in(bucket, manifests.parse(bucket.objects[MANIFEST].data))
    return [bucket.objects[name].crc32c for name in sorted(listed) if name.endswith(".tar")]


def listed_in(bucket: Bucket, manifest: Manifest) -> dict[str, str]:
    """The objects that a manifest lists, with their CRC32C where that is known."""
    listed = {OUT + name: "" for name in listed_by(manifest)}
    for split in manifest.splits.values():
        for group in split.groups:
            table = bucket.objects.get(OUT + group.table)
            listed[OUT + group.table] = group.table_crc32c
            if table is None or table.crc32c != group.table_crc32c:
                continue
            for number, row in enumerate(np.load(io.BytesIO(table.data))):
                path = OUT + group.path(number)
                listed[path] = crc32c_text(row["crc32c"].item())
                listed[naming.index_path(path)] = crc32c_text(row["index_crc32c"].item())
    return listed
