from pipelines.report.catalog import leaks
from tests.makers.shardset import new_set, png_samples


def test_images_that_several_splits_share_are_told_and_those_of_one_split_are_not(tmp_path):
    train = png_samples("train", 6, size=8)
    new_set({"train": train, "val": train[2:4]}, tmp_path / "a")
    [told] = leaks(str(tmp_path / "a"))
    assert told.startswith("2 images stored in several splits, such as train-000002, so")
    new_set({"train": train}, tmp_path / "b")
    assert leaks(str(tmp_path / "b")) == []
