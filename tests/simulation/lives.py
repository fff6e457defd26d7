"""What state machines of a set share: its objects, which one simulation after another changes."""

from collections.abc import Callable
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from tests.simulation.baton import Baton, Process
from tests.simulation.bucket import CALM, STORMY, Bucket, Faults, Object
from tests.simulation.builds import OLD, Builds


class LivingSet(RuleBasedStateMachine):
    """The bucket of the set between simulations."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, Object] = {}
        self.generation = 1000

    def world(self, schedule: int, killed_at: int = -1) -> tuple[Builds, Process]:
        """A simulation of the bucket, and a process in it that dies at one of its requests in a storm, or lives."""
        faults: Faults = CALM if killed_at < 0 else STORMY
        baton = Baton(schedule)
        bucket = Bucket(baton, faults)
        bucket.objects, bucket.generation = self.objects, self.generation
        process = baton.process("launcher")
        process.fate = None if killed_at < 0 else (killed_at, Process.kill)
        return Builds(baton, bucket, (OLD,)), process

    def run_in(self, world: Builds, live: Callable[[], Any]) -> Any:
        """What `live` returns in the simulation."""
        with world.installed():
            result = world.baton.run(live)
        self.generation = world.bucket.generation
        return result

    def calmly(self, live: Callable[[], Any]) -> Any:
        """What `live` returns where nothing fails."""
        return self.run_in(self.world(0)[0], live)
