import os
from pathlib import Path

import pytest

from shardset.stream.spec import StreamSpec
from shardset.stream.world import num_own_cores, share_of_cores

NONE = float("inf")


@pytest.mark.parametrize(
    ("own", "parents", "limit", "processes", "expected"),
    [
        (192, 192, NONE, 1, 192),
        (192, 192, NONE, 8, 24),
        (24, 192, NONE, 8, 24),  # the launcher has bound each to cores of its own
        (96, 192, NONE, 8, 24),  # four of them share a half
        (192, 192, 64, 8, 8),  # a container that may take 64
        (192, 192, 2.5, 1, 2),
        (2, 2, NONE, 8, 1),
        (16, 1, NONE, 4, 4),
    ],
)
def test_a_process_takes_its_share_of_the_cores(
    own: int, parents: int, limit: float, processes: int, expected: int
) -> None:
    assert share_of_cores(own, parents, limit, processes) == expected


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("150000 100000\n", 1),
        ("max 100000\n", None),
    ],
)
def test_the_limit_of_a_container_counts(limit: str, expected: int | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    assert num_own_cores(tmp_path) == (expected or num_own_cores(tmp_path / "nothing"))


def test_a_stream_under_torchrun_decodes_in_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = StreamSpec(
        manifest_url="set", split="train", global_batch_size=8, rank=0, world_size=8, seed=0, image=None
    )  # fmt: skip
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(os.sched_getaffinity(0))))
    assert spec.num_decode_threads == 1
