"""Two builds with other options at one output: one set stands, exactly one build's, and the other build says so."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pipelines import build as builds
from pipelines.build import build
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.plan import paths
from pipelines.runners import options as runner_options
from pipelines.write import replace as replacing
from shardset.errors import ConfigError, PreconditionFailed, ShardsetError, StorageError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.storage.open import open_storage
from tests.makers.doors import told
from tests.makers.folders import write_class_folders, write_csv
from tests.makers.stored import files_of

HERE = ["--direct_running_mode=in_memory"]
TAR, INDEX = "train/train-000001.tar", "train/train-000001.idx.npy"

MOMENTS = {
    "its claim is made": ("closed", paths.BUILD, 1),
    "its survey": ("close", paths.SURVEY, 1),
    "its plan may begin": ("write", paths.BUILD, 2),
    "a unit": ("write", paths.unit_path(0), 1),
    "the plan": ("close", paths.PLAN, 1),
    "a shard is closed": ("close", TAR, 1),
    "a record is closed": ("close", paths.record_path("train", 1), 1),
    "the manifest is closed": ("close", naming.MANIFEST, 1),
}
BEFORE, WHILE, ONCE = "before its own is written", "while its own is written", "once its own is written"
"""The moments of the other build at which a file of the lost one arrives."""

slow = pytest.mark.slow
LOST = "another build began there meanwhile"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = write_class_folders(tmp_path_factory.mktemp("two") / "raw", ["cat", "dog"], 8, splits=["train"])
    (folder / "train/cat/000.png").write_bytes(b"<html>404</html>")
    return folder


def config_of(raw, url, **more):
    return BuildConfig(
        source="folder", input=str(raw), output=url, num_shards={"": 2}, **{"max_bad_fraction": 0.2} | more
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
    replacing.remove_partitions(prepared.files)


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


def die():
    raise StorageError("the power is gone")


def check_one_set(url, winner):
    """Exactly the second build's set stands, and nothing beside it."""
    manifest = manifests.load(url)[0]
    assert manifest.seed == 1
    assert digests_of(url) == winner
    assert verify(url, deep=True).problems == ()
    listed = {path for shard in manifest.split("train").shards for path in (shard.path, shard.index.path)}
    assert files_of(url).keys() == {naming.MANIFEST, manifest.quarantine.path, *listed}


def race(raw, storage, moment, winner):
    first = config_of(raw, storage.url)
    second = config_of(raw, storage.url, seed=1, overwrite=True)
    door = told(storage, uuid.uuid4().hex, at(moment, lambda: run(second, storage)))
    with pytest.raises(ShardsetError, match=LOST) as caught:
        run(first, door)
    assert "\n" not in str(caught.value)
    check_one_set(storage.url, winner)
    run(second, storage)
    check_one_set(storage.url, winner)


@pytest.fixture(
    params=["memory", pytest.param("disk", marks=slow), pytest.param("bucket", marks=[slow, pytest.mark.gcs])]
)
def storage(request, tmp_path):
    if request.param == "bucket":
        return open_storage(f"{request.getfixturevalue('gcs_root')}/out")
    return open_storage(str(tmp_path / "out") if request.param == "disk" else f"memory://{uuid.uuid4().hex}")


@pytest.mark.parametrize("moment", ["a shard is closed", "the manifest is closed"])
def test_a_build_in_whose_place_another_began_ends_with_one_sentence_and_the_other_set_is_whole(
    raw, winner, storage, moment
):
    race(raw, storage, MOMENTS[moment], winner)


@pytest.mark.parametrize(
    "moment", ["its claim is made", *(pytest.param(one, marks=slow) for one in ("its survey", "a unit"))]
)
def test_the_same_before_anything_is_planned(raw, winner, moment):
    race(raw, open_storage(f"memory://{uuid.uuid4().hex}"), MOMENTS[moment], winner)


