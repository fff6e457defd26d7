"""The names of the files of a plan."""

from pipelines.plan import paths


def test_paths_are_frozen():
    assert paths.unit_path(3) == "plan/units/0000003.arrow"
    assert paths.spool_path(3) == "plan/spool/0000003.bin"
    assert paths.references_path("val/val-000004.tar") == "plan/shards/val-000004.arrow"
    assert paths.record_path("val", 4) == "plan/done/val-000004.json"
