"""Compares the stream with other readers on identical images, and with the limits of all of them.

    python -m benchmarks.stream
    python -m benchmarks.stream --kind png --only "shardset, bytes only" --only "webdataset, bytes only"
    python -m benchmarks.stream --kind abc
    python -m benchmarks.stream --write docs/benchmarks/stream.md

Makes the images from a seed (110 KB JPEGs, or 2 KB PNGs of 32 x 32) in every reader's form, runs every contestant in a
process of its own, one after the other, and appends what it measured to the results; medians go to the page and plot.
`abc` compares local files, local shards and far shards, by a loop that does nothing and by one with a device.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO
from xml.sax.saxutils import escape

import cv2
import msgspec
import numpy as np
from sklearn.datasets import load_sample_images

import shardset.storage.gcs  # noqa: F401 - no import is measured
from benchmarks import environment, reading
from benchmarks.far import relay
from benchmarks.reading import BATCH, WORKERS, Contestant, Data
from pipelines.images.jpeg_restart import add_restart_markers
from shardset.decode.crops import PadCrop
from shardset.decode.image import ImageSpec, decode, decode_into, draws
from shardset.format import stored_png
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
    *(f"{name}, {how}" for name in ("webdataset", "MosaicML Streaming", "LitData", "Grain on files", "ImageFolder")
      for how in ("as documented", "tuned")),
    "timm on files", "webdataset, bytes only",
]  # fmt: skip
TITLES = {"jpeg": "JPEGs of 110 KB, random resized crop to 224", "png": "PNGs of 32 x 32, padded random crop"}


# --- the images ------------------------------------------------------------------------------------------------------


def make_data(kind: str, folder: Path, num_samples: int, *, for_all: bool = True) -> Data:
    """Writes the images as files and shards, `for_all` in every form, unless an earlier call did; from a seed."""
    data = Data(folder=str(folder), kind=kind, num_samples=num_samples)
    if not (folder / "made").exists():
        samples = list(samples_of(data))
        write_shard_set(open_storage(str(folder / "shards")), {"train": samples}, num_shards=NUM_SHARDS)
        for sample in samples:
            path = folder / "files" / f"{sample.label:02d}" / f"{sample.key}.{data.field}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(sample.fields[0][1])
        if for_all:
            rewritten = [_rewritten(sample, kind) for sample in samples]
            write_shard_set(open_storage(str(folder / "rewritten")), {"train": rewritten}, num_shards=NUM_SHARDS)
        if for_all:
            _run([environment.peers_python(), "-m", "benchmarks.peers_read", "convert", json.dumps(asdict(data))])
        (folder / "made").write_text("")
    return data


def samples_of(data: Data) -> Iterator[StoredSample]:
    """The images, each with its label."""
    draw, photos = np.random.default_rng(0), load_sample_images().images
    make = _photo if data.kind == "jpeg" else _thumbnail
    for number in range(data.num_samples):
        yield image_sample("train", number, make(photos[number % 2], draw), data.field, NUM_CLASSES)


def _rewritten(sample: StoredSample, kind: str) -> StoredSample:
    (name, content), *others = sample.fields
    content = add_restart_markers(content) if kind == "jpeg" else stored_png.stored(decode(content)[None])[0]
    return msgspec.structs.replace(sample, fields=((name, content), *others))


def _photo(photo: np.ndarray, draw: np.random.Generator) -> bytes:
    top, left = draw.integers(0, photo.shape[0] - 375), draw.integers(0, photo.shape[1] - 500)
    noisy = photo[top : top + 375, left : left + 500] + draw.integers(-10, 11, (375, 500, 3))
    return encode(np.clip(noisy, 0, 255).astype(np.uint8), "jpeg", quality=95)


def _thumbnail(photo: np.ndarray, draw: np.random.Generator) -> bytes:
    top, left = draw.integers(0, photo.shape[0] - 100), draw.integers(0, photo.shape[1] - 100)
    return encode(cv2.resize(photo[top : top + 100, left : left + 100], (32, 32), interpolation=cv2.INTER_AREA), "png")


# --- our side and the limits -----------------------------------------------------------------------------------------


def spec_of(data: Data) -> ImageSpec:
    """How training images are cropped and resized."""
    return ImageSpec(size=224, flip=True) if data.kind == "jpeg" else ImageSpec(size=32, crop=PadCrop(4), flip=True)


def stream_of(url: str, data: Data, **options: Any) -> Stream:
    """The stream as the documentation shows it."""
    choices = {"global_batch_size": BATCH, "rank": 0, "world_size": 1, "seed": 1, "image": spec_of(data)}
    return Stream(url, "train", **choices | options)


def ours(data: Data, start: int) -> Iterator[int]:
    """The first epoch of a new stream."""
    return (len(batch["id"]) for batch in stream_of(f"{data.folder}/shards", data).epoch(0, start))


def ours_decoded(data: Data, start: int) -> Iterator[int]:
    """The epochs after the first one, from the images that the stream keeps decoded."""
    stream = stream_of(f"{data.folder}/shards", data)
    for _ in stream.epoch(0):
        pass
    yield 0
    spans = [(1, range(start, len(stream))), *((epoch, range(len(stream))) for epoch in range(2, data.passes))]
    yield from (len(batch["id"]) for _, _, batch in stream.run(iter(spans)))


def ours_rewritten(data: Data, start: int) -> Iterator[int]:
    """The same with JPEGs as --jpeg-restart writes them, or PNGs as the build makes them from arrays."""
    return (len(batch["id"]) for batch in stream_of(f"{data.folder}/rewritten", data).epoch(0, start))


def ours_remote(data: Data, start: int) -> Iterator[int]:
    """From the emulator, through a relay that adds latency and limits each connection.

    With 16 lanes its reads are as long as in a set of a million samples; 256 would cut this small set into crumbs.
    """
    return (len(batch["id"]) for batch in stream_of(f"gs://{BUCKET}/shards", data, num_lanes=16).epoch(0, start))


def ours_bytes(data: Data, start: int) -> Iterator[int]:
    """Checked bytes, not decoded, shuffled."""
    return _bytes_of_epochs(stream_of(f"{data.folder}/shards", data, image=None, fields=(data.field,)), data, start)


def ours_bytes_remote(data: Data, start: int) -> Iterator[int]:
    """The same from a distant server."""
    stream = stream_of(f"gs://{BUCKET}/shards", data, num_lanes=16, image=None, fields=(data.field,))
    return _bytes_of_epochs(stream, data, start)


def _bytes_of_epochs(stream: Stream, data: Data, start: int) -> Iterator[int]:
    spans = [(0, range(start, len(stream))), *((epoch, range(len(stream))) for epoch in range(1, data.passes))]
    return (len(batch["id"]) for _, _, batch in stream.run(iter(spans)))


def decoding_alone(data: Data, start: int) -> Iterator[int]:
    """Decoding and cropping bytes that lie in memory, with two threads: these decoders can't be faster."""
    files = [path.read_bytes() for path in sorted(Path(data.folder, "files").glob("*/*"))][start * BATCH :]
    spec, rows = spec_of(data), np.arange(len(files))
    drawn = draws(spec, 1, 0, rows, rows * 0)

    def part(begin: int) -> int:
        out = np.empty((spec.size, spec.size, 3), np.uint8)
        for number in range(begin, min(len(files), begin + 32)):
            decode_into(out, files[number], spec, drawn[number])
        return min(len(files), begin + 32) - begin

    with ThreadPoolExecutor(WORKERS, initializer=lambda: cv2.setNumThreads(1)) as pool:
        yield from pool.map(part, range(0, len(files), 32))


