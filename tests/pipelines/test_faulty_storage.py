"""A build on storage that misbehaves makes the bytes of an undisturbed one, or fails loudly; a
rerun completes it.
"""

import re
from dataclasses import replace
from urllib.parse import unquote

import numpy as np
import pytest

from pipelines import build as builds
from pipelines.build import build
from pipelines.cli import main
from pipelines.config import BuildConfig
from pipelines.plan import paths
from pipelines.runners import options
from shardset.errors import ManifestError, StorageError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.storage import gcs
from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy
from tests.faulty_proxy import Fault, FaultyProxy, in_turn, is_media, is_upload
from tests.makers import imagenet
from tests.makers.folders import write_class_folders
from tests.makers.imagenet import TRUTH, WNIDS, Image
from tests.makers.objects import Clock
from tests.makers.shardset import encode
from tests.makers.stored import files_of, samples_of

pytestmark = [pytest.mark.slow, pytest.mark.gcs]

HERE = ["--direct_running_mode=in_memory"]
PATIENT = RetryPolicy(stall_timeout_s=2.0, first_pause_s=0.02, max_pause_s=0.5)
HASTY = replace(PATIENT, give_up_after_s=0.5)
NUM_SHARDS = 4


@pytest.fixture(scope="module")
def archives():
    """ImageNet as downloaded: 96 training pictures in one tar of tars, 7 for validation, 25 KB
    each.
    """
    noise = np.random.default_rng(0)

    keys = [("train", f"{wnid}_{number}", wnid) for wnid in WNIDS for number in range(24)]
    keys += [
        ("validation", f"ILSVRC2012_val_{number:08d}", wnid)
        for number, wnid in enumerate(TRUTH, start=1)
    ]
    pictures = [
        encode(noise.integers(256, size=(128, 128, 3), dtype=np.uint8), "JPEG") for _ in keys
    ]
    return imagenet.archives(
        [Image(*key, content) for key, content in zip(keys, pictures, strict=True)]
    )


