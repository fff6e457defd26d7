"""What a run writes down of each sample, and what is made of it."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipelines import cli as pipelines
from shardset.errors import ConfigError
from shardset.format.manifest import load
from shardset.program import OK
from shardset.storage.open import open_storage
from tests.makers.documented import REPOSITORY
from tests.makers.training import NUM_EVAL, NUM_TRAIN, read_records, tiny_config
from trainer import cli as command
from trainer import loop
from trainer.config import ImageConfig, RegularizeConfig
from trainer.data.step_rows import OUTCOME, ids_as_floats
from trainer.runtime.launch import launch
from trainer.telemetry.evaluation import by_class
from trainer.telemetry.sample_losses import losses_name, read_losses

Epoch = tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def recorded(manifest, tmp_path_factory):
    """The folder of two epochs."""
    folder = tmp_path_factory.mktemp("recorded")
    train(tiny_config(manifest, folder, record_losses=True))
    return folder


def train(config):
    launch(config, loop.train)


def epochs_of(folder):
    return list(read_losses(open_storage(str(folder))))


def test_an_epoch_has_a_row_a_sample_that_adds_up_to_what_the_log_says(recorded):
    for (ids, losses, top1), record in zip(
        epochs_of(recorded), read_records(recorded, "epoch"), strict=True
    ):
        assert sorted(ids.tolist()) == list(range(NUM_TRAIN))
        assert losses.dtype == np.float32
        assert losses.mean() == pytest.approx(record["loss"], rel=1e-6)
        assert top1.mean() == pytest.approx(record["top1"])


def test_passes_repeats_and_mixed_images_are_rows_too(manifest, tmp_path):
    image = ImageConfig(size=8, train_crop="pad", eval_resize=8, augment_repeats=2)
    changes: dict[str, Any] = {
        "image": image,
        "accumulate": 2,
        "regularize": RegularizeConfig(mixup=0.2),
    }
    train(
        tiny_config(
            manifest, tmp_path, record_losses=True, epochs=1, global_batch_size=16, **changes
        )
    )
    [(ids, losses, _)] = epochs_of(tmp_path)
    assert sorted(ids.tolist()) == sorted(2 * list(range(NUM_TRAIN)))
    assert losses.mean() == pytest.approx(read_records(tmp_path, "epoch")[0]["loss"], rel=1e-6)


def test_an_epoch_that_was_begun_without_recording_has_the_rest(manifest, recorded, tmp_path):
    config = tiny_config(manifest, tmp_path)
    train(replace(config, max_steps=3))
    train(replace(config, record_losses=True))
    first, second = zip(epochs_of(tmp_path), epochs_of(recorded), strict=True)
    assert first[0][0].tolist() == first[1][0][24:].tolist()
    assert second[0][1].tolist() == second[1][1].tolist()


def test_ids_of_any_size_travel_as_floats_and_pads_do_not():
    ids = np.array([0, (1 << 24) - 1, 1 << 24, (1 << 48) - 1, 7])
    low, high = ids_as_floats(ids, np.array([1, 1, 1, 0.5, 0])).astype(np.float64).T
    assert (low + high * (1 << 24)).astype(np.int64).tolist() == [*ids[:4].tolist(), -1]


# --- what is made of them -------------------------------------------------------------------------


def test_explain_names_the_samples_of_highest_loss(recorded, capsys):
    means = np.zeros(NUM_TRAIN)
    for ids, losses, _ in epochs_of(recorded):
        means[ids] += losses / 2
    assert command.main(["explain", "--run-dir", str(recorded), "--worst", "5", "--json"]) == OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["num_epochs"] == 2
    assert [one["id"] for one in answer["rows"]] == np.argsort(-means)[:5].tolist()
    assert answer["rows"][0]["key"] == f"train-{means.argmax():06d}"
    assert answer["rows"][0]["loss"] == pytest.approx(means.max())
    assert command.main(["explain", "--run-dir", str(recorded), "--worst", "1"]) == OK
    assert f"{means.max():.4f}" in capsys.readouterr().out


def test_explain_says_what_to_do_without_losses_and_names_a_damaged_file(
    recorded, manifest, tmp_path, capsys
):
    train(tiny_config(manifest, tmp_path, epochs=1))
    assert command.main(["explain", "--run-dir", str(tmp_path), "--worst", "5"]) != OK
    assert "train with --record-losses" in capsys.readouterr().err
    (tmp_path / "losses").mkdir()
    (tmp_path / losses_name(0)).write_bytes((recorded / losses_name(0)).read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"losses/epoch-001\.parquet: not the losses of an epoch"):
        epochs_of(tmp_path)


def test_an_evaluation_says_the_accuracy_of_each_class_and_the_page_shows_the_worst(
    recorded, capsys
):
    assert command.main(["evaluate", "--run-dir", str(recorded)]) == OK
    first, _, head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["right", "samples", "label", "class", "mistakes"]
    found = re.findall(r"([0-9.]+)% +([0-9]+) ", "".join(lines))
    shares = [(float(share) / 100, int(number)) for share, number in found]
    assert sum(number for _, number in shares) == NUM_EVAL
    right = sum(round(share * number) for share, number in shares)
    assert f"val accuracy {right / NUM_EVAL:.4f}" in first
    worst = json.loads((recorded / "worst.json").read_text())
    losses = [float(loss.removeprefix("loss ")) for *_, (_, loss, _) in worst]
    assert losses == sorted(losses, reverse=True)
    assert command.main(["report", str(recorded)]) == OK
    page = (recorded / "report.html").read_text()
    assert page.count("<img ") == NUM_EVAL
    assert worst[0][2][2] in page
    (recorded / "worst.json").write_text("{}")
    assert command.main(["report", str(recorded)]) != OK
    assert "worst.json: damaged" in capsys.readouterr().err


def test_the_page_leads_from_losses_to_a_view_without_the_worst_samples(
    recorded, manifest, tmp_path, monkeypatch
):
    page = (REPOSITORY / "docs/how-to/debug.md").read_text()
    [query] = re.findall(r"```sql\n(.*?)```", page, flags=re.S)
    [line] = re.findall(r"^shardset (view .*)$", page, flags=re.M)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(recorded)
    pytest.importorskip("duckdb").execute(query.replace("1000", "5"))
    words = [{"photos": manifest}.get(word, word) for word in line.split()]
    assert pipelines.main(words) == OK
    means = sum(losses[np.argsort(ids)] for ids, losses, _ in epochs_of(recorded))
    kept = load("clean.parquet").part("train").selection
    assert sorted(set(range(NUM_TRAIN)) - set(kept.id_of(np.arange(kept.num_kept)))) == sorted(
        np.argsort(-means)[:5]
    )


def test_classes_are_shown_with_their_mistakes_least_accurate_first():
    pairs = [(label, label) for label in range(50)] * 9 + [(7, 8)] * 3 + [(7, 3)] * 5 + [(9, 49)]
    outcomes = np.array([(0, 0, *pair) for pair in pairs], OUTCOME)
    shown = by_class(outcomes, [f"n{label}" for label in range(50)])
    rows = zip(*(one.cells for one in shown.columns), strict=True)
    assert [" ".join(map(str, row)) for row in rows][:2] == [
        "52.94% 17 7 n7 n3 (5), n8 (3)",
        "90.00% 10 9 n9 n49 (1)",
    ]
    assert shown.caption == "... and 10 more accurate"