def reading_alone(data: Data, start: int) -> Iterator[int]:
    """Reading every shard front to back into one buffer of 1 MiB: no byte outlives the next one."""
    buffer = bytearray(1 << 20)

    def parts(file: BinaryIO) -> Iterator[int]:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            yield count

    return _read(data, start, parts)


def reading_batches(data: Data, start: int) -> Iterator[int]:
    """The same into new memory for each batch, dropped when the next one comes, as any reader of batches must."""
    mean = _bytes_of(data) // data.num_samples

    def parts(file: BinaryIO) -> Iterator[int]:
        while batch := file.read(BATCH * mean):
            yield len(batch)

    return _read(data, start, parts)


def _read(data: Data, start: int, parts: Callable[[BinaryIO], Iterator[int]]) -> Iterator[int]:
    mean, num_bytes = _bytes_of(data) / data.num_samples, 0
    for path in data.passes * _shards_of(data)[start * NUM_SHARDS * BATCH // data.num_samples :]:
        with path.open("rb", buffering=0) as file:
            for count in parts(file):
                before, num_bytes = num_bytes, num_bytes + count
                yield int(num_bytes / mean) - int(before / mean)


def _shards_of(data: Data) -> list[Path]:
    return sorted(Path(data.folder, "shards", "train").glob("*.tar"))


def _bytes_of(data: Data) -> int:
    return sum(path.stat().st_size for path in _shards_of(data))


OURS: dict[str, Contestant] = {
    "shardset, --jpeg-restart": ours_rewritten,
    "shardset, PNGs not compressed": ours_rewritten,
    "shardset": ours,
    "shardset, later epochs": ours_decoded,
    "shardset, from gs:// (50 ms, 200 MB/s)": ours_remote,
    "decoding alone, both cores": decoding_alone,
    "shardset, bytes only": ours_bytes,
    "shardset, bytes only, from gs:// (50 ms, 200 MB/s)": ours_bytes_remote,
    "reading alone": reading_alone,
    "reading alone, kept for a batch": reading_batches,
}
KINDS = {
    "jpeg": [name for name in OURS if name not in ("shardset, later epochs", "shardset, PNGs not compressed")],
    "png": [name for name in OURS if name != "shardset, --jpeg-restart"],
}
ONLY_JPEG = ("timm on files",)
ABC = {"A": "ImageFolder, tuned", "B": "shardset", "C": "shardset, from gs:// (50 ms, 200 MB/s)"}
"""Local files, local shards, far shards."""
BUSY_DEVICE = 0.5
"""The rate of the device of `abc`, in rates of B alone."""
SLOW = ("as documented", "timm")
"""These take most of the time and decide nothing: they run in the first round only."""


# --- running them ----------------------------------------------------------------------------------------------------


def contestants(kind: str) -> list[str]:
    """All contestants, in the order of their turns."""
    return [*KINDS[kind], *(name for name in PEERS if kind == "jpeg" or name not in ONLY_JPEG)]


def run(name: str, data: Data, start: int, host: str, device_s: float = 0.0) -> dict[str, Any]:
    """One contestant in a process of its own; `peak_bytes` counts its workers, memory that is shared once.

    `servers_s` is the processor time for 1,000 samples of all other processes that this one has started.
    """
    module = "stream" if name in OURS else "peers_read"
    python = sys.executable if name in OURS else environment.peers_python()
    mode = ["--one"] if name in OURS else []
    words = [python, "-m", f"benchmarks.{module}", *mode, name, json.dumps(asdict(data)), str(start), str(device_s)]
    environ = {**os.environ, "STORAGE_EMULATOR_HOST": host, "PYTHONWARNINGS": "ignore"}
    before = _servers_cpu_s()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, env=environ, cwd=REPOSITORY, text=True)
        peak = 0
        while process.poll() is None:
            peak = max(peak, sum(map(_proportional_bytes, _family(process.pid))))
            time.sleep(0.1)
        printed = process.stdout.read() if process.stdout else ""
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{name}: code {process.returncode}\n{log.read().decode(errors='replace')[-3000:]}")
    found = json.loads(printed.splitlines()[-1])
    servers = 1000 * (_servers_cpu_s() - before) / found["num_samples"]
    return {**found, "peak_bytes": peak, "servers_s": servers}


