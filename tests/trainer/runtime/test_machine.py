import sys
from pathlib import Path

import pytest

from shardset.errors import ConfigError
from trainer.config import Precision
from trainer.runtime import machine
from trainer.runtime.machine import container_memory


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("1000", "400", (1000, 400)), ("1000", "1200", (1000, 1200)), ("max", "400", (sys.maxsize, 0))],
)
def test_the_limit_of_a_container_counts(tmp_path: Path, limit: str, used: str, expected: tuple[int, int]) -> None:
    write(tmp_path, memory__max=limit, memory__current=used)
    assert container_memory(tmp_path) == expected


def test_file_cache_that_the_kernel_gives_back_is_not_used_memory(tmp_path: Path) -> None:
    write(tmp_path, memory__max="1000", memory__current="700", memory__stat="anon 100\ninactive_file 600")
    assert container_memory(tmp_path) == (1000, 100)


def test_the_first_version_of_cgroups_counts_too(tmp_path: Path) -> None:
    write(tmp_path / "memory", memory__limit_in_bytes="2000", memory__usage_in_bytes="500")
    assert container_memory(tmp_path) == (2000, 500)


def test_without_a_container_the_machine_counts(tmp_path: Path) -> None:
    assert container_memory(tmp_path / "nothing") == (sys.maxsize, 0)
    assert 1 << 20 < machine.available_memory(tmp_path) <= machine.total_memory(tmp_path) < 1 << 50


def test_a_container_leaves_less_than_the_machine_has(tmp_path: Path) -> None:
    write(tmp_path, memory__max=str(1 << 20), memory__current=str(1 << 19))
    assert (machine.total_memory(tmp_path), machine.available_memory(tmp_path)) == (1 << 20, 1 << 19)


@pytest.mark.parametrize(("capability", "expected"), [((6, 1), "fp32"), ((7, 5), "fp16"), ((8, 0), "bf16")])
def test_a_device_without_bfloat16_gets_what_it_has(capability: tuple[int, int], expected: Precision) -> None:
    assert machine.precision_of(capability) == expected
    machine.check_precision(expected, capability, "Tesla")
    if expected != "bf16":
        with pytest.raises(ConfigError, match=f"Tesla does not compute in bfloat16; use --precision {expected}$"):
            machine.check_precision("bf16", capability, "Tesla")


def test_processes_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = machine.machine()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "8")
    shared = machine.machine()
    assert (shared.host_bytes, shared.num_processes) == (alone.host_bytes // 4, 8)
