"""Compares the stream with other readers on identical images, and with the limits of all of them.

    python -m benchmarks.stream
    python -m benchmarks.stream --kind png --only "shardset, bytes only" \\
        --only "webdataset, bytes only"
    python -m benchmarks.stream --kind abc
    python -m benchmarks.stream --write docs/dev/benchmarks/stream.md
    python -m benchmarks.stream --against CHECKOUT [--kind jpeg|png] [--samples N] [--rounds N]

Makes the images from a seed (110 KB JPEGs, or 2 KB PNGs of 32 x 32) in every reader's form, runs
every contestant in a separate process, one after the other, and appends what it measured to the
results; medians go to the page. `abc` compares local files, local shards and far shards, by a loop
that does nothing and by one with a device. With --against it only compares an epoch of the stream
of this checkout with one of another, whole processes, in turns.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np
from sklearn.datasets import load_sample_images

import shardset.storage.gcs  # noqa: F401 - no import is measured
from benchmarks import environment, reading, stream_page
from benchmarks.far import relay
from benchmarks.measuring import compare, cpu_s, family, of_checkout, parser_of, proportional_bytes
from benchmarks.reading import BATCH, WORKERS, Contestant, Data
from pipelines.images.restart_markers import add_restart_markers
from shardset.decode.crops import PadCrop, RandomResizedCrop
from shardset.decode.image import ImageSpec, decode, decode_into, draws
from shardset.format.images import stored_png
from shardset.format.tar import StoredSample
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from tests.conftest import BUCKET, REPOSITORY, emulator
from tests.makers.shardset import encode, image_sample, write_shard_set

NUM_CLASSES, NUM_SHARDS = 10, 8
NUM_SAMPLES = {"jpeg": 2048, "png": 51200, "abc": 8192}
LATENCY_S, BYTES_PER_S = 0.05, 200e6
RESULTS = REPOSITORY / ".tools" / "stream.jsonl"
PEERS = [
    *(
        f"{name}, {how}"
        for name in ("webdataset", "MosaicML Streaming", "LitData", "Grain on files", "ImageFolder")
        for how in ("as documented", "tuned")
    ),
    "webdataset, bytes only",
]


# --- the images -----------------------------------------------------------------------------------


def make_data(kind: str, folder: Path, num_samples: int, *, for_all: bool = True) -> Data:
    """Writes the images as files and shards, `for_all` in every form, unless an earlier call did;
    from a seed.
    """
    data = Data(folder=str(folder), kind=kind, num_samples=num_samples)
    if not (folder / "made").exists():
        samples = write_files(data)
        write_shard_set(
            open_storage(str(folder / "shards")), {"train": samples}, num_shards=NUM_SHARDS
        )
        if for_all:
            rewritten = [_rewritten(sample, kind) for sample in samples]
            write_shard_set(
                open_storage(str(folder / "rewritten")), {"train": rewritten}, num_shards=NUM_SHARDS
            )
            words = [environment.peers_python(), "-m", "benchmarks.peers_read", "convert"]
            words.append(json.dumps(asdict(data)))
            subprocess.run(words, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        (folder / "made").write_text("")
    return data


def write_files(data: Data) -> list[StoredSample]:
    """Writes the images into class folders, and returns them."""
    samples = list(samples_of(data))
    for sample in samples:
        path = Path(data.folder, "files", f"{sample.label:02d}", f"{sample.key}.{data.field}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.fields[0][1])
    return samples


def samples_of(data: Data) -> Iterator[StoredSample]:
    """The images, each with its label."""
    draw, photos = np.random.default_rng(0), load_sample_images().images
    make = _photo if data.kind == "jpeg" else _thumbnail
    for number in range(data.num_samples):
        yield image_sample("train", number, make(photos[number % 2], draw), data.field, NUM_CLASSES)


def _rewritten(sample: StoredSample, kind: str) -> StoredSample:
    (name, found), *others = sample.fields
    content = bytes(found)
    content = (
        add_restart_markers(content)
        if kind == "jpeg"
        else stored_png.stored(decode(content)[None])[0]
    )
    return msgspec.structs.replace(sample, fields=((name, content), *others))


def _photo(photo: np.ndarray, draw: np.random.Generator) -> bytes:
    noisy = _window(photo, 375, 500, draw) + draw.integers(-10, 11, (375, 500, 3))
    return encode(np.clip(noisy, 0, 255).astype(np.uint8), "jpeg", quality=95)


def _thumbnail(photo: np.ndarray, draw: np.random.Generator) -> bytes:
    window = _window(photo, 100, 100, draw)
    return encode(cv2.resize(window, (32, 32), interpolation=cv2.INTER_AREA), "png")


def _window(photo: np.ndarray, height: int, width: int, draw: np.random.Generator) -> np.ndarray:
    top, left = draw.integers(0, np.subtract(photo.shape[:2], (height, width))).tolist()
    return photo[top : top + height, left : left + width]


# --- our side and the limits ----------------------------------------------------------------------


def spec_of(data: Data) -> ImageSpec:
    """How training images are cropped and resized."""
    crop = RandomResizedCrop() if data.kind == "jpeg" else PadCrop(4)
    return ImageSpec(size=data.size, crop=crop, flip="device")


def stream_of(url: str, data: Data, **options) -> Stream:
    """The stream as the documentation shows it."""
    options = {"image": spec_of(data)} | options
    return Stream(url, "train", batch_size=BATCH, seed=1, **options)


def ours(data: Data) -> Iterator[int]:
    """The first epoch of a new stream."""
    return _epochs(stream_of(f"{data.folder}/shards", data), 0, 1)


def ours_resumed(data: Data) -> Iterator[int]:
    """The second half of the first epoch."""
    stream = stream_of(f"{data.folder}/shards", data)
    return (len(batch["id"]) for batch in stream.epoch(0, len(stream) // 2))


def ours_decoded(data: Data) -> Iterator[int]:
    """The epochs after the first one, from the images that the stream keeps decoded."""
    stream = stream_of(f"{data.folder}/shards", data)
    for _ in stream.epoch(0):
        pass
    yield 0
    yield from _epochs(stream, 1, data.passes)


def ours_rewritten(data: Data) -> Iterator[int]:
    """The same with JPEGs as --jpeg-restart writes them, or PNGs as the build makes them from
    arrays.
    """
    return _epochs(stream_of(f"{data.folder}/rewritten", data), 0, 1)


def ours_remote(data: Data) -> Iterator[int]:
    """From the emulator, through a relay that adds latency and limits each connection.

    With 16 lanes its reads are as long as in a set of a million samples; 256 would cut this small
    set into crumbs.
    """
    return _epochs(stream_of(f"gs://{BUCKET}/shards", data, num_lanes=16), 0, 1)


def ours_bytes(data: Data) -> Iterator[int]:
    """Checked bytes, not decoded, shuffled."""
    stream = stream_of(f"{data.folder}/shards", data, **bytes_of(data))
    return _epochs(stream, 0, data.passes)


def ours_bytes_remote(data: Data) -> Iterator[int]:
    """The same from a distant server."""
    stream = stream_of(f"gs://{BUCKET}/shards", data, num_lanes=16, **bytes_of(data))
    return _epochs(stream, 0, data.passes)


def bytes_of(data: Data) -> dict[str, Any]:
    """The options of a stream of encoded images."""
    return {"image": None, "fields": (data.field,)}


def _epochs(stream: Stream, first: int, stop: int) -> Iterator[int]:
    spans = ((epoch, range(len(stream))) for epoch in range(first, stop))
    return (len(batch["id"]) for _, _, batch in stream.run(spans))


def decoding_alone(data: Data) -> Iterator[int]:
    """Decoding and cropping bytes that lie in memory, with two threads: these decoders can't be
    faster.
    """
    files = [path.read_bytes() for path in sorted(Path(data.folder, "files").glob("*/*"))]
    spec, rows = spec_of(data), np.arange(len(files))
    drawn = draws(spec, 1, 0, rows, rows * 0)

    def part(begin: int) -> int:
        out = np.empty((spec.size, spec.size, 3), np.uint8)
        for number in range(begin, min(len(files), begin + 32)):
            decode_into(out, files[number], spec, drawn[number])
        return min(len(files), begin + 32) - begin

    with ThreadPoolExecutor(WORKERS, initializer=lambda: cv2.setNumThreads(1)) as pool:
        yield from pool.map(part, range(0, len(files), 32))


def reading_batches(data: Data) -> Iterator[int]:
    """Every shard front to back, into new memory for each batch, which is dropped when the next one
    comes.
    """
    shards = sorted(Path(data.folder, "shards", "train").glob("*.tar"))
    mean, num_bytes = sum(path.stat().st_size for path in shards) / data.num_samples, 0
    for path in data.passes * shards:
        with path.open("rb", buffering=0) as file:
            while batch := file.read(int(BATCH * mean)):
                before, num_bytes = num_bytes, num_bytes + len(batch)
                yield int(num_bytes / mean) - int(before / mean)


OURS: dict[str, Contestant] = {
    "shardset, --jpeg-restart": ours_rewritten,
    "shardset, PNGs not compressed": ours_rewritten,
    "shardset": ours,
    "shardset, resumed in the middle": ours_resumed,
    "shardset, later epochs": ours_decoded,
    "shardset, from gs:// (50 ms, 200 MB/s)": ours_remote,
    "decoding alone, both cores": decoding_alone,
    "shardset, bytes only": ours_bytes,
    "shardset, bytes only, from gs:// (50 ms, 200 MB/s)": ours_bytes_remote,
    "reading alone, kept for a batch": reading_batches,
}
KINDS = {
    "jpeg": [name for name in OURS if not name.endswith(("later epochs", "not compressed"))],
    "png": [name for name in OURS if not name.endswith("--jpeg-restart")],
}
ABC = {"A": "ImageFolder, tuned", "B": "shardset", "C": "shardset, from gs:// (50 ms, 200 MB/s)"}
"""Local files, local shards, far shards."""
BUSY_DEVICE = 0.5
"""The rate of the device of `abc`, in rates of B alone."""
SLOW = "as documented"
"""Readers that take most of the time and decide nothing: they run in the first round only."""


# --- running them ---------------------------------------------------------------------------------


def run(name: str, data: Data, host: str, device_s: float = 0.0) -> dict[str, Any]:
    """One contestant in a separate process; `peak_bytes` counts its workers, memory that is
    shared once.

    `servers_s` is the processor time for 1,000 samples of all other processes that this one has
    started.
    """
    mine = [sys.executable, "-m", "benchmarks.stream", "--one"]
    words = mine if name in OURS else [environment.peers_python(), "-m", "benchmarks.peers_read"]
    words = [*words, name, json.dumps(asdict(data)), str(device_s)]
    environ = {**os.environ, "STORAGE_EMULATOR_HOST": host, "PYTHONWARNINGS": "ignore"}
    before = _servers_cpu_s()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=log, env=environ, cwd=REPOSITORY, text=True
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, sum(map(proportional_bytes, family(process.pid))))
            time.sleep(0.1)
        printed = process.stdout.read() if process.stdout else ""
        if process.returncode:
            log.seek(0)
            raise RuntimeError(
                f"{name}: code {process.returncode}\n{log.read().decode(errors='replace')[-3000:]}"
            )
    found = json.loads(printed.splitlines()[-1])
    servers = 1000 * (_servers_cpu_s() - before) / found["num_samples"]
    return {**found, "peak_bytes": peak, "servers_s": servers}


def _servers_cpu_s() -> float:
    return sum(cpu_s(pid) for pid in family(os.getpid()) if pid != os.getpid())


@contextmanager
def far_bucket(data: Data) -> Iterator[str]:
    """The address of an emulator that holds the shards, behind a slow network."""
    with tempfile.TemporaryDirectory() as folder, emulator(Path(folder, "log")) as url:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        source, target = (
            open_storage(f"{data.folder}/shards"),
            open_storage(f"gs://{BUCKET}/shards"),
        )
        for found in source.list():
            with target.writer(found.name) as out:
                out.write(source.read(found.name))
        with relay(
            url.removeprefix("http://"), delay_s=LATENCY_S, bytes_per_s=BYTES_PER_S
        ) as address:
            yield f"http://{address}"


def measure(data: Data, names: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """A line for each run; the slow ones take part in the first round."""
    with far_bucket(data) as host:
        for number in range(rounds):
            for name in names:
                if number == 0 or SLOW not in name:
                    yield {"kind": data.kind, "name": name, **run(name, data, host)}


def measure_abc(data: Data, rounds: int) -> Iterator[dict[str, Any]]:
    """A line for each run: of A, B and C by a loop that does nothing, then by one with a device.

    A batch takes the device as long as two take B, by the first of its runs.
    """
    device_s = 0.0
    with far_bucket(data) as host:
        for _ in range(rounds):
            for loop in ("free", "device"):
                for letter, name in ABC.items():
                    found = run(name, data, host, device_s if loop == "device" else 0.0)
                    if (letter, device_s) == ("B", 0.0):
                        device_s = BATCH / (BUSY_DEVICE * found["rate_after"])
                    told = {"kind": "abc", "loop": loop, "letter": letter, "name": name}
                    yield {**told, "device_s": device_s, **found}


EPOCH = """
import sys
import shardset
url, size = sys.argv[1:]
crop = {"crop": shardset.PadCrop(4)} if size == "32" else {}
image = shardset.ImageSpec(size=int(size), flip="pixels", **crop)
world = {"global_batch_size": 256, "rank": 0, "world_size": 1}  # also of older checkouts
stream = shardset.Stream(url, "train", seed=1, image=image, **world)
for batch in stream.epoch(0):
    pass
