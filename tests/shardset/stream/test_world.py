import os
from pathlib import Path

import pytest

from shardset.stream.spec import StreamSpec
from shardset.stream.world import num_own_cores


@pytest.mark.parametrize(
    ("own", "parents", "limit", "processes", "expected"),
    [
        (192, 192, "", 1, 192),
        (192, 192, "max", 8, 24),
        (24, 192, "max", 8, 24),  # the launcher has bound each to its own cores
        (96, 192, "max", 8, 24),  # four of them share a half
        (192, 192, "6400000", 8, 8),  # a container that may take 64
        (192, 192, "250000", 1, 2),
        (2, 2, "", 8, 1),
        (16, 1, "", 4, 4),
    ],
)
def test_a_process_takes_its_share_of_the_cores(
    own: int,
    parents: int,
    limit: str,
    processes: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(parents if pid else own))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    if limit:
        (tmp_path / "cpu.max").write_text(f"{limit} 100000\n")
    assert num_own_cores(tmp_path) == expected


def test_a_stream_under_torchrun_decodes_in_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world: dict = {"global_batch_size": 8, "rank": 0, "world_size": 8}
    spec = StreamSpec(manifest_url="set", split="train", seed=0, image=None, **world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(os.sched_getaffinity(0))))
    assert spec.num_decode_threads == 1
