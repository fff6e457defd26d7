"""The names of the files of a set."""

from pipelines.plan import paths
from pipelines.write.set_files import is_plan, is_shard
from shardset.format import naming


def test_a_file_of_the_plan_is_known_by_its_name():
    ours = [
        paths.BUILD,
        paths.SURVEY,
        paths.PLAN,
        paths.REPLACED,
        paths.dropped_path("val"),
    ]
    ours += [name(3) for name in (paths.unit_path, paths.summary_path, paths.spool_path)]
    ours += [paths.references_path("val/val-000004.tar"), paths.record_path("val", 4)]
    others = [
        "plan/cat/1.png",
        "plan/done/1.png",
        "plan/done/cat/1.json",
        "plan/notes.json",
        "units/0000003.arrow",
    ]
    assert [name for name in [*ours, *others] if is_plan(name)] == ours


def test_a_shard_or_index_is_known_by_its_name():
    ours = ["train/train-000012.tar", "train/train-000012.parquet", "a/b-1234567.tar"]
    others = [
        *("train/train-12.tar", "train-000012.tar", "train/train-000012.tar.gz"),
        *("a/b/c-000000.tar", naming.MANIFEST),
    ]
    assert [name for name in [*ours, *others] if is_shard(name)] == ours
