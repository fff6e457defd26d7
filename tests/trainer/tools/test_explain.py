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

import pytest

from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.tar import StoredSample
from shardset.program import OK, USAGE
from shardset.stream.stream import Stream
from shardset.stream.timetable import Timetable
from tests.makers.shardset import put, references
from tests.makers.training import BATCH, NUM_TRAIN, STEPS, shard_set, tiny_config
from trainer import cli as command
from trainer import config as configs
from trainer import loop
from trainer.data.splits import open_data
from trainer.run import Run
from trainer.runtime.launch import running
from trainer.tools.explain import explain_sample, explain_step, recorded_run, step_of, timetable_of

Ids = dict[tuple[int, int], list[tuple[int, float]]]


def timetable_of_run(url: str) -> Timetable:
    return timetable_of(*recorded_run(url))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Ids]:
    """The folder of a run of two epochs,
    and the ids and weights that each of its steps trained on.
    """
    place = tmp_path_factory.mktemp("explained")
    url = shard_set(place / "shards")
    _write_names(url)
    seen: Ids = {}
    with (
        running("single", "fp32") as here,
        Run(here, tiny_config(url, place / "run", seed=5)) as run,
    ):
        for fed in run.batches():
            seen[fed.epoch, fed.step] = list(
                zip(fed.ids.tolist(), fed.weights.tolist(), strict=True)
            )
            run.train_step(fed)
            run.report()
            if run.epoch_is_done():
                run.check_epoch()
                run.close_epoch(
                    loop.evaluate(
                        here, run.learner, run.data.evaluation, run.stop_requested_while_evaluating
                    )
                )
        run.finish()
    return str(place / "run"), seen


def _write_names(url: str) -> None:
    """The plan of each shard, as far as it says what samples were called."""
    manifest, storage, _ = manifests.load(url)
    for number, shard in enumerate(manifest.split("train").shards):
        ids = range(shard.first_id, shard.first_id + shard.num_samples)
        samples = [
            StoredSample(key=f"train-{row:06d}", fields=(), label=0, source=row) for row in ids
        ]
        names = [f"raw/{row} <b>.png" for row in ids]
        put(storage, naming.references_path("train", number), references(samples, names))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert command.main(["explain", *words, "--json"]) == OK, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_every_step_holds_what_the_run_trained_on(recorded):
    run_dir, seen = recorded
    timetable = timetable_of_run(run_dir)
    assert timetable.num_steps == len(seen) == 2 * STEPS
    for global_step in range(2 * STEPS):
        found = explain_step(timetable, global_step)
        trained = seen[found.epoch, found.step]
        assert [(one.sample.id, float(not one.pad)) for one in found.samples] == trained
        assert [one.slot for one in found.samples] == list(range(BATCH))
        assert global_step == step_of(f"{found.epoch + 1}:{found.step}", STEPS)


def test_every_sample_is_in_the_steps_that_trained_on_it(recorded):
    run_dir, seen = recorded
    timetable = timetable_of_run(run_dir)
    for sample_id in range(NUM_TRAIN):
        found = explain_sample(timetable, sample_id)
        trained = [
            (epoch, step, slot)
            for (epoch, step), slots in seen.items()
            for slot, (id_, weight) in enumerate(slots)
            if id_ == sample_id and weight
        ]
        assert [(v.epoch, v.step, v.slot) for v in found.visits] == sorted(trained)


def test_the_repeats_of_a_sample_are_in_the_slots_that_the_stream_gives_them(recorded):
    url = json.loads((Path(recorded[0]) / configs.RECORD).read_text())["manifest"]
    base = tiny_config(url, "run", global_batch_size=12, epochs=1)
    config = dataclasses.replace(base, image=dataclasses.replace(base.image, augment_repeats=3))
    timetable = timetable_of(config)
    train = open_data(config, 0, 1).train
    ids = {
        step: batch["id"].tolist() for _, step, batch in train.run(iter([(0, range(len(train)))]))
    }
    assert {step: [one.sample.id for one in timetable.batch(step)] for step in ids} == ids
    for sample_id in range(NUM_TRAIN):
        visits = list(timetable.visits(sample_id, range(1)))
        assert [ids[one.step][one.slot] for one in visits] == [sample_id] * len(visits)
        assert len({(one.step, one.slot) for one in visits}) == 3