@pytest.mark.parametrize(("end", "replaces"), [("its claim is made", False), ("its survey", True)])
def test_a_build_that_died_and_ran_again_leaves_every_file_of_one_that_nobody_killed(raw, end, replaces):
    def files_after(*ends):
        storage = open_storage(f"memory://{uuid.uuid4().hex}")
        if replaces:
            run(config_of(raw, storage.url), storage)
        config = config_of(raw, storage.url, seed=1, overwrite=replaces)
        for end in ends:
            with pytest.raises(StorageError, match="the power is gone"):
                run(config, told(storage, uuid.uuid4().hex, at(MOMENTS[end], die)))
        run(config, storage)
        return {stat.name: storage.read(stat.name) for stat in storage.list()}

    assert files_after(end) == files_after()


def test_units_of_a_job_that_checked_no_image_are_not_taken_up_by_one_that_does(raw):
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    careless, careful = config_of(raw, storage.url, verify="none"), config_of(raw, storage.url, overwrite=True)
    careless_files = {}

    def keep():
        careless_files.update({stat.name: storage.read(stat.name) for stat in storage.list(naming.PLAN_FOLDER)})

    run(careless, told(storage, uuid.uuid4().hex, at(("write", paths.PLAN, 1), keep)))

    def written_late():
        for name in (paths.unit_path(0), paths.summary_path(0)):
            with storage.writer(name) as out:
                out.write(careless_files[name])

    run(careful, told(storage, uuid.uuid4().hex, at(("write", paths.unit_path(0), 1), written_late)))
    assert manifests.load(storage.url)[0].quarantine.count == 1
    assert verify(storage.url, deep=True).problems == ()


def test_a_shard_that_a_lost_build_wrote_after_its_successor_died_is_replaced(raw, winner):
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    second = config_of(raw, storage.url, seed=1, overwrite=True)

    def begin_and_die():
        with pytest.raises(StorageError, match="the power is gone"):
            run(second, told(storage, uuid.uuid4().hex, at(MOMENTS["the plan"], die)))

    door = told(storage, uuid.uuid4().hex, at(MOMENTS["a shard is closed"], begin_and_die))
    with pytest.raises(ShardsetError, match=LOST):
        run(config_of(raw, storage.url), door)
    run(second, storage)
    check_one_set(storage.url, winner)


def test_a_shard_of_unknown_origin_is_refused_and_its_removal_helps(raw, winner):
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    config = config_of(raw, storage.url, seed=1)

    def put():
        with storage.writer(TAR) as out:
            out.write(b"somebody's")

    with pytest.raises(PreconditionFailed, match=r"train-000001\.tar: a different object exists.*remove it"):
        run(config, told(storage, uuid.uuid4().hex, at(MOMENTS["the plan"], put)))
    assert storage.read(TAR) == b"somebody's"
    storage.delete(TAR)
    run(config, storage)
    check_one_set(storage.url, winner)


def arrival_of(name, arrival):
    return {BEFORE: MOMENTS["its plan may begin"], WHILE: ("close", name, 1), ONCE: ("closed", name, 1)}[arrival]


def late(first, second, storage, name, moment, *, and_die=False):
    """Runs the second build, which has to end well: `name` of the first arrives at that moment of the second.

    The first then goes on, or dies.
    """
    is_held, released = threading.Event(), threading.Event()

    def hold():
        is_held.set()
        assert released.wait(PATIENCE_S)

    def first_moments(verb, found):
        holding(verb, found)
        if and_die and (verb, found) == ("closed", name):
            die()

    def lose():
        with pytest.raises(ShardsetError, match="the power is gone" if and_die else LOST) as caught:
            run(first, told(storage, uuid.uuid4().hex, first_moments))
        assert "\n" not in str(caught.value)

    def arrive():
        released.set()
        lost.result(PATIENCE_S)

    holding = at(("close", name, 1), hold)
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(lose)
        try:
            assert is_held.wait(PATIENCE_S)
            run(second, told(storage, uuid.uuid4().hex, at(moment, arrive)))
            assert lost.done()
        finally:
            released.set()
        lost.result()


