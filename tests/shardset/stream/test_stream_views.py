"""A view where a set is taken: streams, single samples, mixtures, and what is read for it."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import shardset
from shardset.decode.crops import CenterCrop, PadCrop
from shardset.decode.image import ImageSpec
from shardset.errors import ConfigError
from shardset.format.manifest import LoadedSet
from shardset.stream.mixed_stream import MixedStream, Share
from tests.makers.reading import RecordingStorage, all_same, stream_of, together
from tests.makers.shardset import pixels
from tests.makers.views import NUM_TRAIN, put_view, small_set

WHOLE = ImageSpec(size=16, crop=CenterCrop(16))
KEPT = [0, 1, 5, 6, 7, 20, 21, 22, 38, 39, 55]
LABELS = [9, *(id_ % 10 for id_ in KEPT[1:-1]), 8]


@pytest.fixture(scope="module", params=["disk", "memory"])
def view(request, tmp_path_factory):
    """The addresses of a set and of a view of it with labels and weights, and the set."""
    url, loaded = small_set(
        str(tmp_path_factory.mktemp("views")) if request.param == "disk" else None
    )
    return url, put_view(url, loaded, id=KEPT, label=LABELS, weight=[0.5] * len(KEPT)), loaded


make = partial(stream_of, global_batch_size=4, image=WHOLE)


@pytest.mark.parametrize("image", [WHOLE, ImageSpec(size=16, crop=PadCrop(2), flip="device")])
def test_a_stream_of_a_view_has_its_samples_labels_and_weights(view, image):
    _, url, _ = view
    with make(url, image=image, with_key=True) as stream:
        for epoch in (0, 1):  # the second one may come from the memory cache
            found = together(list(stream.epoch(epoch)))
            real = found["weight"] > 0
            assert sorted(found["id"][real].tolist()) == KEPT
            assert found["weight"].tolist() == [0.5 if one else 0 for one in real]
            expected = dict(zip(KEPT, LABELS, strict=True))
            assert found["label"].tolist() == [expected[id_] for id_ in found["id"].tolist()]
            assert found["key"].tolist() == [f"train-{id_:06d}" for id_ in found["id"]]
            if image is WHOLE:
                assert all(np.array_equal(*pair) for pair in zip(
                    found["image"], [pixels(id_, 16, 16) for id_ in found["id"]], strict=True
                ))  # fmt: skip


def test_a_view_of_all_samples_has_the_batches_of_its_set(view):
    url, _, loaded = view
    of_all = put_view(url, loaded, id=list(range(NUM_TRAIN)))
    assert all_same(make(of_all).epoch(2), make(url).epoch(2))


def test_a_run_resumes_on_its_view_only(view):
    url, address, loaded = view
    stream, expected = make(address), [batch["id"].tolist() for batch in make(address)]
    for _ in zip(range(2), stream, strict=False):
        pass
    state = stream.state_dict()
    resumed = make(address)
    resumed.load_state_dict(state)
    assert [batch["id"].tolist() for batch in resumed] == expected[2:]
    for other, words in (
        (url, "view is '' here"),
        (put_view(url, loaded, id=KEPT), "view is '"),
    ):
        with pytest.raises(ConfigError, match=words):
            make(other).load_state_dict(state)
    assert f"view={state['view'][:12]}" in stream.fingerprint


def test_single_samples_of_a_view_are_counted_in_it(view):
    _, url, _ = view
    with shardset.open(url, "train") as samples:
        assert len(samples) == len(KEPT)
        assert [samples[number].id for number in (0, 2, -1)] == [0, 5, 55]
        assert (samples[0].label, samples[1].label, samples[-1].label) == (9, 1, 8)
        assert samples["train-000020"].id == 20
        assert "train-000004" not in samples
        with pytest.raises(KeyError, match="no sample of split 'train' has the key"):
            samples["train-000004"]
        with pytest.raises(IndexError):
            samples[len(KEPT)]
    with shardset.open(url, "test") as samples:
        assert len(samples) == 20


def test_a_mixture_takes_views_and_resumes(view):
    url, address, _ = view
    shares = [Share(address, "train", 1), Share(url, "test", 1)]
    world: dict = {"global_batch_size": 4, "rank": 0, "world_size": 1}
    mixed, again = (
        MixedStream(shares, seed=3, image=None, with_key=True, **world) for _ in range(2)
    )
    batches = mixed.batches()
    first = [next(batches)[1]["key"] for _ in range(4)]
    batches.close()
    assert {key for batch in first for key in batch[:2]} <= {f"train-{id_:06d}" for id_ in KEPT}
    assert next(again.batches(again.load_state(mixed.state(3))))[1]["key"] == first[3]


@pytest.mark.parametrize(
    ("every", "bytes_limit", "reads_limit"), [(1, 1, 1), (10, 1.3, 1.1), (2, 1.3, None)]
)
def test_a_view_reads_little_but_its_own_bytes(every, bytes_limit, reads_limit):
    # Every n-th sample is left out: 0, 10 and 50 %.
    url, loaded = small_set()
    kept = [id_ for id_ in range(NUM_TRAIN) if every == 1 or id_ % every]

    def reads_of(address):
        opened = shardset.load(address)
        storage: Any = RecordingStorage(opened.storage)
        with make(
            LoadedSet(opened.manifest, storage, opened.view), image=None, num_threads=1
        ) as stream:
            list(stream.epoch(0))
        tars = [read for read in storage.reads if read[0].endswith(".tar")]
        return len(tars), sum(stop - start for _, start, stop, _ in tars)

    (reads, num_bytes), (all_reads, all_bytes) = (
        reads_of(put_view(url, loaded, id=kept)),
        reads_of(url),
    )
    assert num_bytes <= bytes_limit * all_bytes * len(kept) / NUM_TRAIN * 1.05
    assert reads_limit is None or reads <= reads_limit * all_reads


@pytest.mark.gcs
def test_a_view_in_a_bucket_is_written_opened_and_streamed(gcs_root):
    url, loaded = small_set(gcs_root)
    address = put_view(url, loaded, id=KEPT, label=LABELS)
    assert {*together(list(make(address).epoch(0)))["id"].tolist()} == {*KEPT}
    assert shardset.load(address).view.head.parent == "set"
