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
from tests.makers.cifar import cifar10, python_files, write_archive
from tests.makers.doors import told
from tests.makers.folders import write_class_folders, write_csv
from tests.makers.planned import record_of, rewrite
from tests.makers.stored import files_of

HERE = ["--direct_running_mode=in_memory"]
TAR, INDEX = "train/train-000001.tar", "train/train-000001.idx.npy"

MOMENTS = {
    "its claim": ("write", paths.BUILD, 1),
    "its claim is made": ("closed", paths.BUILD, 1),
    "its survey": ("close", paths.SURVEY, 1),
    "its plan may begin": ("write", paths.BUILD, 2),
    "a unit": ("write", paths.unit_path(0), 1),
    "a summary": ("close", paths.summary_path(0), 1),
    "the list of rejects": ("close", paths.REJECTED, 1),
    "the plan": ("close", paths.PLAN, 1),
    "keys": ("close", paths.partition_path("keys", 0), 1),
    "references for groups": ("close", paths.partition_path("references", 0), 1),
    "references of a shard": ("close", naming.references_path("train", 1), 1),
    "a shard": ("write", TAR, 1),
    "a shard is closed": ("close", TAR, 1),
    "an index": ("close", INDEX, 1),
    "a record": ("write", paths.record_path("train", 1), 1),
    "a record is closed": ("close", paths.record_path("train", 1), 1),
    "the quarantine list": ("write", naming.quarantine_path(), 1),
    "the quarantine list is closed": ("close", naming.quarantine_path(), 1),
    "the manifest": ("write", naming.MANIFEST, 1),
    "the manifest is closed": ("close", naming.MANIFEST, 1),
    "the manifest stands": ("closed", naming.MANIFEST, 1),
}
LATE = {
    "its survey": paths.SURVEY,
    "a unit": paths.unit_path(0),
    "a summary": paths.summary_path(0),
    "the list of rejects": paths.REJECTED,
    "the plan": paths.PLAN,
    "keys": paths.partition_path("keys", 0),
    "references for groups": paths.partition_path("references", 0),
    "references of a shard": naming.references_path("train", 1),
    "a shard": TAR,
    "an index": INDEX,
    "a record": paths.record_path("train", 1),
    "the quarantine list": naming.quarantine_path(),
    "the manifest": naming.MANIFEST,
}
"""The files of a build that may arrive after another has begun."""

BEFORE, WHILE, ONCE = "before its own is written", "while its own is written", "once its own is written"
"""The moments of the other build at which such a file arrives."""

ARRIVALS = [
    *((what, ONCE) for what in LATE),
    *((what, when) for what in ("a unit", "a shard", "an index", "the quarantine list") for when in (BEFORE, WHILE)),
    *((what, WHILE) for what in ("its survey", "keys")),
]

IN_FAST_TESTS = ("a shard is closed", "the manifest")
LATE_IN_FAST_TESTS = [("a shard", BEFORE), ("a shard", WHILE), ("a summary", ONCE), ("keys", ONCE)]
LOST = "another build began there meanwhile"
PATIENCE_S = 120.0
IN_A_BUCKET = ["its claim", "a unit", "a shard is closed", "a record is closed", "the manifest is closed"]


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
    found_at_its_claim = moment == MOMENTS["its claim is made"]
    said = "already holds another shard set" if found_at_its_claim else "another build began there meanwhile"
    with pytest.raises(ShardsetError, match=said) as caught:
        run(first, door)
    assert "\n" not in str(caught.value)
    check_one_set(storage.url, winner)
    run(second, storage)
    check_one_set(storage.url, winner)


@pytest.mark.parametrize(
    "moment", [one if one in IN_FAST_TESTS else pytest.param(one, marks=pytest.mark.slow) for one in MOMENTS]
)
def test_a_build_in_whose_place_another_began_ends_with_one_sentence_and_the_other_set_is_whole(raw, winner, moment):
    race(raw, open_storage(f"memory://{uuid.uuid4().hex}"), MOMENTS[moment], winner)


@pytest.mark.slow
@pytest.mark.parametrize("moment", IN_A_BUCKET)
def test_the_same_on_a_disk(raw, winner, tmp_path, moment):
    race(raw, open_storage(str(tmp_path / "out")), MOMENTS[moment], winner)


