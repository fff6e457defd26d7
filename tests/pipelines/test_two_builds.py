"""What a build finds at its output: a tar of somebody, or a build with other options.

tests/simulation has the races of two builds.
"""

import uuid
from dataclasses import replace

import pytest

from pipelines import build as builds
from pipelines.begin import prepare
from pipelines.check.verify import verify
from pipelines.plan import paths
from pipelines.runners import options as runner_options
from pipelines.write import replace as replacing
from shardset.errors import ConfigError, PreconditionFailed
from shardset.storage.open import open_storage
from tests.makers.built import HERE, config_of
from tests.makers.doors import told
from tests.makers.folders import write_class_folders

TAR = "train/train-000001.tar"


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = write_class_folders(
        tmp_path_factory.mktemp("two") / "raw", ["cat", "dog"], 8, splits=["train"]
    )
    (folder / "train/cat/000.png").write_bytes(b"<html>404</html>")
    return folder


def run(config, output):
    prepared = prepare(config, output)
    builds.run(prepared, runner_options.beam_options(HERE, output))
    replacing.remove_slices(prepared.files)


@pytest.fixture
def storage():
    return open_storage(f"memory://{uuid.uuid4().hex}")


def test_a_shard_of_unknown_origin_is_refused_and_its_removal_helps(raw, storage):
    config = config_of(raw, storage.url, seed=1, max_bad_fraction=0.2)

    def put_once(verb, name):
        if (verb, name) == ("close", paths.PLAN):
            storage.write(TAR, b"somebody's")

    with pytest.raises(
        PreconditionFailed, match=r"train-000001\.tar: a different object exists.*remove it"
    ):
        run(config, told(storage, uuid.uuid4().hex, put_once))
    assert storage.read(TAR) == b"somebody's"
    storage.delete(TAR)
    run(config, storage)
    assert verify(storage.url, deep=True).problems == ()


def test_builds_that_differ_are_told_their_options_or_their_input_and_nothing_else(raw, storage):
    config = config_of(raw, storage.url, max_bad_fraction=0.2)
    prepare(config, storage)
    others: dict = {
        r"seed was 0 and is 1": {"seed": 1},
        r"num_shards was [^;]* and is [^;]*; seed was 0 and is 1": {
            "num_shards": {"": 2},
            "seed": 1,
        },
        r"the input is not the same [^;]*": {"input": f"{raw}/train"},
    }
    for differences, options in others.items():
        with pytest.raises(
            ConfigError, match=rf"already holds an unfinished build \({differences}\); finish"
        ):
            prepare(replace(config, **options), storage)