def _servers_cpu_s() -> float:
    return sum(_cpu_s(pid) for pid in _family(os.getpid()) if pid != os.getpid())


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> Iterator[int]:
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            yield from _family(int(child))


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


@contextmanager
def far_bucket(data: Data) -> Iterator[str]:
    """The address of an emulator that holds the shards, behind a slow network."""
    with tempfile.TemporaryDirectory() as folder, emulator(Path(folder, "log")) as url:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        source, target = open_storage(f"{data.folder}/shards"), open_storage(f"gs://{BUCKET}/shards")
        for found in source.list():
            with target.writer(found.name) as out:
                out.write(source.read(found.name))
        with relay(url.removeprefix("http://"), delay_s=LATENCY_S, bytes_per_s=BYTES_PER_S) as address:
            yield f"http://{address}"


def measure(data: Data, names: Sequence[str], rounds: int, results: Path, *, resumes: bool) -> None:
    """Appends a line for each run; the slow ones take part in the first round."""
    middle = data.num_samples // BATCH // 2
    with far_bucket(data) as host, results.open("a") as out:
        for number in range(rounds):
            for name in names if number == 0 else [name for name in names if not any(word in name for word in SLOW)]:
                found = {"kind": data.kind, "name": name, **run(name, data, 0, host)}
                if resumes:
                    found["resume_s"] = run(name, data, middle, host)["first_s"]
                out.write(json.dumps(found) + "\n")
                out.flush()
                print(json.dumps(found), flush=True)


