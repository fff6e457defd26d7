"""The names of the files of a plan."""

import pytest

from pipelines.plan import paths
from shardset.format import naming


@pytest.mark.parametrize(
    ("path", "expected"),
    [(paths.BUILD, True), (paths.SURVEY, True), (paths.PLAN, True), (paths.REJECTED, True), (paths.REPLACED, True),
     (paths.unit_path(3), True), (paths.summary_path(3), True), (paths.partition_path("keys", 3), True),
     (paths.dropped_path(3), True), (paths.spool_path(3), True), (naming.references_path("val", 4), True),
     (paths.record_path("val", 4), True), ("plan/cat/1.png", False), ("plan/done/1.png", False),
     ("plan/done/cat/1.json", False), ("plan/notes.json", False), ("units/0000003.arrow", False)],
)  # fmt: skip
def test_a_file_of_the_plan_is_known_by_its_name(path, expected):
    assert paths.is_plan_file(path) is expected


def test_paths_are_frozen():
    assert paths.unit_path(3) == "plan/units/0000003.arrow"
    assert paths.spool_path(3) == "plan/spool/0000003.bin"
    assert paths.record_path("val", 4) == "plan/done/val-000004.json"
