"""What explain says is what a run does: the same samples in the same slots, from numbers alone."""

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardset.errors import ConfigError
from shardset.format.rows import Origin
from shardset.program import OK, USAGE
from shardset.stream.stream import Stream
from tests.makers.shardset import new_set, png_samples
from tests.makers.training import BATCH, NUM_EVAL, NUM_TRAIN, STEPS, tiny_config
from trainer import cli as command
from trainer import config as configs
from trainer import loop
from trainer.data.splits import open_data
from trainer.runtime.base import Single
from trainer.tools.explain import (
    explain_sample,
    explain_step,
    opened,
    step_of,
    timetable_of,
)

Seen = dict[tuple[int, int], list[tuple[int, int, float]]]
"""The id, label and weight in each slot of each step."""


NAMES = ("id", "label", "weight")


def raw_name(id_):
    return f"raw/{id_} <b>.png"


def timetable_of_run(url):
    config, stream = opened(url)
    assert isinstance(stream, Stream)
    return timetable_of(config, stream)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of a run of two epochs, and what each of its steps trained on."""
    place = tmp_path_factory.mktemp("explained")
    samples = [
        msgspec.structs.replace(sample, origin=Origin(raw_name(sample.serial)))
        for sample in png_samples("train", NUM_TRAIN, size=8)
    ]
    splits = {"train": samples, "val": png_samples("val", NUM_EVAL, size=8)}
    url = new_set(splits, place / "shards", num_shards=4)
    config = tiny_config(url, place / "run", seed=5)
    loop.train(Single("fp32"), config)
    spans = iter([(epoch, range(STEPS)) for epoch in range(2)])
    seen = {
        (epoch, step): list(zip(*(batch[name].tolist() for name in NAMES), strict=True))
        for epoch, step, batch in open_data(config, 0, 1).train.run(spans)
    }
    return config.run_dir, seen


def told(capsys, *words: str):
    assert command.main(["explain", *words, "--json"]) == OK, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_every_step_and_sample_is_where_the_run_trained_on_it(recorded):
    run_dir, seen = recorded
    timetable = timetable_of_run(run_dir)
    assert timetable.num_steps == len(seen) == 2 * STEPS
    visits = {
        (*step, slot): id_ for step, slots in seen.items() for slot, (id_, *_) in enumerate(slots)
    }
    pads = 0
    for global_step in range(2 * STEPS):
        found = explain_step(timetable, global_step)
        epoch, step = found.numbers["epoch"], found.numbers["step"]
        rows = [(row["id"], row["label"], float(not row["pad"])) for row in found.rows]
        assert rows == seen[epoch, step]
        for row in found.rows:
            assert (row["key"], row["name"]) == (f"train-{row['id']:06d}", raw_name(row["id"]))
        assert [row["slot"] for row in found.rows] == list(range(BATCH))
        assert global_step == step_of(f"{epoch + 1}:{step}", STEPS)
        pads += sum(row["pad"] for row in found.rows)
    of_samples = {
        (row["epoch"], row["step"], row["slot"]): sample_id
        for sample_id in range(NUM_TRAIN)
        for row in explain_sample(timetable, sample_id).rows
    }
    assert of_samples.items() <= visits.items()
    assert len(of_samples) == len(visits) - pads


def test_the_repeats_of_a_sample_are_in_the_slots_that_the_stream_gives_them(recorded):
    url = json.loads((Path(recorded[0]) / configs.RECORD).read_text())["manifest"]
    base = tiny_config(url, "run", global_batch_size=12, epochs=1)
    config = dataclasses.replace(base, image=dataclasses.replace(base.image, augment_repeats=3))
    train: Any = open_data(config, 0, 1).train
    timetable = timetable_of(config, train)
    ids = {
        step: batch["id"].tolist() for _, step, batch in train.run(iter([(0, range(len(train)))]))
    }
    assert {step: timetable.batch(step)["id"].to_pylist() for step in ids} == ids
    for sample_id in range(NUM_TRAIN):
        visits = list(timetable.visits(sample_id))
        slots = {(visit["step"], visit["slot"]) for visit in visits}
        assert [ids[step][slot] for step, slot in slots] == [sample_id] * 3


def test_a_key_leads_to_its_steps_and_each_step_to_the_key(recorded, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    asked = "--run-dir", recorded[0]
    found = told(capsys, *asked, "--key", "train-000007")
    visit = found["rows"][1]
    assert visit["epoch"] == 1
    step = told(capsys, *asked, "--step", str(visit["global_step"]))
    assert step["rows"][visit["slot"]]["key"] == "train-000007"
    assert told(capsys, *asked, "--id", "7") == found
    assert command.main(["explain", *asked, "--key", "train-000007"]) == OK
    assert "originally raw/7 <b>.png" in capsys.readouterr().out
    assert command.main(["explain", *asked, "--step", "6"]) == OK
    text = capsys.readouterr().out
    assert "epoch 1 step 6 of 7: 8 slots, 4 of them pads of weight 0" in text
    assert text.count("True") == 4


PAGE = (Path(__file__).parents[3] / "docs/how-to/debug.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]


def test_the_page_s_commands_and_its_example_run(recorded, tmp_path, monkeypatch, capsys):
    place = Path(recorded[0]).parent
    for name in ("run", "shards"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    for line in COMMANDS:
        program, *words = shlex.split(line)
        assert program == "shardset"
        assert command.main(words) == OK, line
    assert len(COMMANDS) == 2
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith("sample 17 of the first set is in step")
    )


# --- what can't be explained ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "14"], "are the steps 0 to 13"),
        (["--step", "0:3"], "are the steps 0 to 13"),
        (["--step", "1:7"], "an epoch has the steps 0 to 6"),
        (["--step", "1:x"], "EPOCH:STEP"),
        (
            ["--key", "train-00000"],
            "has the key 'train-00000'; `shardset inspect` finds",
        ),
        (["--id", "52"], "id 52 is not in the view or not 0 to 51"),
    ],
)
def test_what_can_t_be_asked_is_a_wrong_command_line(recorded, tmp_path, words, message, capsys):
    assert command.main(["explain", "--run-dir", recorded[0], *words]) == USAGE
    assert message in capsys.readouterr().err
    assert command.main(["explain", "--run-dir", str(tmp_path), *words]) == USAGE
    assert "no config.json and order.json there" in capsys.readouterr().err


def copied(run_dir, place, **changes: Any):
    """The run's folder with other numbers in its order."""
    shutil.copytree(run_dir, place)
    state = json.loads((place / configs.ORDER).read_text()) | changes
    (place / configs.ORDER).write_text(json.dumps(state))
    return place


