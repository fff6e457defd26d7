"""What a finished set can become in any order, against a model: appended to, tagged, viewed, compacted, killed."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from pipelines.build import build
from pipelines.sets import versions
from pipelines.sets.compact import compact
from pipelines.sets.view import Choice, make_view
from shardset.errors import ConfigError, ManifestError, ShardsetError
from shardset.format import manifest as manifests
from shardset.read.indexes import read_index
from tests.makers.images import image_bytes
from tests.simulation.builds import OLD, OUT, RUNNER, finished
from tests.simulation.lives import LivingSet

SET = f"gs://{OUT.rstrip('/')}"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SCHEDULES, KILLS = st.integers(0, 10**6), st.integers(-30, 90)


def keys_at(url: str) -> list[str]:
    """The keys of a version or view of the set, by id."""
    loaded = manifests.load(url)
    shards = loaded.manifest.split("train").shards
    keys = [key.decode() for shard in shards for key in read_index(loaded.storage, shard)["key"].tolist()]
    return [keys[id_] for id_ in loaded.part("train").rows.ids.tolist()]


class Changes(LivingSet):
    """The model: the keys of each version that is left, the versions of tags and views, and the keys of these."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = dict(finished(OLD.seed))
        self.generation = max(int(item.generation) for item in self.objects.values())
        self.num_inputs = 0
        self.tags: dict[str, int] = {}
        self.views: dict[str, tuple[int, list[str]]] = {}
        self.keys = {1: self.calmly(lambda: keys_at(SET))}

    @property
    def newest(self) -> int:
        """The number of the newest version."""
        return max(self.keys)

    @rule(schedule=SCHEDULES, killed_at=KILLS)
    def append(self, schedule: int, killed_at: int) -> None:
        """Two new pictures."""
        self.num_inputs += 1
        names = [f"cat/{self.num_inputs}{letter}" for letter in "ab"]
        raw = f"bucket/june{self.num_inputs}"
        config = replace(OLD, input=f"gs://{raw}", append="none", num_shards={"": 2})
        for number, name in enumerate(names, 100 * self.num_inputs):
            world, _ = self.world(0)
            picture = f"{raw}/{name}.png", image_bytes(number, "png")
            self.run_in(world, lambda world=world, picture=picture: world.bucket.put(*picture))
        self._change(schedule, killed_at, lambda: build(config, RUNNER))
        found = self.calmly(lambda: keys_at(SET))
        assert (found[: -len(names)], sorted(found[-len(names) :])) == (self.keys[self.newest], names)
        self.keys[self.newest + 1] = found

    @rule(schedule=SCHEDULES, killed_at=KILLS, which=st.integers(0, 100))
    def compact(self, schedule: int, killed_at: int, which: int) -> None:
        """A sample is forgotten, in all versions that have it."""
        kept = self.keys[self.newest]
        if len(kept) < 3:
            return
        key = kept[which % len(kept)]
        self._change(schedule, killed_at, lambda: compact(SET, [key], grace=timedelta(0), now=NOW))
        left = {number: keys for number, keys in self.keys.items() if key not in keys}
        self.keys = left | {self.newest + 1: [one for one in kept if one != key]}
        self.tags = {name: number for name, number in self.tags.items() if number in left}

    @rule(name=st.sampled_from(["paper", "demo"]))
    def tag(self, name: str) -> None:
        """The newest version gets a name, unless another one has it."""
        if self.tags.setdefault(name, self.newest) == self.newest:
            self.calmly(lambda: versions.tag(SET, name))

    @rule()
    def view(self) -> None:
        """A sample of each class."""
        url = f"gs://bucket/views/{len(self.views)}.parquet"
        self.calmly(lambda: make_view(url, SET, Choice(per_class=1)))
        self.views[url] = self.newest, self.calmly(lambda: keys_at(url))

    @rule()
    def read(self) -> None:
        """Each version, tag and view that is left has its samples, and the others say that they are gone."""
        addresses = {f"{SET}@{number}": number for number in range(1, self.newest + 2)}
        addresses |= {f"{SET}@{name}": number for name, number in self.tags.items()}
        wanted = {url: self.keys.get(number) for url, number in addresses.items()}
        wanted |= {url: keys if number in self.keys else None for url, (number, keys) in self.views.items()}
        for url, keys in wanted.items():
            if keys is None:
                with pytest.raises((ManifestError, ConfigError), match=r"version|is a view of the set with digest"):
                    self.calmly(lambda url=url: keys_at(url))
            else:
                assert self.calmly(lambda url=url: keys_at(url)) == keys

    def _change(self, schedule: int, killed_at: int, change: Callable[[], object]) -> None:
        """Makes a change; if it dies or fails, the set is the old or the new one, and the same command completes it."""
        world, process = self.world(schedule, killed_at)

        def live() -> bool:
            task = world.baton.start(change, "change", process)
            world.baton.wait_for_peace()
            if task.error is not None and not isinstance(task.error, ShardsetError):
                raise task.error
            return task.error is None and task.is_done

        is_done = self.run_in(world, live)
        assert is_done or killed_at >= 0
        assert self.calmly(lambda: manifests.load(SET).manifest.number) in (self.newest, self.newest + 1)
        if not is_done:
            self.calmly(change)


Changes.TestCase.settings = settings(max_examples=6, stateful_step_count=6, deadline=None)
test_changes = Changes.TestCase