@pytest.mark.slow
@pytest.mark.gcs
@pytest.mark.parametrize("moment", IN_A_BUCKET)
def test_the_same_in_a_bucket(raw, winner, gcs_root, moment):
    race(raw, open_storage(f"{gcs_root}/out"), MOMENTS[moment], winner)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["its claim is made", "its survey", "a unit", "a record"])
@pytest.mark.parametrize("moment", ["a summary", "a record is closed"])
def test_a_build_that_goes_on_after_another_began_and_died_writes_nothing_that_the_other_takes_up(
    raw, winner, moment, end
):
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    second = config_of(raw, storage.url, seed=1, overwrite=True)

    def begin_and_die():
        with pytest.raises(StorageError, match="the power is gone"):
            run(second, told(storage, uuid.uuid4().hex, at(MOMENTS[end], die)))

    door = told(storage, uuid.uuid4().hex, at(MOMENTS[moment], begin_and_die))
    with pytest.raises(ShardsetError, match="another build began there meanwhile"):
        run(config_of(raw, storage.url), door)
    run(second, storage)
    check_one_set(storage.url, winner)


@pytest.mark.parametrize(
    ("end", "replaces"), [("its claim is made", False), ("its survey", True), ("its plan may begin", False)]
)
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
    with pytest.raises(ShardsetError, match="another build began there meanwhile"):
        run(config_of(raw, storage.url), door)
    run(second, storage)
    check_one_set(storage.url, winner)


def test_a_shard_of_unknown_origin_is_refused_and_its_removal_helps(raw, winner):
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    config = config_of(raw, storage.url, seed=1)

    def put():
        with storage.writer(TAR) as out:
            out.write(b"somebody's")

    with pytest.raises(PreconditionFailed, match=r"train-000001\.tar: something else stands there.*remove it"):
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
    ("what", "arrival"),
    [one if one in LATE_IN_FAST_TESTS else pytest.param(*one, marks=pytest.mark.slow) for one in ARRIVALS],
)
def test_a_build_ends_well_wherever_a_file_of_the_build_that_it_replaced_arrives(raw, winner, what, arrival):
    storage, name = open_storage(f"memory://{uuid.uuid4().hex}"), LATE[what]
    first, second = config_of(raw, storage.url), config_of(raw, storage.url, seed=1, overwrite=True)
    late(first, second, storage, name, arrival_of(name, arrival))
    check_one_set(storage.url, winner)
    run(second, storage)
    check_one_set(storage.url, winner)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "arrival"), [("a unit", ONCE), ("a shard", WHILE)])
def test_the_same_of_late_files_on_a_disk(raw, winner, tmp_path, what, arrival):
    storage, name = open_storage(str(tmp_path / "out")), LATE[what]
    first, second = config_of(raw, storage.url), config_of(raw, storage.url, seed=1, overwrite=True)
    late(first, second, storage, name, arrival_of(name, arrival))
    check_one_set(storage.url, winner)


@pytest.mark.slow
@pytest.mark.gcs
@pytest.mark.parametrize(("what", "arrival"), [("keys", ONCE), ("a shard", WHILE)])
def test_the_same_of_late_files_in_a_bucket(raw, winner, gcs_root, what, arrival):
    storage, name = open_storage(f"{gcs_root}/out"), LATE[what]
    first, second = config_of(raw, storage.url), config_of(raw, storage.url, seed=1, overwrite=True)
    late(first, second, storage, name, arrival_of(name, arrival))
    check_one_set(storage.url, winner)


@pytest.mark.parametrize("moment", ["its claim is made", pytest.param("the plan", marks=pytest.mark.slow)])
def test_a_manifest_of_a_build_that_died_before_it_could_take_it_back_is_replaced(raw, winner, moment):
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    first, second = config_of(raw, storage.url), config_of(raw, storage.url, seed=1, overwrite=True)
    late(first, second, storage, naming.MANIFEST, MOMENTS[moment], and_die=True)
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


@pytest.mark.slow
@pytest.mark.parametrize("arrival", [WHILE, ONCE])
def test_a_spool_of_the_build_that_was_replaced_may_arrive_at_any_time(tmp_path, arrival):
    (tmp_path / "raw").mkdir()
    write_archive(tmp_path / "raw/cifar-10-python.tar.gz", python_files(cifar10(20)), "cifar-10-batches-py")
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    first = BuildConfig(source="cifar10", input=str(tmp_path / "raw"), output=storage.url, verify="none")
    second = replace(first, seed=1, overwrite=True)
    spool = paths.spool_path(0)
    late(first, second, storage, spool, arrival_of(spool, arrival))
    assert manifests.load(storage.url)[0].seed == 1
    assert verify(storage.url, deep=True).problems == ()