"""
"""A separate program, so that it also runs with checkouts that have other benchmarks."""


def against(other: Path, data: Data, rounds: int, folder: Path) -> None:
    """Compares an epoch by the streams of both checkouts, each of the set that it built of the same
    images.
    """
    write_files(data)
    commands = {}
    for number, (name, checkout) in enumerate(
        {"this checkout": REPOSITORY, str(other): other}.items()
    ):
        url = str(folder / f"set-{number}")
        options = f"--output {url} --num-shards {NUM_SHARDS} --no-report"
        build = f"build --source folder --input {data.folder}/files {options}"
        environ = {**os.environ, **of_checkout(checkout)}
        words = [sys.executable, "-m", "pipelines", *build.split()]
        subprocess.run(words, check=True, env=environ, stdout=subprocess.DEVNULL)
        commands[name] = ([sys.executable, "-c", EPOCH, url, str(data.size)], checkout)
    compare(f"{data.num_samples} {data.kind} images", commands, rounds, folder)


def main() -> None:
    """Measures, or writes the page."""
    if sys.argv[1:2] == ["--one"]:
        reading.main(OURS, sys.argv[2:])
        return
    parser = parser_of(__doc__)
    parser.add_argument("--kind", choices=[*KINDS, "abc"], help="default: jpeg, then png")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where the images are kept (default: a temporary folder)"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="a file of JSON lines that grows"
    )
    parser.add_argument(
        "--only", action="append", choices=[*OURS, *PEERS], metavar="NAME",
        help="only this contestant; may be repeated. One of " + "; ".join([*OURS, *PEERS]),
    )  # fmt: skip
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="write the page from the results and run nothing"
    )
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="only compare with this other checkout"
    )
    options = parser.parse_args()
    if options.against and options.kind == "abc":
        parser.error("--against compares jpeg and png")
    if options.write:
        stream_page.write(options.write, options.results)
        return
    for kind in [options.kind] if options.kind else KINDS:
        num_samples = options.samples or NUM_SAMPLES[kind]
        with tempfile.TemporaryDirectory() as temporary:
            if options.against:
                data = Data(folder=temporary, kind=kind, num_samples=num_samples)
                against(options.against, data, options.rounds, Path(temporary))
                continue
            folder = (options.folder or Path(temporary)) / kind
            folder.mkdir(parents=True, exist_ok=True)
            if kind == "abc":
                data = make_data("jpeg", folder, num_samples, for_all=False)
                lines = measure_abc(data, options.rounds)
            else:
                only = options.only or [*KINDS[kind], *PEERS]
                names = [name for name in [*KINDS[kind], *PEERS] if name in only]
                lines = measure(make_data(kind, folder, num_samples), names, options.rounds)
            with options.results.open("a") as out:
                for line in lines:
                    print(json.dumps(line), file=out, flush=True)
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
