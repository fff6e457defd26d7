"""`plan` against what a real build and a real epoch do, counted request by request at a GCS emulator."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

import pytest

from pipelines.build import build
from pipelines.config import BuildConfig
from pipelines.estimate.inputs import from_listing, from_manifest
from pipelines.estimate.model import Estimate, estimate
from pipelines.estimate.prices import Prices
from pipelines.estimate.reading import Reading
from pipelines.estimate.requests import ReadEstimate
from shardset.decode.crops import CenterCrop
from shardset.decode.image import ImageSpec
from shardset.format import manifest as manifests
from shardset.order.budget import Memory
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from tests.conftest import BUCKET
from tests.faulty_proxy import FaultyProxy, Seen, is_media, is_upload
from tests.makers.images import image_bytes
from tests.makers.shardset import put

pytestmark = pytest.mark.gcs

NUM_IMAGES, BATCH = 150, 16
CLASSES = ("cat", "dog", "eel")
HEDGED = 0.03


@dataclass(frozen=True, kw_only=True)
class Built:
    """A shard set in a bucket, its configuration, what was foreseen, and the requests that building it took."""

    config: BuildConfig
    foreseen: Estimate
    requests: list[Seen]


@pytest.fixture(scope="module")
def proxy(gcs_emulator: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(gcs_emulator) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        yield proxy


@pytest.fixture(scope="module")
def built(proxy: FaultyProxy) -> Built:
    root = f"gs://{BUCKET}/recorded"
    raw = open_storage(f"{root}/raw")
    for number in range(NUM_IMAGES):
        put(raw, f"{CLASSES[number % 3]}/{number:04d}.ppm", picture(number))
    config = BuildConfig(source="folder", input=f"{root}/raw", output=f"{root}/out", num_shards={"": 7})
    foreseen = estimate(from_listing(config), "train", Reading(global_batch_size=BATCH), Prices())
    before = len(proxy.seen)
    build(config, ["--direct_running_mode=in_memory"])
    return Built(config=config, foreseen=foreseen, requests=proxy.seen[before:])


def picture(number: int) -> bytes:
    """About 13 KB."""
    return image_bytes(number, "ppm", height=64, width=64 + number % 8)


def kinds(requests: list[Seen]) -> Counter[str]:
    """Requests by what they ask for: block, index, manifest, look, list, upload."""
    return Counter(map(kind_of, requests))


def kind_of(seen: Seen) -> str:
    if is_upload(seen):
        return "upload"
    if not is_media(seen):
        return "look" if re.search(r"/o/[^?]", seen.path) else "list"
    marks = {".idx.npy": "index", "manifest.json": "manifest"}
    return next((kind for mark, kind in marks.items() if mark in seen.path), "block")


def test_sizes_foreseen_from_a_listing_are_those_that_were_built(built):
    manifest, _ = manifests.load(built.config.output)
    made, split = manifest.split("train"), built.foreseen.stored.splits["train"]
    assert split.shard_sizes == [shard.num_samples for shard in made.shards]
    assert split.num_bytes == sum(shard.num_bytes for shard in made.shards)
    assert list(split.index_bytes) == [shard.index.num_bytes for shard in made.shards]
    assert built.foreseen.stored.manifest_bytes == pytest.approx(len(manifests.to_json(manifest)), rel=0.1)


def test_what_is_foreseen_before_a_build_is_what_its_manifest_says_afterwards(built):
    after = estimate(from_manifest(built.config.output), "train", Reading(global_batch_size=BATCH), Prices())
    assert (after.steps, after.reads, after.memory, after.mixing) == (
        built.foreseen.steps,
        built.foreseen.reads,
        built.foreseen.memory,
        built.foreseen.mixing,
    )


def test_a_build_asks_for_what_was_foreseen(built):
    found, build_requests = kinds(built.requests), built.foreseen.build
    num_deleted = sum(seen.method == "DELETE" for seen in built.requests)
    assert found["upload"] + found["list"] <= build_requests.class_a <= 1.2 * (found["upload"] + found["list"])
    # The emulator answers a deletion with 200 where Google says 204, so a look follows each.
    looks = found.total() - found["upload"] - found["list"] - num_deleted
    assert 2 * NUM_IMAGES < looks <= build_requests.class_b <= 1.2 * looks


def class_folders(root: str) -> tuple[str, str]:
    """ImageNet as folders of 30 classes, which a build lists again, one by one."""
    raw = open_storage(f"{root}/raw")
    for number in range(NUM_IMAGES):
        put(raw, f"train/n{number % 30:08d}/{number:04d}.ppm", picture(number))
    return "imagenet", raw.url


def listing(root: str) -> tuple[str, str]:
    """A table, which does not say how large the images are."""
    raw, names = open_storage(f"{root}/raw"), [f"{number:04d}.ppm" for number in range(NUM_IMAGES)]
    for number, name in enumerate(names):
        put(raw, name, picture(number))
    put(raw, "photos.csv", "".join(["path,label\n", *(f"{name},cat\n" for name in names)]).encode())
    return "listing", f"{raw.url}/photos.csv"


@pytest.mark.slow
@pytest.mark.parametrize("made", [class_folders, listing])
def test_a_build_from_another_source_asks_for_what_was_foreseen(proxy, made):
    root = f"gs://{BUCKET}/recorded-{made.__name__}"
    source, raw = made(root)
    config = BuildConfig(source=source, input=raw, output=f"{root}/out", num_shards={"": 7})
    foreseen = estimate(from_listing(config), "train", Reading(global_batch_size=BATCH), Prices()).build
    before = len(proxy.seen)
    build(config, ["--direct_running_mode=in_memory"])
    found = kinds(proxy.seen[before:])
    writes = found["upload"] + found["list"]
    assert writes <= foreseen.class_a <= 1.2 * writes
    assert foreseen.class_b == pytest.approx(found.total() - writes, rel=0.03)


@pytest.mark.parametrize("num_readers", [1, 2, 4])
def test_an_epoch_takes_what_was_foreseen(built, proxy, num_readers):
    options = {"num_lanes": 8, "block_size": 5, "window": 6}
    reading = Reading(global_batch_size=BATCH, num_replicas=4, num_hosts=num_readers, image_size=16, **options)
    foreseen = estimate(from_manifest(built.config.output), "train", reading, Prices())
    epochs = [epoch_of(built, proxy, rank, num_readers, options) for rank in range(num_readers)]
    assert {epoch.num_steps for epoch in epochs} == {foreseen.steps.num_steps}
    assert foreseen.memory in [epoch.memory for epoch in epochs]
    assert_requests(foreseen.reads, [seen for epoch in epochs for seen in epoch.requests])
    assert sum(epoch.cold_indexes(built) for epoch in epochs) == foreseen.cold.index_bytes
    samples = sum(num_bytes(epoch.cold_samples()) for epoch in epochs)
    assert 0.9 * foreseen.cold.sample_bytes <= samples <= foreseen.cold.sample_bytes


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What one reader did in an epoch: its batches, and its requests in the order of their arrival."""

    num_steps: int
    batch_size: int
    first_shards: int
    memory: Memory
    requests: list[Seen]

    def cold_indexes(self, built: Built) -> int:
        """The bytes of the indexes that the first batch waited for: they come before all others."""
        split = manifests.load(built.config.output)[0].split("train")
        sizes = {shard.index.path: shard.index.num_bytes for shard in split.shards}
        paths = [unquote(seen.path) for seen in self.requests if kind_of(seen) == "index"][: self.first_shards]
        return sum(size for path in paths for name, size in sizes.items() if name in path)

    def cold_samples(self) -> list[Seen]:
        """The requests for the samples of the first batch: one each, and nothing else comes before them."""
        return [seen for seen in self.requests if kind_of(seen) == "block"][: self.batch_size]


