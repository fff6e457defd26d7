"""Every command of the tutorials, in its order, on small inputs of the same shape; those for a
cloud in a dry run.
"""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.makers.documented import REPOSITORY, commands_of, run_all, write_inputs
from tests.makers.folders import write_class_folders

PAGES = sorted(
    path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "docs/tutorials").glob("*.md")
)
TINY = "--recipe digits_smoke --strategy single --set image.size=32 --set image.eval_resize=32"
# Hours, or a cloud, at the size that the page states; here with smaller numbers and a folder.
REPLACED = {
    "gs://my-bucket": "bucket",
    "train=1280000,test=50000": "train=1280,test=500",
    "train=2000,test=1000": "train=20,test=10",
    "train=1252,validation=1000": "train=5,validation=3",
    "--recipe cifar10_resnet50": TINY,
    "--image-size 64 --precision fp32 --max-steps 10": "--max-steps 2",
    "--recipe imagenet_resnet50 ": f"{TINY.replace(' --strategy single', '')} ",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--global-batch-size 2048": "--global-batch-size 8",
    "--global-batch-size 256": "--global-batch-size 8",
    "--model resnet18": "--model trainer.model:tiny_resnet --strategy single",
    "--max-steps 20": "--max-steps 1",
    "--max-steps 10": "--max-steps 2",
}


def of_cloud(command: str) -> bool:
    return " tpu " in command or " job " in command or command.startswith("make ")


def here(command: str) -> str:
    """The training of a slice as one on this machine."""
    return re.sub(r"trainer tpu train \S+ --zone \S+", "trainer train --max-steps 4", command)


def write_year(place: Path) -> None:
    """What the year brings: pictures of which 40 are known, embeddings by key,
    and lists of keys.
    """
    write_class_folders(place / "photos-june", ["bird", "cat"], 45)
    keys = [f"{name}/{number:03d}" for name in ("cat", "dog") for number in range(40)]
    parquet.write_table(
        pa.table({"key": keys, "clip": [*np.eye(80, dtype=np.float32)]}),
        place / "embeddings.parquet",
    )
    (place / "wrong.txt").write_text("cat/028\n")
    (place / "forget.txt").write_text("dog/007\n")


@pytest.mark.nightly
@pytest.mark.parametrize("page", [page for page in PAGES if "quickstart" not in page])
def test_every_command_of_a_tutorial_works_in_its_order(page, tmp_path):
    write_inputs(tmp_path)
    if "over-time" in page:
        write_year(tmp_path)
    commands = [line for line in map(here, commands_of(page)) if not of_cloud(line)]
    assert commands
    run_all(commands, tmp_path, REPLACED)