def measure_abc(data: Data, rounds: int, results: Path) -> None:
    """Appends a line for each run: of A, B and C by a loop that does nothing, then by one with a device.

    A batch takes the device as long as two take B, by the first of its runs.
    """
    device_s = 0.0
    with far_bucket(data) as host, results.open("a") as out:
        for _ in range(rounds):
            for loop in ("free", "device"):
                for letter, name in ABC.items():
                    found = run(name, data, 0, host, device_s if loop == "device" else 0.0)
                    if (letter, device_s) == ("B", 0.0):
                        device_s = BATCH / (BUSY_DEVICE * found["rate_after"])
                    more = {"device_s": device_s} if loop == "device" else {}
                    line = {"kind": "abc", "loop": loop, "letter": letter, "name": name, **more, **found}
                    out.write(json.dumps(line) + "\n")
                    out.flush()
                    print(json.dumps(line), flush=True)


def _run(words: list[str]) -> None:
    subprocess.run(words, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)


# --- the page --------------------------------------------------------------------------------------------------------

COLUMNS = {
    "samples/s": ("rate", "{:,.0f}"),
    "CPU s per 1,000": ("cpu_s", "{:.3f}"),
    "of servers": ("servers_s", "{:.3f}"),
    "first batch, s": ("first_s", "{:.2f}"),
    "first batch from the middle, s": ("resume_s", "{:.2f}"),
    "peak memory, MiB": ("peak_bytes", "{:,.0f}"),
}


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians by contestant, the one that takes the least processor time first."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(line["name"] for line in lines):
        mine = [line for line in lines if line["name"] == name]
        found[name] = {
            key: median(line[key] for line in mine if key in line)
            for key, _ in COLUMNS.values()
            if any(key in line for line in mine)
        }
        found[name]["peak_bytes"] /= 2**20
        found[name]["runs"] = len(mine)
    return dict(sorted(found.items(), key=lambda pair: pair[1]["cpu_s"]))