def test_samples_are_those_of_the_stream_by_key_and_label(recorded):
    run_dir, _ = recorded
    timetable = timetable_of_run(run_dir)
    url = timetable.loaded.storage.url
    stream = Stream(
        url,
        "train",
        global_batch_size=BATCH,
        rank=0,
        world_size=1,
        seed=5,
        image=None,
        with_key=True,
    )
    steps = 0
    for step, batch in enumerate(stream.epoch(1)):
        found = [one.sample for one in explain_step(timetable, STEPS + step).samples]
        assert [sample.key for sample in found] == batch["key"]
        assert [sample.label for sample in found] == batch["label"].tolist()
        assert [sample.name for sample in found] == [f"raw/{sample.id} <b>.png" for sample in found]
        steps += 1
    assert steps == STEPS


def test_a_run_that_is_described_is_the_one_that_was_made(recorded, capsys):
    run_dir, _ = recorded
    config = json.loads((Path(run_dir) / configs.RECORD).read_text())
    described = [
        "--manifest",
        config["manifest"],
        "--seed",
        "5",
        "--global-batch-size",
        "8",
        "--set",
        "epochs=2",
    ]
    by_run = told(capsys, "--run-dir", run_dir, "--step", "9")
    by_words = told(capsys, *described, "--step", "9")
    assert by_words == by_run


def test_a_run_that_is_described_has_the_order_of_its_budget(recorded):
    run_dir, _ = recorded
    config = configs.from_dict(
        json.loads((Path(run_dir) / configs.RECORD).read_text()) | {"budget_bytes": 180_000}
    )
    order = timetable_of(config).order
    stream = open_data(config, 0, 1).train
    assert order.window == stream.order.window < timetable_of_run(run_dir).order.window


def test_a_key_leads_to_its_steps_and_each_step_to_the_key(recorded, capsys):
    run_dir, _ = recorded
    found = told(capsys, "--run-dir", run_dir, "--key", "train-000007")
    visit = found["visits"][1]
    assert visit["epoch"] == 1
    step = told(capsys, "--run-dir", run_dir, "--step", str(visit["global_step"]))
    assert step["samples"][visit["slot"]]["sample"] == found["sample"]
    assert told(capsys, "--run-dir", run_dir, "--id", "7") == found


def test_tables_say_pads_and_names(recorded, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    run_dir, _ = recorded
    assert command.main(["explain", "--run-dir", run_dir, "--step", "6"]) == OK
    text = capsys.readouterr().out
    assert "epoch 1 step 6 of 7: 8 slots, 4 of them pads of weight 0" in text
    assert text.count("(pad)") == 4
    assert "<b>.png" in text
    assert command.main(["explain", "--run-dir", run_dir, "--key", "train-000007"]) == OK
    assert "originally raw/7 <b>.png" in capsys.readouterr().out


PAGE = (Path(__file__).parents[3] / "docs/explain.md").read_text(encoding="utf-8")
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
        python, module, trainer, *words = shlex.split(line)
        assert (python, module, trainer) == ("python", "-m", "trainer")
        assert command.main(words) == OK, line
    assert len(COMMANDS) == 3
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
            "has the key 'train-00000'; `python -m pipelines inspect` finds",
        ),
        (["--id", "52"], "which has 0 to 51"),
        (["--step", "1", "--seed", "3"], "--seed can't be given"),
    ],
)
def test_what_can_t_be_asked_is_a_wrong_command_line(recorded, words, message, capsys):
    run_dir, _ = recorded
    assert command.main(["explain", "--run-dir", run_dir, *words]) == USAGE
    assert message in capsys.readouterr().err


def test_a_folder_or_a_recipe_without_a_set_has_nothing_to_explain(tmp_path, capsys):
    assert command.main(["explain", "--run-dir", str(tmp_path), "--step", "0"]) == USAGE
    assert "no config.json and order.json there" in capsys.readouterr().err
    assert command.main(["explain", "--recipe", "digits_smoke", "--step", "0"]) == USAGE
    assert "no shard set to explain" in capsys.readouterr().err


def copied(run_dir: str, place: Path, **changes: Any) -> Path:
    """The run's folder with other numbers in its order."""
    shutil.copytree(run_dir, place)
    state = json.loads((place / configs.ORDER).read_text()) | changes
    (place / configs.ORDER).write_text(json.dumps(state))
    return place


def test_the_recorded_order_counts_not_what_this_version_would_choose(recorded, tmp_path):
    run_dir, _ = recorded
    other = timetable_of_run(str(copied(run_dir, tmp_path / "run", w=3, q=2)))
    assert (other.order.window, other.order.block_size) == (3, 2)
    assert explain_step(other, 0).samples != explain_step(timetable_of_run(run_dir), 0).samples


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
        (configs.ORDER, "{", r"run/order\.json: can't be read .*; describe the run with"),
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
