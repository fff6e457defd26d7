"""Finds wrong labels by the losses of a run: plants them in the digits, trains, drops the worst,
trains again.

    OMP_WAIT_POLICY=passive python -m benchmarks.wrong_labels --share 0.02 --rounds 3

Each round has other wrong labels and another seed. Prints a table in Markdown; in its last column,
the samples with wrong labels were left out by what was planted.
"""

import contextlib
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from benchmarks.measuring import parser_of
from shardset import Stream, Writer
from shardset.storage.open import open_storage
from tests.makers.training import read_records
from trainer import loop
from trainer.recipes import digits_smoke
from trainer.runtime.launch import launch
from trainer.tools import explain

NUM_TEST = 360


def main() -> None:
    """Prints a line a round."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--share", type=float, default=0.02, help="share of training labels that are made wrong"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(
        "| round | wrong labels | among as many worst | accuracy of all | without the worst |"
        " without the wrong |"
    )
    print("|---|---|---|---|---|---|")
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="wrong-labels-") as folder:
            print("|", " | ".join(one_round(Path(folder), args.share, number)), "|", flush=True)


def one_round(folder: Path, share: float, number: int) -> list[str]:
    """The cells of a line."""
    draw, digits = np.random.default_rng(number), load_digits()
    order = draw.permutation(len(digits.target))
    images = np.rint(digits.images[order] * (255 / 16)).astype(np.uint8)
    labels = digits.target[order].astype(int)
    num_train = len(labels) - NUM_TEST
    wrong = draw.choice(num_train, round(share * num_train), replace=False)
    labels[wrong] = (labels[wrong] + draw.integers(1, 10, len(wrong))) % 10
    train = partial(trained, folder, images, labels, number, num_worst=len(wrong))
    before, worst = train(left_out=[])
    after, _ = train(left_out=worst)
    best, _ = train(left_out=wrong.tolist())
    found = len(np.intersect1d(worst, wrong))
    return [
        str(number + 1),
        str(len(wrong)),
        f"{found} ({found / len(wrong):.0%})",
        *map("{:.2%}".format, (before, after, best)),
    ]


def trained(
    folder: Path,
    images: np.ndarray,
    labels: np.ndarray,
    seed: int,
    num_worst: int,
    left_out: list[int],
) -> tuple[float, list[int]]:
    """The accuracy after a run without some of the training images, and its worst samples by their
    number.
    """
    folder = Path(tempfile.mkdtemp(dir=folder))
    with Writer(folder / "set", samples_per_shard=500) as writer:
        for number in np.setdiff1d(np.arange(len(labels)), left_out).tolist():
            split = "train" if number < len(labels) - NUM_TEST else "test"
            label = int(labels[number])
            writer.write(image=images[number], label=label, key=f"{number:04d}", split=split)
    config = replace(
        digits_smoke(), manifest=str(folder / "set"), run_dir=str(folder / "run"), seed=seed,
        strategy="single", record_losses=True,
    )  # fmt: skip
    with contextlib.redirect_stdout(None):
        launch(config, loop.train)
    accuracy = read_records(folder / "run", "eval")[-1]["top1"]
    config, stream = explain.opened(str(folder / "run"))
    assert isinstance(stream, Stream)
    timetable = explain.timetable_of(config, stream)
    found = explain.explain_losses(timetable, open_storage(str(folder / "run")), num_worst)
    return accuracy, [int(row["key"]) for row in found.rows]


if __name__ == "__main__":
    main()
