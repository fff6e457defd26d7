"""Small images decoded by other processes: the same batches, the same errors, and no process that
outlives its run.
"""

import gc
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from shardset.decode.crops import CenterCrop, PadCrop, RandomResizedCrop
from shardset.decode.image import ImageSpec, decode
from shardset.decode.workers import SharedImages, WorkerPool
from shardset.errors import DecoderLost, UndecodableImage
from shardset.format.images import stored_png
from shardset.format.manifest import load
from shardset.stream import source
from shardset.stream.stream import Stream
from tests.conftest import REPOSITORY
from tests.makers.reading import all_same
from tests.makers.shardset import encode, image_sample, new_set, pixels
from tests.makers.views import put_view

PADDED = ImageSpec(size=8, crop=PadCrop(1), flip="device")
SPECS = {
    "padded, decoded once": PADDED,
    "resized": ImageSpec(size=8, crop=RandomResizedCrop()),
    "centred": ImageSpec(size=8, crop=CenterCrop(8)),
}
BROKEN, LARGER, NUM_SAMPLES = 11, 12, 4000


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """As many small PNGs as processes are started for; one is none,
    one is larger than the others.
    """
    return write(
        tmp_path_factory.mktemp("set"),
        [encode(pixels(serial, 8, 8), "png") for serial in range(100)],
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The same pictures, not compressed, so that nobody has to decode them."""
    contents = stored_png.stored(np.stack([pixels(serial, 8, 8) for serial in range(100)]))
    return write(tmp_path_factory.mktemp("stored"), contents)


def write(folder, contents):
    images = [contents[serial % 100] for serial in range(NUM_SAMPLES)]
    images[BROKEN], images[LARGER] = b"no image", encode(pixels(0, 9, 9), "png")
    samples = [
        image_sample("train", serial, image, "png", 10) for serial, image in enumerate(images)
    ]
    new_set(samples, folder, num_shards=4)
    return str(folder)


def make(url, **options):
    choices = {"batch_size": 64, "seed": 3, "image": PADDED, "num_threads": 2}
    with mock.patch.object(source, "MIN_DECODED", NUM_SAMPLES):
        return Stream(url, "train", **{**choices, "bad_samples": "mask", **options})


def without(url, *left_out):
    """A view of a set without some samples."""
    kept = [id_ for id_ in range(NUM_SAMPLES) if id_ not in left_out]
    return put_view(url, load(url), head={"parent": url}, id=kept)


def from_second(stream, epoch=0):
    """The batches of an epoch but the first one; other processes decode all of them but a few."""
    batches = stream.epoch(epoch)
    next(batches)
    while stream.aids.workers is not None and not are_ready(stream.aids.workers):
        time.sleep(0.01)
    return batches


def are_ready(decoders):
    """Whether all of them are."""
    with decoders.idle() as one, decoders.idle() as other:
        return one is not None and other is not None


def children(pid):
    """Its processes, also those that a thread started that has ended, which /proc/PID/task may
    leave out.
    """
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {
        child for child in pids if (status := state_and_parent(child)) and int(status[1]) == pid
    }


def wait_for_the_end_of(started):
    """Returns when a stream that nobody holds has ended its processes; its last thread may take a
    while to let go.
    """
    end = time.monotonic() + 300
    while left := children(os.getpid()) & started:
        assert time.monotonic() < end, left
        gc.collect()
        time.sleep(0.05)


def is_running(pid):
    status = state_and_parent(pid)
    return status is not None and status[0] != "Z"


def state_and_parent(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None


@pytest.mark.parametrize("name", ["padded, decoded once", "resized"])
def test_processes_give_the_batches_that_one_thread_gives(shards, name):
    alone, many = make(shards, image=SPECS[name], num_threads=1), make(shards, image=SPECS[name])
    assert alone.aids.workers is None
    assert many.aids.workers is not None
    assert all_same(from_second(alone), from_second(many))
    if SPECS[name] is PADDED:  # what they decoded is kept for later epochs
        assert many.aids.cache.filled.sum() == NUM_SAMPLES - 2
        assert all_same(alone.epoch(1), many.epoch(1))


@pytest.mark.parametrize(("name", "num_threads"), zip(SPECS, (1, 2, 2), strict=True))
def test_pictures_that_are_stored_as_they_are_give_the_same_batches(
    shards, stored, name, num_threads
):
    found = make(stored, image=SPECS[name], num_threads=num_threads)
    decoded = make(shards, image=SPECS[name], num_threads=1)
    assert all_same(found.epoch(0), decoded.epoch(0))
    assert (found.aids.cache is None) == (decoded.aids.cache is None)
    assert found.aids.cache is None or np.array_equal(
        found.aids.cache.images_NHWC, decoded.aids.cache.images_NHWC
    )


def test_no_process_is_started_where_none_has_to_decode(stored):
    stream, before = make(without(stored, BROKEN, LARGER)), children(os.getpid())
    assert stream.aids.workers is not None
    assert len(list(stream.epoch(0))) == len(stream)
    assert not children(os.getpid()) - before


@pytest.mark.parametrize(
    ("url", "start"), [("shards", from_second), ("stored", lambda stream: stream.epoch(0))]
)
def test_fields_and_keys_go_along(url, start, request):
    batch = next(start(make(request.getfixturevalue(url), fields=("cls",), with_key=True)))
    assert batch["cls"] == [str(label).encode() for label in batch["label"]]
    assert batch["key"] == [f"train-{id_:06d}" for id_ in batch["id"]]


def test_an_image_that_they_can_not_decode_is_named_with_its_reason(shards):
    said = rf"sample 'train-{BROKEN:06d}' at byte \d+: text instead of an image"
    with pytest.raises(UndecodableImage, match=said):
        list(from_second(make(shards, bad_samples="raise")))


def test_a_part_that_is_damaged_as_a_whole_is_masked_without_them(shards, tmp_path):
    copy, options = shutil.copytree(shards, tmp_path / "copy"), {"batch_size": 2}
    whole = make(shards, **options)
    address = whole.source.addresses(whole.order.batch(0, 30).ids)[0]
    path = copy / whole.split.shards[address.shard].path
    content = bytearray(path.read_bytes())
    content[address.start] ^= 1
    path.write_bytes(content)
    batches = itertools.islice(from_second(make(str(copy), **options)), 40)
    assert [batch["weight"].tolist() for batch in batches][29] == [0, 1]


def test_a_process_that_is_killed_is_named_and_another_takes_its_place_in_the_next_epoch(shards):
    before = children(os.getpid())
    stream = make(without(shards, BROKEN), image=SPECS["resized"])
    batches = from_second(stream)
    victim = (children(os.getpid()) - before).pop()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(DecoderLost, match=rf"process {victim}, .* by SIGKILL .*num_threads=1"):
        list(batches)
    assert sum(batch["id"].size for batch in from_second(stream, 1)) >= NUM_SAMPLES - 64
    started = children(os.getpid()) - before
    assert len(started - {victim}) == 2
    del stream, batches
    wait_for_the_end_of(started)


def test_a_process_goes_on_when_it_is_told_to_stop_with_its_group(shards):
    before = children(os.getpid())
    batches = from_second(make(shards))
    for child in children(os.getpid()) - before:
        os.kill(child, signal.SIGTERM)
    assert sum(batch["id"].size for batch in batches) >= NUM_SAMPLES - 64


def test_processes_start_once_for_all_epochs_and_end_with_the_stream(shards):
    stream, before = make(shards), children(os.getpid())
    next(from_second(stream))
    started = children(os.getpid()) - before
    next(stream.epoch(1))
    assert len(started) == 2
    assert children(os.getpid()) - before == started
    del stream
    wait_for_the_end_of(started)


@pytest.mark.parametrize("moves", [False, True], ids=["stays", "moves"])
def test_processes_import_what_the_stream_did_whatever_the_working_folder_holds(
    shards, tmp_path, moves
):
    (tmp_path / "trainer.py").write_text("raise SystemExit('the trainer of another project')")
    program = tmp_path / "programs" / "run.py"
    program.parent.mkdir()
    program.write_text(
        "import os, sys\n"
        "from tests.shardset.decode.test_workers import from_second, make\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "print(sum(batch['id'].size for batch in from_second(make(sys.argv[1]))))\n"
    )
    how, start = (["-c", program.read_text()], REPOSITORY) if moves else ([str(program)], tmp_path)
    environment = os.environ | {"PYTHONPATH": "" if moves else str(REPOSITORY)}
    found = subprocess.check_output([sys.executable, *how, shards], cwd=start, env=environment)
    assert int(found) == 64 * (-(-NUM_SAMPLES // 64) - 1)


def ready(decoders):
    """One of them, as soon as one has loaded its libraries."""
    while True:
        with decoders.idle() as decoder:
            if decoder is not None:
                return decoder
        time.sleep(0.01)


def test_a_copy_starts_its_own_with_images_of_its_own(shards):
    stream = make(shards)
    assert all(batch["id"].size for batch in from_second(stream))
    copy = pickle.loads(pickle.dumps(stream))
    assert not copy.aids.cache.images_NHWC.any()
    assert all_same(itertools.islice(stream.epoch(1), 1, None), from_second(copy, 1))


def test_a_copy_that_is_forked_while_others_ask_for_a_process_starts_its_own(shards):
    stream = make(shards)
    batches = stream.epoch(0)
    next(batches)
    child = multiprocessing.get_context("fork").Process(target=from_second, args=[stream])
    with stream.aids.workers.start()[0].lock:
        child.start()
    child.join(600)
    code = child.exitcode
    child.kill()
    assert code == 0


def test_whole_images_of_any_kind_are_put_where_they_belong():
    shared = SharedImages(5, 8)
    decoders = WorkerPool(PADDED, 1, 4, shared)
    decoder = ready(decoders)
    contents = [
        encode(pixels(1, 8, 8), "png"),
        b"no image",
        encode(pixels(2, 9, 8), "png"),
        encode(pixels(3, 8, 8), "jpeg"),
    ]
    done = decoder.decode(contents, np.zeros((4, 3)), np.array([4, 0, 1, 2]))
    assert done.tolist() == [True, False, False, True]
    assert np.array_equal(shared.images_NHWC[4], pixels(1, 8, 8))
    assert np.array_equal(shared.images_NHWC[2], decode(contents[3]))
    assert not shared.images_NHWC[[0, 1, 3]].any()


def test_no_process_outlives_the_one_that_it_works_for(shards):
    program = (
        "import sys\n"
        "from tests.shardset.decode.test_workers import from_second, make\n"
        "for number, batch in enumerate(from_second(make(sys.argv[1]))):\n"
        "    print(number, flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program, shards], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert run.stdin
    assert run.stdout
    with run.stdin, run.stdout:
        run.stdout.readline()
        started = children(run.pid)
        assert len(started) == 2
        run.kill()
        run.wait()
    while any(map(is_running, started)):
        time.sleep(0.01)
