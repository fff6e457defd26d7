"""ILSVRC2012 as it is published, end to end:
the tar of tars and the development kit become shards.
"""

import pytest

from pipelines.build import build
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from shardset.format.manifest import load
from tests.makers import imagenet
from tests.makers.built import HERE
from tests.makers.stored import samples_of


@pytest.mark.parametrize("layout", ["archives", "kaggle", "class folders"])
def test_every_label_is_the_devkits_and_every_byte_the_archives(tmp_path, layout):
    images = imagenet.images(num_train=5)
    files = {
        "archives": imagenet.archives,
        "kaggle": imagenet.kaggle,
        "class folders": imagenet.class_folders,
    }[layout]
    imagenet.put(tmp_path / "raw", files(images))
    config = BuildConfig(
        source="imagenet",
        input=str(tmp_path / "raw"),
        output=str(tmp_path / "out"),
        num_shards={"": 2},
    )
    build(config, HERE)
    manifest = load(config.output).manifest
    assert [(info.label, info.wnid) for info in manifest.classes] == list(enumerate(imagenet.WNIDS))
    for split in ("train", "validation"):
        stored = samples_of(tmp_path / "out", manifest, split)
        expected = {image.key: image for image in images if image.split == split}
        assert set(stored) == set(expected)
        for key, image in expected.items():
            assert stored[key]["jpg"] == image.content
            assert int(stored[key]["cls"]) == imagenet.WNIDS.index(image.wnid)
    assert verify(str(tmp_path / "out"), deep=True).problems == ()
