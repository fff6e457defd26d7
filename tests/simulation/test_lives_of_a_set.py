"""What a set can live through in any order, against a model: built, replaced, damaged, repaired,
killed at it, read.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pipelines.build import build
from shardset.errors import ConfigError, ShardsetError
from shardset.format import manifest as manifests
from tests.simulation.baton import Baton, Process
from tests.simulation.bucket import CALM, STORMY, Bucket, Faults, Object
from tests.simulation.builds import MANIFEST, OLD, RUNNER, Builds, contents, tars_of

SCHEDULES = st.integers(0, 10**6)


class Lives(RuleBasedStateMachine):
    """The model: the seed of the published set, and the name of its one tar that is damaged.

    `objects` are those of the bucket between simulations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, Object] = {}
        self.generation = 1000
        self.published: int | None = None
        self.damaged = ""

    @rule(
        seed=st.sampled_from([0, 7]),
        overwrite=st.booleans(),
        schedule=SCHEDULES,
        killed_at=st.integers(-50, 150),
    )
    def build(self, seed: int, overwrite: bool, schedule: int, killed_at: int) -> None:
        """It is right at its end, or it dies, is refused or fails, and leaves the set before it or
        its own.
        """
        world, launcher = self._world(schedule, killed_at)

        def live() -> ShardsetError | None:
            config = replace(OLD, seed=seed, overwrite=overwrite)
            task = world.baton.start(lambda: build(config, RUNNER), "build", launcher)
            world.baton.wait_for_peace()
            if task.error is not None and not isinstance(task.error, ShardsetError):
                raise task.error
            return task.error

        error = self._run_in(world, live)
        found = self._seed_of_the_set()
        if error is None and not launcher.is_killed:
            assert found == seed
            self.damaged = ""
        else:
            assert found in (self.published, seed)
            assert (
                error is None
                or killed_at >= 0
                or (isinstance(error, ConfigError) and not overwrite)
            )
            if found != self.published or self._is_repaired():
                self.damaged = ""
        self.published = found
        if found is not None and not self.damaged:
            assert tars_of(world.bucket) == contents(found)

    @precondition(lambda self: self.published is not None and not self.damaged)
    @rule(number=st.integers(0, 2), is_gone=st.booleans())
    def damage(self, number: int, is_gone: bool) -> None:
        """One of the tars is gone, or cut."""
        self.damaged = sorted(name for name in self.objects if name.endswith(".tar"))[number]
        item = self.objects.pop(self.damaged)
        if not is_gone:
            self.objects[self.damaged] = Object(item.data[:-512], "1", "AAAAAA==")

    @precondition(lambda self: self.published is not None)
    @rule(schedule=SCHEDULES)
    def read(self, schedule: int) -> None:
        """A reader gets every byte, or an error where one is damaged."""
        world, _ = self._world(schedule)

        def read() -> bool:
            try:
                world.read_all(manifests.load(OLD.output))
            except ShardsetError:
                return False
            return True

        assert self._run_in(world, read) == (not self.damaged)

    def _world(self, schedule: int, killed_at: int = -1) -> tuple[Builds, Process]:
        """A simulation of the bucket, and a process in it that dies at one of its requests in a
        storm, or lives.
        """
        faults: Faults = CALM if killed_at < 0 else STORMY
        baton = Baton(schedule)
        bucket = Bucket(baton, faults)
        bucket.objects, bucket.generation = self.objects, self.generation
        process = baton.process("launcher")
        process.fate = None if killed_at < 0 else (killed_at, Process.kill)
        return Builds(baton, bucket, (OLD,)), process

    def _run_in(self, world: Builds, live: Callable[[], Any]) -> Any:
        """What `live` returns in the simulation."""
        with world.installed():
            result = world.baton.run(live)
        self.generation = world.bucket.generation
        return result

    def _seed_of_the_set(self) -> int | None:
        return (
            manifests.parse(self.objects[MANIFEST].data).seed if MANIFEST in self.objects else None
        )

    def _is_repaired(self) -> bool:
        return self.damaged in self.objects and self.objects[self.damaged].crc32c != "AAAAAA=="


Lives.TestCase.settings = settings(max_examples=8, stateful_step_count=6, deadline=None)
test_lives = Lives.TestCase
