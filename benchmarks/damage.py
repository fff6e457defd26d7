"""Compares the stream with plain webdataset on damaged sets and broken connections.

    python -m benchmarks.damage --write docs/explanation/checked.md

Each damage is done to a fresh copy of a set of 24 samples in two shards; both read one epoch. On
the wire both read the GCS emulator through a proxy that breaks one request, or every request for
one shard; webdataset opens `http:` URLs with curl, as it does by itself.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import webdataset

from benchmarks.environment import show
from benchmarks.measuring import parser_of
from shardset.format.tar import TarMember, members
from shardset.storage.open import open_storage
from tests.conftest import BUCKET, emulator
from tests.faulty_proxy import Fault, FaultyProxy, is_media
from tests.makers.shardset import put
from tests.shardset.stream.test_stream_damage import (
    INDEX,
    NUM_SAMPLES,
    SHARD,
    borders,
    flip,
    refusal,
    write,
)

FIRST = "train/train-000000.tar"
IN_SAMPLE, IN_TAR = 60, 572
"""The same byte of an image, for a reader of ranges and for a reader of whole tars."""


HEAD = "| damage | the stream | webdataset |\n|---|---|---|\n"

LOCAL: dict[str, Callable[[Path], None]] = {
    "nothing": lambda copy: None,
    "one bit of a tar header flipped (a size)": lambda copy: flip(
        copy / SHARD, _member(copy).header_offset + 130, 0
    ),
    "one bit of a tar header flipped (a name)": lambda copy: flip(
        copy / SHARD, _member(copy).header_offset + 8, 0
    ),
    "one bit of an image flipped": lambda copy: flip(copy / SHARD, _member(copy).offset + 60, 3),
    "one bit of an index flipped": lambda copy: flip(
        copy / INDEX, (copy / INDEX).stat().st_size - 5, 1
    ),
    "one bit of the manifest flipped": lambda copy: flip(copy / "manifest.json", 400, 0),
    "shard cut between two samples": lambda copy: _cut(copy, borders(copy / SHARD)[20]),
    "shard cut inside a sample": lambda copy: _cut(copy, borders(copy / SHARD)[21] + 40),
    "shard missing": lambda copy: (copy / SHARD).unlink(),
    "index missing": lambda copy: (copy / INDEX).unlink(),
    "manifest missing": lambda copy: (copy / "manifest.json").unlink(),
}

WIRE: dict[str, Sequence[Fault]] = {
    "429, once": [Fault("status", status=429)],
    "503, once": [Fault("status", status=503)],
    "connection reset before the answer, once": [Fault("reset")],
    "connection reset in the body, once": [Fault("reset_at", at=3000)],
    "body shorter than announced, once": [Fault("truncate", at=3000)],
    "1 s of silence in the body, then closed, once": [Fault("stall", at=3000, seconds=1)],
    "one bit flipped in transfer, once": [Fault("flip", at=IN_SAMPLE)],
    "one bit flipped in transfer, every time": [Fault("flip", at=IN_SAMPLE)] * 1000,
}


def local_table(whole: Path) -> str:
    """Damage on disk, and the results of both readers."""
    table = HEAD
    for name, damage in LOCAL.items():
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(whole, Path(folder, "set")))
            truth = _truth(copy)
            damage(copy)
            theirs = _theirs([str(copy / FIRST), str(copy / SHARD)], truth)
            table += f"| {name} | {_ours(str(copy))} | {theirs} |\n"
    return table


def wire_table(whole: Path, server: str) -> str:
    """Damage in transfer, and the results of both readers."""
    os.environ["STORAGE_EMULATOR_HOST"] = server
    url, truth, table = f"gs://{BUCKET}/set", _truth(whole), HEAD
    source, storage = open_storage(str(whole)), open_storage(url)
    for found in source.list():
        put(storage, found.name, source.read(found.name))
    with FaultyProxy(server) as proxy:
        os.environ["STORAGE_EMULATOR_HOST"] = proxy.url
        names = (f"set/{name}".replace("/", "%2F") for name in (FIRST, SHARD))
        urls = [f"{proxy.url}/download/storage/v1/b/{BUCKET}/o/{name}?alt=media" for name in names]
        for name, faults in WIRE.items():
            proxy.script = _broken(faults)
            ours = _ours(url)
            proxy.script = _broken(
                [replace(one, at=IN_TAR) if one.kind == "flip" else one for one in faults]
            )
            table += f"| {name} | {ours} | {_theirs(urls, truth)} |\n"
        proxy.script = lambda seen: None
        data = bytearray(storage.read(SHARD))
        data[_member(whole).offset + 60] ^= 8
        put(storage, SHARD, bytes(data))
        name = "object replaced by another of the same size"
        return table + f"| {name} | {_ours(url)} | {_theirs(urls, truth)} |\n"


def _broken(faults: Sequence[Fault]) -> Callable:
    left = iter(faults)
    return lambda seen: next(left, None) if is_media(seen) and "000001.tar" in seen.path else None


def _ours(url: str) -> str:
    said = refusal(url)
    return f"stops: {_short(said)}" if said else f"all {NUM_SAMPLES} samples, right"


def _theirs(urls: list[str], truth: dict[str, tuple[bytes, bytes]]) -> str:
    found, wrong, error = set(), 0, ""
    try:
        with Path(os.devnull).open("w") as silent, contextlib.redirect_stderr(silent):
            for sample in webdataset.WebDataset(urls, shardshuffle=False):
                found.add(sample["__key__"])
                wrong += truth.get(sample["__key__"]) != (sample.get("png"), sample.get("cls"))
    except Exception as caught:  # noqa: BLE001 - whatever it raises belongs into the table
        error = f"stops: {type(caught).__name__} after {len(found)} samples"
    if error:
        return error
    if len(found) == NUM_SAMPLES and not wrong:
        return f"all {NUM_SAMPLES} samples, right"
    return (
        f"**{len(found)} of {NUM_SAMPLES} samples{f', {wrong} wrong' if wrong else ''}, no error**"
    )


def _truth(whole: Path) -> dict[str, tuple[bytes, bytes]]:
    urls = [str(whole / FIRST), str(whole / SHARD)]
    return {
        sample["__key__"]: (sample["png"], sample["cls"])
        for sample in webdataset.WebDataset(urls, shardshuffle=False)
    }


def _member(copy: Path) -> TarMember:
    return [
        found for found in members((copy / SHARD).read_bytes(), "here") if found.field == "png"
    ][5]


def _cut(copy: Path, size: int) -> None:
    (copy / SHARD).write_bytes((copy / SHARD).read_bytes()[:size])


def _short(said: str) -> str:
    """The message without the folder it was found in."""
    for name in (INDEX, SHARD, FIRST, "manifest.json"):
        if name in said:
            words = re.sub(r"\S*/set/", "", said[said.index(name) :].split("; ")[0])
            return f"`{words.replace('`', '')}`"
    return f"`{said}`"


def main() -> None:
    """Prints both tables, or writes them into the page."""
    parser = parser_of(__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(write(str(Path(folder, "whole"))))
        with emulator(Path(folder, "log")) as server:
            tables = {"local": local_table(whole), "wire": wire_table(whole, server)}
    show(tables, options.write)


if __name__ == "__main__":
    main()