def epoch_of(built: Built, proxy: FaultyProxy, rank: int, num_readers: int, options: dict[str, int]) -> Epoch:
    before = len(proxy.seen)
    stream = Stream(
        built.config.output, "train", global_batch_size=BATCH, rank=rank, world_size=num_readers, seed=0,
        image=ImageSpec(size=16, crop=CenterCrop(16)), **options,
    )  # fmt: skip
    first, *rest = stream.epoch(0)
    requests = proxy.seen[before:]
    return Epoch(
        num_steps=1 + len(rest),
        batch_size=stream.batch_size,
        first_shards=len({address.shard for address in stream.addresses(first["id"])}),
        memory=stream.memory,
        requests=requests,
    )


def assert_requests(reads: ReadEstimate, requests: list[Seen]) -> None:
    found = kinds(requests)
    assert reads.amplification == 1
    assert found["manifest"] == reads.manifest_gets
    assert found["look"] == found["list"] == 0
    # With 38 samples a reader some shards are missed; one reader has them all.
    assert 0.7 * reads.index_gets <= found["index"] <= reads.index_gets
    assert reads.num_readers > 1 or found["index"] == reads.index_gets
    # A block whose samples all came alone in the first batch is not read; a few late reads are asked for again.
    most = reads.block_gets + reads.first_batch_gets + reads.pad_gets
    assert 0.9 * reads.block_gets <= found["block"] <= most + HEDGED * most + reads.num_readers
    read = num_bytes([seen for seen in requests if kind_of(seen) == "block"])
    assert 0.9 * reads.num_bytes <= read <= (1 + HEDGED) * reads.num_bytes


def num_bytes(requests: list[Seen]) -> int:
    spans = [re.fullmatch(r"bytes=(\d+)-(\d+)", seen.headers["range"]) for seen in requests]
    return sum(int(span[2]) + 1 - int(span[1]) for span in spans if span)