@pytest.fixture(scope="module")
def undisturbed(archives, tmp_path_factory):
    """The files of a build that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    build(config_of(str(imagenet.put(folder / "raw", archives)), str(folder / "out")), HERE)
    return files_of(folder / "out")


@pytest.fixture
def raw(archives, gcs_root):
    """The same archives on `gs://`."""
    storage = open_storage(f"{gcs_root}/raw")
    for name, content in archives.items():
        with storage.writer(name) as out:
            out.write(content)
    return f"{gcs_root}/raw"


@pytest.fixture
def output(gcs_root):
    return f"{gcs_root}/out"


@pytest.fixture
def proxy(gcs_emulator, raw, monkeypatch):
    with FaultyProxy(gcs_emulator) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        yield proxy


def config_of(raw, output):
    return BuildConfig(source="imagenet", input=raw, output=output, num_shards={"": NUM_SHARDS})


def build_with(policy, raw, output):
    """A build whose workers keep to that policy."""
    prepared = builds.prepare(config_of(raw, output), replace(open_storage(output), retry=policy))
    source = replace(prepared.source, input=replace(prepared.source.input, retry=policy))
    return builds.run(
        replace(prepared, source=source), options.beam_options(HERE, prepared.files.output)
    )


def name_of(seen):
    """The object that a request is about; an upload names its own only in its body."""
    return unquote(seen.path.partition("?")[0].rpartition("/")[2])


def commits(name):
    """Whether a request commits the object that is called so in the output."""
    return lambda seen: is_upload(seen) and f'/out/{name}"'.encode() in seen.start


# Storage that stays broken


def from_then_on(fault, when):
    """A script that breaks the first request that `when` picks, and every request after it."""
    broken = False

    def script(seen):
        nonlocal broken
        broken = broken or when(seen)
        return fault if broken else None

    return script


def test_an_outage_fails_the_build_loudly_and_a_rerun_completes_it(proxy, raw, output, undisturbed):
    proxy.script = from_then_on(Fault("cut_upload", at=1000), commits("train/train-000002.tar"))
    with pytest.raises(StorageError, match=r"gave up after \d+ tries"):
        build_with(HASTY, raw, output)
    proxy.script = lambda seen: None
    with pytest.raises(ManifestError):
        manifests.load(output)
    recorded = sum(1 for _ in open_storage(output).list(paths.RECORDS))
    counters = build_with(PATIENT, raw, output)
    assert counters.get("shards_skipped", 0) == recorded
    assert files_of(output) == undisturbed


def is_planned(seen):
    """Whether a request belongs to the writing of shards: their plan is read then, not before."""
    return is_media(seen) and "/out/plan/shards/" in name_of(seen)


def num_bytes_read(seen):
    """How many bytes a request for a part of an object asks for."""
    start, last = re.fullmatch(r"bytes=(\d+)-(\d+)", seen.headers["range"]).groups()
    return int(last) + 1 - int(start)


def test_shards_are_written_from_their_own_bytes_and_their_references_each_read_once(
    proxy, raw, output
):
    # a read that is late is asked for again
    build_with(replace(PATIENT, stall_timeout_s=60.0), raw, output)
    start = next(seen.number for seen in proxy.seen if is_planned(seen))
    reads = [
        seen for seen in proxy.seen[start:] if is_media(seen) and "/plan/done/" not in name_of(seen)
    ]
    references = [name_of(seen) for seen in reads if "/plan/shards/" in name_of(seen)]
    manifest = manifests.load(output)[0]
    assert (
        len(references)
        == len(set(references))
        == sum(split.num_shards for split in manifest.splits.values())
    )
    fetched = sum(num_bytes_read(seen) for seen in reads if "/plan/" not in name_of(seen))
    samples = [samples_of(output, manifest, split).values() for split in manifest.splits]
    assert fetched == sum(len(fields["jpg"]) for split in samples for fields in split)
    # Of so few references most is what an Arrow file takes without any: about 6,000 bytes.
    of_references = sum(found.num_bytes for found in open_storage(output).list("plan/shards/"))
    assert of_references < 7000 * len(references) + 100 * sum(
        split.num_samples for split in manifest.splits.values()
    )


# Answers that are none


@pytest.fixture
def without_waiting(monkeypatch):
    """Retries of every storage cost no time, and lists have pages of seven."""
    clock = Clock()
    for name, value in {"clock": clock, "sleep": clock.sleep}.items():
        monkeypatch.setitem(RetryPolicy.__init__.__kwdefaults__, name, value)
    monkeypatch.setattr(gcs, "PAGE_SIZE", 7)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_class_folders(tmp_path_factory.mktemp("pictures"), ["cat", "dog"], 12)


@pytest.fixture(scope="module")
def set_of_pictures(pictures, tmp_path_factory):
    """The tars and indexes of a build that nothing disturbed."""
    folder = tmp_path_factory.mktemp("set-of-pictures")
    assert main(words(pictures, folder / "out")) == 0
    return shard_files(folder / "out")


@pytest.fixture
def uploaded(pictures, gcs_root):
    """The same pictures on `gs://`."""
    storage = open_storage(f"{gcs_root}/pictures")
    for path in pictures.rglob("*.png"):
        with storage.writer(str(path.relative_to(pictures))) as out:
            out.write(path.read_bytes())
    return storage.url


@pytest.fixture
def in_front(gcs_emulator, uploaded, monkeypatch, without_waiting):
    with FaultyProxy(gcs_emulator) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        yield proxy


def words(raw, output):
    return [
        *f"build --source folder --input {raw} --output {output}".split(),
        "--num-shards",
        "2",
        "--no-report",
        *HERE,
    ]


def shard_files(output):
    storage = open_storage(str(output))
    return {
        name: data for name, data in files_of(storage.url).items() if naming.is_shard_file(name)
    }


def is_listing_of_input(seen):
    return (
        seen.method == "GET"
        and seen.path.partition("?")[0].endswith("/o")
        and "pictures" in seen.path
    )


def test_no_image_is_lost_by_a_page_of_the_input_that_is_none(
    in_front, uploaded, output, set_of_pictures, capsys
):
    # tests/shardset/storage/test_gcs_answers.py has all answers that are none, to every request.
    answer = Fault("answer", status=200, put=b"<html>please log in</html>")
    in_front.script = in_turn(None, *[answer] * 1000, when=is_listing_of_input)
    assert main(words(uploaded, output)) == 1
    assert re.search(
        r"TransientError: gs://bucket/\S+pictures.* gave up after \d+ tries",
        capsys.readouterr().err,
    )
    in_front.script = in_turn(None, answer, when=is_listing_of_input)
    assert main(words(uploaded, output)) == 0
    assert shard_files(output) == set_of_pictures
