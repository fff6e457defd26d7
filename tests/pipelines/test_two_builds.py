"""Two builds with other options at one output: there is one set, exactly one build's, and the other
build says so.
"""

import uuid
from dataclasses import replace

import pytest

from pipelines import build as builds
from pipelines.build import build
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.plan import paths
from pipelines.runners import options as runner_options
from pipelines.write import replace as replacing
from shardset.errors import ConfigError, PreconditionFailed, ShardsetError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.storage.open import open_storage
from tests.makers.doors import told
from tests.makers.folders import write_class_folders
from tests.makers.stored import files_of

HERE = ["--direct_running_mode=in_memory"]
TAR = "train/train-000001.tar"

MOMENTS = {
    "the plan": ("close", paths.PLAN, 1),
    "a shard is closed": ("close", TAR, 1),
}

LOST = "another build began there meanwhile"


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = write_class_folders(
        tmp_path_factory.mktemp("two") / "raw", ["cat", "dog"], 8, splits=["train"]
    )
    (folder / "train/cat/000.png").write_bytes(b"<html>404</html>")
    return folder


def config_of(raw, url, **more):
    return BuildConfig(
        source="folder",
        input=str(raw),
        output=url,
        num_shards={"": 2},
        **{"max_bad_fraction": 0.2} | more,
    )


@pytest.fixture(scope="module")
def winner(raw, tmp_path_factory):
    """The digests of the shards that the second build makes where it is alone."""
    url = str(tmp_path_factory.mktemp("winner") / "out")
    build(config_of(raw, url, seed=1), HERE)
    return digests_of(url)


def digests_of(url):
    return [shard.sha256 for shard in manifests.load(url)[0].split("train").shards]


def run(config, output):
    prepared = builds.prepare(config, output)
    builds.run(prepared, runner_options.beam_options(HERE, output))
    replacing.remove_slices(prepared.files)


def at(moment, act):
    """Calls `act` once, when that call is made for the n-th time."""
    seen = 0

    def tell(verb, name):
        nonlocal seen
        if (verb, name) == moment[:2]:
            seen += 1
            if seen == moment[2]:
                act()

    return tell


def check_one_set(url, winner):
    """Exactly the second build's set stands, and nothing beside it."""
    manifest = manifests.load(url)[0]
    assert manifest.seed == 1
    assert digests_of(url) == winner
    assert verify(url, deep=True).problems == ()
    assert files_of(url).keys() == {naming.MANIFEST, *manifests.files_of(manifest)}


@pytest.fixture
def storage():
    return open_storage(f"memory://{uuid.uuid4().hex}")


def race(raw, storage, moment, winner):
    first = config_of(raw, storage.url)
    second = config_of(raw, storage.url, seed=1, overwrite=True)
    door = told(storage, uuid.uuid4().hex, at(moment, lambda: run(second, storage)))
    with pytest.raises(ShardsetError, match=LOST) as caught:
        run(first, door)
    assert "\n" not in str(caught.value)
    for _ in range(2):
        check_one_set(storage.url, winner)
        run(second, storage)


def test_a_build_in_whose_place_another_began_ends_with_one_sentence_and_the_other_set_is_whole(
    raw, winner, storage
):
    race(raw, storage, MOMENTS["a shard is closed"], winner)


def test_a_shard_of_unknown_origin_is_refused_and_its_removal_helps(raw, winner, storage):
    config = config_of(raw, storage.url, seed=1)

    def put():
        with storage.writer(TAR) as out:
            out.write(b"somebody's")

    with pytest.raises(
        PreconditionFailed, match=r"train-000001\.tar: a different object exists.*remove it"
    ):
        run(config, told(storage, uuid.uuid4().hex, at(MOMENTS["the plan"], put)))
    assert storage.read(TAR) == b"somebody's"
    storage.delete(TAR)
    run(config, storage)
    check_one_set(storage.url, winner)


def test_builds_that_differ_are_told_their_options_or_their_input_and_nothing_else(raw, storage):
    config = config_of(raw, storage.url)
    builds.prepare(config, storage)
    others = {
        r"seed was 0 and is 1": {"seed": 1},
        r"num_shards was [^;]* and is [^;]*; seed was 0 and is 1": {
            "num_shards": {"": 3},
            "seed": 1,
        },
        r"the input is not the same [^;]*": {"input": f"{raw}/train"},
    }
    for differences, options in others.items():
        with pytest.raises(
            ConfigError, match=rf"already holds an unfinished build \({differences}\); finish"
        ):
            builds.prepare(replace(config, **options), storage)
