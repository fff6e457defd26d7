"""A build on storage that misbehaves makes the bytes of an undisturbed one, or fails loudly; a
rerun completes it.
"""

import re
from dataclasses import replace
from urllib.parse import unquote

import numpy as np
import pytest

from pipelines import build as builds
from pipelines.begin import prepare
from pipelines.build import build
from pipelines.config import BuildConfig
from pipelines.plan import paths
from pipelines.runners import options
from shardset.errors import ManifestError, StorageError
from shardset.format import manifest as manifests
from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy
from tests.faulty_proxy import Fault, FaultyProxy, is_media, is_upload
from tests.makers import imagenet
from tests.makers.built import HERE
from tests.makers.imagenet import TRUTH, WNIDS, Image
from tests.makers.shardset import encode
from tests.makers.stored import contents_of, samples_of

pytestmark = [pytest.mark.slow, pytest.mark.gcs]

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
    return contents_of(folder / "out")


@pytest.fixture
def raw(archives, gcs_root):
    """The same archives on `gs://`."""
    storage = open_storage(f"{gcs_root}/raw")
    for name, content in archives.items():
        storage.write(name, content)
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
    prepared = prepare(config_of(raw, output), replace(open_storage(output), retry=policy))
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
    assert contents_of(output) == undisturbed


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