def table(found: dict[str, dict[str, float]]) -> str:
    """One row a contestant; a column that nobody measured is left out."""
    columns = {title: pair for title, pair in COLUMNS.items() if any(pair[0] in one for one in found.values())}
    rows = [f"| reader | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, numbers in found.items():
        cells = [shown.format(numbers[key]) if key in numbers else "" for key, shown in columns.values()]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


ABC_COLUMNS = {
    "samples/s": ("rate", "{:,.0f}"),
    "after the first batch": ("rate_after", "{:,.0f}"),
    "first batch, s": ("first_s", "{:.2f}"),
    "waits for input": ("wait", "{:.1%}"),
    "CPU s per 1,000": ("cpu_s", "{:.3f}"),
    "of servers": ("servers_s", "{:.3f}"),
}
ABC_ROWS = {"A": "A, local files (ImageFolder, tuned)", "B": "B, local shards", "C": "C, far shards"}
ABC_LOOPS = {"free": "does nothing", "device": "device"}


def abc_table(lines: Sequence[dict[str, Any]]) -> str:
    """Medians of A, B and C by either loop, the rate of the device, and what B has of A and C of B."""
    rows = [f"| loop | reader | {' | '.join(ABC_COLUMNS)} |", f"|---|---|{'---|' * len(ABC_COLUMNS)}"]
    sentences = []
    for loop, shown in ABC_LOOPS.items():
        mine = [line for line in lines if line["loop"] == loop]
        found = {
            letter: {
                key: median(line[key] for line in mine if line["letter"] == letter) for key, _ in ABC_COLUMNS.values()
            }
            for letter in ABC
        }
        for letter, numbers in found.items():
            cells = [form.format(numbers[key]) for key, form in ABC_COLUMNS.values()]
            rows.append(f"| {shown} | {ABC_ROWS[letter]} | {' | '.join(cells)} |")
        if loop == "device":
            rates = " and ".join(f"{rate:,.0f}" for rate in sorted({BATCH / line["device_s"] for line in mine}))
            shown = f"with a device that takes {rates} samples/s"
        else:
            shown = "with a loop that does nothing"
        ratios = [
            f"{a}/{b} is {found[a]['rate'] / found[b]['rate']:.2f} from the opening on and "
            f"{found[a]['rate_after'] / found[b]['rate_after']:.2f} after the first batch"
            for a, b in (("B", "A"), ("C", "B"))
        ]
        sentences.append(f"- {shown}: {'; '.join(ratios)}.")
    rounds = sum((line["loop"], line["letter"]) == ("free", "C") for line in lines)
    facts = f"{lines[0]['num_samples']:,} samples, medians, rounds: {rounds}."
    return "\n".join([*rows, "", facts, "", *sentences]) + "\n"


def plot(panels: dict[str, dict[str, dict[str, float]]]) -> str:
    """Bars of the samples for a second of one core, a panel a kind, as an SVG."""
    parts, top = [], 10
    for kind, found in panels.items():
        shown = {
            name: 1000 / one["cpu_s"] for name, one in found.items() if "bytes" not in name and "reading" not in name
        }
        title = escape(f"{TITLES[kind]}: samples for a second of one core")
        parts.append(f'<text x="10" y="{top + 14}" font-weight="bold">{title}</text>')
        for number, (name, rate) in enumerate(shown.items(), start=1):
            y, width = top + number * 20, 420 * rate / max(shown.values())
            colour = "#2b6cb0" if name.startswith("shardset") else "#e2e8f0" if "alone" in name else "#a0aec0"
            parts.append(f'<text x="264" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect x="270" y="{y + 3}" width="{width:.1f}" height="14" fill="{colour}"/>')
            parts.append(f'<text x="{275 + width:.1f}" y="{y + 14}">{rate:,.0f}</text>')
        top += 20 * (len(shown) + 2)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="780" height="{top}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def write(path: Path, results: Path) -> None:
    """Replaces the table between the marks of the page, and the plot beside it."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    panels = {kind: summary([line for line in lines if line["kind"] == kind]) for kind in KINDS}
    panels = {kind: found for kind, found in panels.items() if found}
    contents = {kind: table(found) for kind, found in panels.items()}
    if panels:
        path.with_suffix(".svg").write_text(plot(panels))
        contents["facts"] = _facts(panels)
    abc = [line for line in lines if line["kind"] == "abc"]
    if abc:
        when = datetime.now(UTC).date()
        contents["abc"] = f"{when}, {environment.machine()}, commit {environment.commit()}.\n\n{abc_table(abc)}"
    text = path.read_text()
    for name, content in contents.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        text = before + mark + content + "<!-- end -->" + rest.partition("<!-- end -->")[2]
    path.write_text(text)


def _facts(panels: dict[str, dict[str, dict[str, float]]]) -> str:
    versions = environment.versions(
        environment.peers_python(), ["webdataset", "mosaicml-streaming", "litdata", "grain"]
    )
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    when = datetime.now(UTC).date()
    runs = sorted({int(one["runs"]) for found in panels.values() for one in found.values()})
    number = f"{runs[0]} to {runs[-1]} runs" if len(runs) > 1 else f"{runs[0]} runs"
    return f"{when}, {environment.machine()}, commit {environment.commit()}; {libraries}; medians of {number}.\n"


def main() -> None:
    """Measures, or writes the page."""
    if sys.argv[1:2] == ["--one"]:
        reading.main(OURS, sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*KINDS, "abc"], help="default: jpeg, then png")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the images are kept (default: a temporary folder)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a file of JSON lines that grows")
    parser.add_argument(
        "--only", action="append", choices=[*OURS, *PEERS], metavar="NAME",
        help="only this contestant; may be repeated. One of " + "; ".join([*OURS, *PEERS]),
    )  # fmt: skip
    parser.add_argument("--resumes", action="store_true", help="also measure the first batch from the middle")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page from the results and run nothing")
    options = parser.parse_args()
    if options.write:
        write(options.write, options.results)
        return
    for kind in [options.kind] if options.kind else KINDS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.folder or Path(temporary)) / kind
            folder.mkdir(parents=True, exist_ok=True)
            num_samples = options.samples or NUM_SAMPLES[kind]
            if kind == "abc":
                measure_abc(make_data("jpeg", folder, num_samples, for_all=False), options.rounds, options.results)
                continue
            data = make_data(kind, folder, num_samples)
            names = [name for name in contestants(kind) if not options.only or name in options.only]
            measure(data, names, options.rounds, options.results, resumes=options.resumes)


if __name__ == "__main__":
    main()
