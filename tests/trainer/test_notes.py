"""What `train` says of a run beside its settings."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardset.program import OK
from shardset.storage.open import open_storage
from tests.makers.shardset import png_samples, write_shard_set
from tests.makers.training import tiny_config
from trainer import cli as command
from trainer.config import ModelConfig
from trainer.notes import notes


def shard_set(folder: Path, *splits: str) -> str:
    write_shard_set(open_storage(str(folder)), {name: png_samples(name, 52, size=8) for name in splits})
    return str(folder)


def test_a_set_with_val_and_test_trains_without_a_flag_and_says_on_what_it_evaluates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--manifest", shard_set(tmp_path / "set", "test", "train", "val"), "--strategy", "single"]
    assert command.main([*words, "--run-dir", str(tmp_path / "run"), "--epochs", "1", "--max-steps", "1"]) == OK
    printed = capsys.readouterr().out
    note = "note: evaluates on 'val', not on 'test'; --set eval_split=test changes that\n"
    assert printed.index("chosen for 52 images") < printed.index(note)


def test_a_run_that_names_its_split_or_has_one_to_choose_from_needs_no_note(tmp_path: Path) -> None:
    three = tiny_config(shard_set(tmp_path / "three", "train", "val", "test"), "run")
    assert notes(replace(three, eval_split="test")) == []
    assert notes(tiny_config(shard_set(tmp_path / "two", "train", "test"), "run", eval_split=None)) == []
    assert notes(tiny_config(None, "run", fake_data=True)) == []


def test_weights_that_timm_evaluates_otherwise_have_a_note() -> None:
    model = ModelConfig(name="vit_so400m_patch14_siglip_378.webli_ft_in1k", pretrained="timm")
    (note,) = notes(tiny_config(None, "run", fake_data=True, model=model))
    assert note.startswith(
        "note: timm evaluates vit_so400m_patch14_siglip_378.webli_ft_in1k on whole images squashed to a square"
    )
