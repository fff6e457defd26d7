"""The removal of files at the output."""

import threading
import uuid
from dataclasses import dataclass
from typing import ClassVar

from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.files import PlanFiles
from pipelines.write import replace
from shardset.storage.memory import MemoryStorage
from tests.makers.shardset import put

BUILD = "0123456789abcdef"
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Deleting(MemoryStorage):
    """A storage on which a removal succeeds only while three others run."""

    reads_at_once: ClassVar[int] = AT_ONCE
    others: ClassVar[threading.Barrier] = threading.Barrier(AT_ONCE, timeout=60)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        self.others.wait()
        MemoryStorage.delete(self, name, generation=generation)


def test_files_are_removed_many_at_a_time():
    output = Deleting(uuid.uuid4().hex)
    plan_files.write(output, paths.BUILD, BUILD, b"{}")
    names = [paths.unit_path(number) for number in range(3 * AT_ONCE)]
    for name in [*names, "notes.txt"]:
        put(output, name, b"1")
    replace.remove(PlanFiles(output, BUILD), names)
    assert [stat.name for stat in output.list()] == ["notes.txt", paths.BUILD]