@pytest.mark.parametrize(
    ("name", "arrival"),
    [
        (TAR, WHILE),
        (paths.partition_path("keys", 0), ONCE),
        *(pytest.param(name, BEFORE, marks=slow) for name in (paths.unit_path(0), INDEX)),
    ],
)
def test_a_build_ends_well_wherever_a_file_of_the_build_that_it_replaced_arrives(raw, winner, name, arrival):
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    first, second = config_of(raw, storage.url), config_of(raw, storage.url, seed=1, overwrite=True)
    late(first, second, storage, name, arrival_of(name, arrival))
    check_one_set(storage.url, winner)
    run(second, storage)
    check_one_set(storage.url, winner)


def test_a_manifest_of_a_build_that_died_before_it_could_take_it_back_is_replaced(raw, winner):
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    first, second = config_of(raw, storage.url), config_of(raw, storage.url, seed=1, overwrite=True)
    late(first, second, storage, naming.MANIFEST, MOMENTS["the plan"], and_die=True)
    check_one_set(storage.url, winner)
    run(second, storage)
    check_one_set(storage.url, winner)


def test_the_list_of_what_a_third_build_replaces_stays_where_the_second_removes_its_own(raw, winner):
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    run(config_of(raw, storage.url), storage)
    third = config_of(raw, storage.url, seed=1, overwrite=True)

    def begin_and_die():
        with pytest.raises(StorageError, match="the power is gone"):
            run(third, told(storage, uuid.uuid4().hex, at(MOMENTS["a unit"], die)))

    door = told(storage, uuid.uuid4().hex, at(("delete", paths.REPLACED, 1), begin_and_die))
    run(config_of(raw, storage.url, seed=2, overwrite=True), door)
    run(third, storage)
    check_one_set(storage.url, winner)


def flat_folder(tmp_path):
    return write_class_folders(tmp_path / "raw", ["cat", "dog"], 8, splits=["train"]) / "train"


def deep_folder(tmp_path):
    folder = write_class_folders(tmp_path / "raw", ["cat", "dog"], 4)
    for name in ("cat", "dog"):
        (folder / name / "old").mkdir()
        (folder / name / "000.png").rename(folder / name / "old/000.png")
    return folder


def listing(tmp_path):
    folder = write_class_folders(tmp_path / "raw", ["cat", "dog"], 4)
    rows = [[f"{name}/00{n}.png", f"{name}/00{3 - n}.png", name, n] for name in ("cat", "dog") for n in range(4)]
    return write_csv(folder / "list.csv", ["path", "copy", "label", "number"], rows)


@pytest.mark.parametrize(
    ("make", "source", "options"),
    [
        (flat_folder, "folder", {"seed": 1}),
        (flat_folder, "folder", {"holdout": {"val": 0.5}}),
        (flat_folder, "folder", {"num_shards": {"": 2}}),
        (deep_folder, "folder", {"class_depth": 2, "seed": 1}),
        (listing, "listing", {"path_column": "copy"}),
        (listing, "listing", {"label_column": "number"}),
    ],
)
def test_builds_that_differ_in_options_are_told_these_options_and_nothing_else(tmp_path, make, source, options):
    config = BuildConfig(
        source=source, input=str(make(tmp_path)), output=str(tmp_path / "out"), num_shards={"": 1},
        holdout={"test": 0.4} if make is flat_folder else {},
    )  # fmt: skip
    output = open_storage(config.output)
    builds.prepare(config, output)
    differences = "; ".join(f"{name} was [^;]* and is [^;]*" for name in options)
    with pytest.raises(ConfigError, match=rf"already holds an[a-z ]+ \({differences}\); finish"):
        builds.prepare(replace(config, **options), output)


def test_builds_that_differ_only_in_their_input_are_told_so(tmp_path):
    folder = flat_folder(tmp_path)
    config = BuildConfig(source="folder", input=str(folder), output=str(tmp_path / "out"), holdout={"test": 0.4})
    builds.prepare(config, open_storage(config.output))
    (folder / "cat/000.png").unlink()
    with pytest.raises(ConfigError, match=r"\(the input is not the same [^;]*\); finish"):
        builds.prepare(config, open_storage(config.output))
