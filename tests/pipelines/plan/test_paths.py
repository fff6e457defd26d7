"""The names of the files of a plan."""

from pipelines.plan import paths
from shardset.format import naming


def test_a_file_of_the_plan_is_known_by_its_name():
    ours = [
        paths.BUILD,
        paths.SURVEY,
        paths.PLAN,
        paths.REPLACED,
        paths.slice_path("keys", 3),
    ]
    ours += [
        name(3)
        for name in (paths.unit_path, paths.summary_path, paths.dropped_path, paths.spool_path)
    ]
    ours += [naming.references_path("val", 4), paths.record_path("val", 4)]
    others = [
        "plan/cat/1.png",
        "plan/done/1.png",
        "plan/done/cat/1.json",
        "plan/notes.json",
        "units/0000003.arrow",
    ]
    assert [name for name in [*ours, *others] if paths.is_plan_file(name)] == ours


def test_paths_are_frozen():
    assert paths.unit_path(3) == "plan/units/0000003.arrow"
    assert paths.spool_path(3) == "plan/spool/0000003.bin"
    assert paths.record_path("val", 4) == "plan/done/val-000004.json"
