"""A checkpoint that several processes write, each its part: how they agree, and how the parts become whole again."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from shardset.decodable import decodable
from trainer.errors import CheckpointError

Exchange = Callable[[str], list[str]]
"""Tells a text to all processes, and returns the texts of all, by host."""


@decodable
class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a checkpoint as it was stored."""

    name: str
    num_bytes: int
    crc32c: str


@dataclass(frozen=True, slots=True)
class Peers:
    """The processes that save a state together. The first one commits it."""

    host: int
    exchange: Exchange


ALONE = Peers(0, lambda text: [text])


def first_says(peers: Peers, text: str) -> str:
    """The text of the first process."""
    return peers.exchange(text)[0]


def together(peers: Peers, action: Callable[[], StoredFile | None]) -> list[StoredFile]:
    """What the action returned in each process, where it returned a file. Raises in all processes if it does in one."""
    try:
        done = action()
    except BaseException as error:
        peers.exchange(json.dumps({"error": str(error) or type(error).__name__}))
        raise
    answers = [json.loads(text) for text in peers.exchange(json.dumps({"done": msgspec.to_builtins(done)}))]
    for host, answer in enumerate(answers):
        if "error" in answer:
            raise CheckpointError(f"process {host}: {answer['error']}")
    return [msgspec.convert(answer["done"], StoredFile) for answer in answers if answer["done"] is not None]


def part_name(state: str, host: int) -> str:
    """The file of a process: `state-1f0c5a7be2d9.pt` of the first, `state-1f0c5a7be2d9-part-00001.pt` of the second."""
    stem, _, suffix = state.rpartition(".")
    return f"{stem}-part-{host:05d}.{suffix}" if host else state


def joined(first: Any, parts: Sequence[Any]) -> Any:
    """The whole tree. A tensor that is in all parts was cut along its first dimension; others are those of the first.

    Raises ValueError if a part lacks what another one has.
    """
    if isinstance(first, torch.Tensor):
        return torch.cat([first, *parts]) if parts else first
    if not isinstance(first, dict):
        return first
    unknown = {name for part in parts for name in part} - first.keys()
    if unknown:
        raise ValueError(f"a part has {sorted(map(str, unknown))[0]!r}, which the first one lacks")
    return {name: joined(value, _of_name(parts, name)) for name, value in first.items()}


def _of_name(parts: Sequence[Any], name: Any) -> list[Any]:
    found = [part[name] for part in parts if name in part]
    if len(found) not in (0, len(parts)):
        raise ValueError(f"{name!r} is in {len(found)} of {len(parts)} parts")
    return found
