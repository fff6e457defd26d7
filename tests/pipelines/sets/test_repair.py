"""`repair` writes damaged files of any version again, and says which it can't."""

import shutil

import pytest

from pipelines.build import build
from pipelines.check.verify import verify
from pipelines.sets.repair import NO_PLAN, repair
from shardset.errors import ConfigError
from shardset.writer import Writer
from tests.makers.built import DAY, HERE, append_of, config_of, forget, verified
from tests.makers.folders import write_images
from tests.makers.images import image_bytes
from tests.makers.stored import files_of

RAW = [f"{name}/{number}.png" for name in ("cat", "dog") for number in range(8)]


@pytest.fixture
def versions(tmp_path):
    """Three versions: built, appended to, and compacted; and the raw images."""
    raw, folder = write_images(tmp_path / "raw", RAW), tmp_path / "set"
    build(config_of(raw, folder), HERE)
    build(append_of(folder, tmp_path / "more", "cat/new 1.png", "dog/new.png"), HERE)
    forget(folder, "cat/0", grace=10 * DAY)
    return folder


def damage(path, how):
    data = path.read_bytes()
    path.unlink() if how == "gone" else path.write_bytes(data[:-7] if how == "cut" else data[::-1])


@pytest.mark.parametrize("how", ["gone", "cut", "changed"])
def test_files_of_all_versions_are_written_again_byte_for_byte(versions, how):
    before = files_of(versions)
    shards = sorted(name for name in before if name.endswith((".tar", ".parquet")))
    assert len({name.split("/")[0] for name in shards}) == 3
    for name in shards[::2]:
        damage(versions / name, how)
    done = repair(str(versions))
    assert (sorted(done.written), done.failed) == (shards[::2], {})
    assert files_of(versions) == before
    verified(versions)


def test_a_sound_set_is_left_alone(versions):
    before = files_of(versions)
    done = repair(str(versions))
    assert (done.written, done.failed, files_of(versions)) == ([], {}, before)


def test_what_the_input_no_longer_gives_is_said_and_nothing_is_written(versions, tmp_path):
    [image] = (tmp_path / "more").rglob("new.png")
    image.write_bytes(image_bytes(77))
    shards = sorted(versions.rglob("*.tar"))
    for tar in shards:
        tar.unlink()
    done = repair(str(versions))
    assert len(done.failed) == 1
    [why] = done.failed.values()
    assert "dog/new.png" in why
    assert len(done.written) == len(shards) - 1
    assert len(verify(str(versions), deep=False).problems) == 1


def test_the_input_may_have_moved(versions, tmp_path):
    before = files_of(versions)
    shutil.copytree(tmp_path / "more", tmp_path / "moved")
    for image in (tmp_path / "more").rglob("*.png"):
        image.write_bytes(image_bytes(78))
    [tar] = (tar for tar in versions.glob("train-*/*.tar") if "-v" not in tar.parent.name)
    tar.unlink()
    assert repair(str(versions)).failed
    assert not repair(str(versions), str(tmp_path / "moved")).failed
    assert files_of(versions) == before


def test_sets_that_no_build_made_have_no_plan(tmp_path):
    with Writer(tmp_path / "set") as writer:
        writer.write(image=image_bytes(1), label=0)
    [tar] = (tmp_path / "set").rglob("*.tar")
    tar.unlink()
    assert repair(str(tmp_path / "set")).failed == {"train/train-000000.tar": NO_PLAN}


def test_only_the_newest_version_names_all(versions):
    with pytest.raises(ConfigError, match="only the newest version can be changed"):
        repair(f"{versions}@1")