@pytest.mark.parametrize("options", [{"seed": 1}, {"holdout": {"val": 0.5}}, {"num_shards": {"": 1}}])
@pytest.mark.parametrize("flat", [False, True])
def test_builds_that_differ_in_an_option_are_told_that_option_and_nothing_else(tmp_path, options, flat):
    folder = write_class_folders(tmp_path / "raw", ["cat", "dog"], 8, splits=["train"])
    config = BuildConfig(
        source="folder", input=str(folder / "train"), output=str(tmp_path / "out"), num_shards={"": 2},
        holdout={"test": 0.4} if flat else {},
    )  # fmt: skip
    builds.prepare(config, open_storage(config.output))
    (name,) = options
    with pytest.raises(ConfigError, match=rf"already holds an[a-z ]+ \({name} was [^;]* and is [^;]*\)"):
        builds.prepare(replace(config, **options), open_storage(config.output))


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


ONLY_IN_THE_SURVEY = {
    "class_depth": (deep_folder, "folder", {}, {"class_depth": 2}),
    "path_column": (listing, "listing", {}, {"path_column": "copy"}),
    "label_column": (listing, "listing", {}, {"label_column": "number"}),
    "class_depth and seed": (deep_folder, "folder", {}, {"class_depth": 2, "seed": 1}),
}


def surveyed_otherwise(tmp_path, case):
    """A build, its output, and one that differs from it in options that only the survey depends on."""
    make, source, options, others = ONLY_IN_THE_SURVEY[case]
    config = BuildConfig(
        source=source, input=str(make(tmp_path)), output=str(tmp_path / "out"), num_shards={"": 1}, **options
    )
    return config, open_storage(config.output), replace(config, **others)


@pytest.mark.parametrize("case", ONLY_IN_THE_SURVEY)
def test_builds_that_differ_in_an_option_of_the_survey_are_told_that_option_and_nothing_else(tmp_path, case):
    config, output, other = surveyed_otherwise(tmp_path, case)
    builds.prepare(config, output)
    differences = "; ".join(f"{name} was [^;]* and is [^;]*" for name in case.split(" and "))
    with pytest.raises(ConfigError, match=rf"already holds an[a-z ]+ \({differences}\); finish"):
        builds.prepare(other, output)


def test_an_old_option_that_the_new_input_does_not_allow_is_told_with_the_input(tmp_path):
    config, output, other = surveyed_otherwise(tmp_path, "path_column")
    builds.prepare(other, output)
    write_csv(tmp_path / "raw/list.csv", ["path", "label"], [["cat/000.png", "cat"], ["dog/000.png", "dog"]])
    with pytest.raises(ConfigError, match=r"\(path_column was 'copy' and is None; the input is not the same"):
        builds.prepare(config, output)


def test_a_build_of_an_earlier_version_which_kept_no_options_of_the_survey_is_resumed(tmp_path):
    config, output, other = surveyed_otherwise(tmp_path, "class_depth")
    prepared = builds.prepare(config, output)
    old = record_of(output, paths.BUILD)
    del old["survey_options"]
    rewrite(output, paths.BUILD, old)
    with pytest.raises(ConfigError, match=r"already holds an[a-z ]+ \(the input is not the same [^;]*\); finish"):
        builds.prepare(other, output)
    assert builds.prepare(config, output).files == prepared.files
    run(config, output)
    assert verify(output.url, deep=True).problems == ()


def test_builds_that_differ_in_an_option_and_in_their_input_are_told_both(tmp_path):
    folder = write_class_folders(tmp_path / "raw", ["cat", "dog"], 8, splits=["train"])
    config = BuildConfig(
        source="folder", input=str(folder / "train"), output=str(tmp_path / "out"), holdout={"test": 0.4}
    )
    builds.prepare(config, open_storage(config.output))
    (folder / "train/cat/000.png").unlink()
    with pytest.raises(ConfigError, match=r"\(seed was 0 and is 1; the input is not the same"):
        builds.prepare(replace(config, seed=1), open_storage(config.output))
