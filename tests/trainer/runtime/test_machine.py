import os
from pathlib import Path

import pytest

from shardset.errors import ConfigError
from trainer.runtime import machine
from trainer.runtime.xla import CACHE, use_cache


@pytest.mark.parametrize(("text", "expected"), [("1000", 1000), ("max", None)])
def test_the_limit_of_a_container_counts_where_it_is_less_than_the_memory_of_the_machine(
    tmp_path, text, expected
):
    of_machine = machine.total_memory(tmp_path)
    (tmp_path / "memory.max").write_text(f"{text}\n")
    assert machine.total_memory(tmp_path) == (expected or of_machine)


@pytest.mark.parametrize(
    ("capability", "expected"), [((6, 1), "fp32"), ((7, 5), "fp16"), ((8, 0), "bf16")]
)
def test_a_device_without_bfloat16_gets_what_it_has(capability, expected):
    assert machine.precision_of(capability) == expected
    machine.check_precision(expected, capability, "Tesla")
    if expected != "bf16":
        with pytest.raises(
            ConfigError, match=f"Tesla does not compute in bfloat16; use --precision {expected}$"
        ):
            machine.check_precision("bf16", capability, "Tesla")


def test_processes_of_one_machine_share_its_memory(monkeypatch):
    alone = machine.machine()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "8")
    shared = machine.machine()
    assert (shared.host_bytes, shared.num_processes) == (alone.host_bytes // 4, 8)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of the user without a compile cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(CACHE, "unset")


@pytest.mark.usefixtures("home")
def test_each_process_has_a_compile_cache_of_its_own(tmp_path):
    use_cache(3)
    assert os.environ[CACHE] == str(tmp_path / "home/shardset/xla/process-003")
    assert Path(os.environ[CACHE]).is_dir()


@pytest.mark.usefixtures("home")
def test_a_compile_cache_that_can_not_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "home").touch()
    use_cache(0)
    assert os.environ[CACHE] == "unset"
    warning = capsys.readouterr().err
    assert warning.startswith("warning: compile cache: ")
    assert f"{tmp_path}/home" in warning