def test_the_recorded_order_counts_not_what_this_version_would_choose(recorded, tmp_path):
    run_dir, _ = recorded
    other = timetable_of_run(str(copied(run_dir, tmp_path / "run", w=3, q=2)))
    assert (other.order.window, other.order.block_size) == (3, 2)
    assert explain_step(other, 0) != explain_step(timetable_of_run(run_dir), 0)


def test_explaining_needs_no_torch(recorded):
    run_dir, _ = recorded
    code = (
        "import sys; from trainer.cli import main\n"
        f"code = main(['explain', '--run-dir', {run_dir!r}, '--step', '3', '--json'])\n"
        "print(code, [n for n in ('torch', 'torch_xla', 'apache_beam') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (configs.RECORD, "{", "not JSON"),
        (configs.RECORD, '{"epochs": "many"}', "another version or changed"),
        (configs.ORDER, "{", r"run/order\.json: can't be read .*; restore it"),
        (configs.ORDER, {"manifest": "0" * 64}, "manifest is"),
    ],
)
def test_a_record_that_is_damaged_or_of_another_set_is_named(
    recorded, tmp_path, name, text, message
):
    changes = text if isinstance(text, dict) else {}
    folder = copied(recorded[0], tmp_path / "run", **changes)
    if not changes:
        (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        timetable_of_run(str(folder))
