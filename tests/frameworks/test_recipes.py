"""Each program of examples/frameworks, as it stands there: every sample of every epoch is trained
on once. docs/how-to/frameworks.md lists them.
"""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import shardset
from scripts import venvs
from shardset.storage.open import open_storage
from tests.makers.documented import REPOSITORY, start
from tests.makers.shardset import pixels, png_samples, write_shard_set

PROGRAMS = (REPOSITORY / "examples/frameworks").glob("*.py")
RECIPES = {path.stem.removeprefix("with_"): path.read_text() for path in PROGRAMS}
PAGE = (REPOSITORY / "docs/how-to/frameworks.md").read_text()
NUM_SAMPLES = 48
ALONE, TORCHRUN = [], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]

RECORD = """
import os
from pathlib import Path

FOLDER = Path(__file__).parent

def record(labels):
    with open(FOLDER / f"seen-{os.getpid()}", "a") as file:
        file.writelines(f"{int(label)}\\n" for label in labels)
"""
TORCH = (
    RECORD
    + """
import torch

def make_model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 48))

def loss_of(model, batch):
    record(batch["label"][batch["weight"] > 0])
    logits = model(batch["image"].float() / 255)
    losses = torch.nn.functional.cross_entropy(logits, batch["label"], reduction="none")
    return (losses * batch["weight"]).mean()
"""
)
FASTAI = (
    RECORD
    + """
import torch

class Floats(torch.nn.Module):
    def forward(self, images):
        return images.float() / 255

def make_model():
    return torch.nn.Sequential(Floats(), torch.nn.Flatten(), torch.nn.Linear(3072, 48))

def loss_of_labels(logits, labels):
    if logits.requires_grad:  # training, not validation
        record(labels)
    return torch.nn.functional.cross_entropy(logits, labels)
"""
)
KERAS = (
    RECORD
    + """
import keras

def loss(labels, predictions):
    if len(set(labels.flatten().tolist())) > 1:  # Keras first builds the model with made-up labels
        record(labels.flatten())
    return keras.losses.sparse_categorical_crossentropy(labels, predictions)

def make_model():
    head = keras.layers.Dense(48, "softmax")
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), head]
    model = keras.Sequential(layers)
    model.compile("sgd", loss, run_eagerly=True)
    return model
"""
)
FLAX = (
    RECORD
    + """
import jax
import optax
from flax import nnx

def make_model():
    return nnx.Linear(3072, 48, rngs=nnx.Rngs(0))

def loss_of(model, batch):
    jax.debug.callback(record, batch["label"])
    logits = model(batch["image"].reshape(16, -1) / 255.0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return (losses * batch["weight"]).mean()
"""
)

CASES = {  # how it is started, the module `my_model`, and the epochs of one start
    "lightning": (TORCHRUN, TORCH, 2),
    "accelerate": (TORCHRUN, TORCH, 1),
    "transformers": (TORCHRUN, TORCH, 2),
    "keras": (ALONE, KERAS, 2),
    "fastai": (ALONE, FASTAI, 2),
    "flax": (ALONE, FLAX, 2),
    "ray": (ALONE, TORCH, 2),
    "dcp": (TORCHRUN, TORCH, 1),
}
# Accelerate and Hugging Face look for XLA where torch_xla is installed. Lightning looks for a TPU,
# and fails if another test of this process has imported jax, which sets the first of the two TPU
# variables and not the second.
ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "1",
    "USE_TORCH_XLA": "0",
    "KERAS_BACKEND": "torch",
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
}
# Ray counts cores, of which a machine may have one.
MANY_CORES = "import ray\nray.init(num_cpus=4, include_dashboard=False)\n"


@pytest.fixture(scope="module")
def python() -> str:
    """The Python of the environment with the frameworks."""
    assert venvs.is_current(venvs.FRAMEWORKS, venvs.FRAMEWORK_PACKAGES), (
        "run `make frameworks` first"
    )
    return str(venvs.python_of(venvs.FRAMEWORKS))


def test_every_recipe_is_run() -> None:
    assert RECIPES.keys() == {*CASES, "open_clip"}
    assert re.findall(r"/with_(\w+)\.py", PAGE) == [*CASES, "open_clip"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_recipe_trains_on_each_sample_once_an_epoch(
    name: str, python: str, tmp_path: Path
) -> None:
    words, model, num_epochs = CASES[name]
    write_recipe(name, model, tmp_path)
    for _ in range(2 // num_epochs):  # a recipe of one epoch goes on where its checkpoint is
        done = start_recipe([python, *words], tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    seen = seen_in(tmp_path)
    assert Counter(label for labels in seen for label in labels) == dict.fromkeys(
        range(NUM_SAMPLES), 2
    )
    assert len({tuple(labels) for labels in halves(seen)}) == 2 * len(seen), (
        "the second epoch repeats the first"
    )


@pytest.mark.nightly
def test_accelerate_may_not_divide_a_share_again(python: str, tmp_path: Path) -> None:
    write_recipe("accelerate", TORCH, tmp_path)
    recipe = (tmp_path / "recipe.py").read_text()
    loader = (
        "accelerator.prepare(torch.utils.data.DataLoader(BatchDataset(stream), batch_size=None))"
    )
    recipe = recipe.replace("import TensorStream", "import BatchDataset").replace(
        "TensorStream(stream)", loader
    )
    (tmp_path / "recipe.py").write_text(recipe)
    done = start_recipe([python, *TORCHRUN], tmp_path)
    assert done.returncode != 0
    assert "DataLoaderDispatcher divides batches among the processes" in done.stderr


OPEN_CLIP = """
import types
import open_clip
from with_open_clip import VirtualEpochs

seen = []
tokenizer = lambda texts: seen.extend(texts) or open_clip.get_tokenizer("ViT-S-32-alt")(texts)
args = types.SimpleNamespace(
    train_data="shards", batch_size=8, rank=0, world_size=1, train_num_samples=16
)
data = VirtualEpochs(args, open_clip.image_transform(32, is_train=True), True, 0, tokenizer)
for epoch in (0, 2, 1, 3):
    data.set_epoch(epoch)
    for images, texts in data.dataloader:
        assert images.shape == (8, 3, 32, 32) and texts.shape == (8, 77)
assert data.dataloader.num_batches == 2 and len(seen) == 64
assert sorted(seen[:48]) == sorted(f"picture {number}" for number in range(48))
"""


@pytest.mark.nightly
def test_virtual_epochs_of_open_clip_see_each_caption_once(python: str, tmp_path: Path) -> None:
    with shardset.Writer(tmp_path / "shards", samples_per_shard=16) as writer:
        for number in range(NUM_SAMPLES):
            text = f"picture {number}".encode()
            writer.write(image=pixels(number, 40, 40), fields={"txt": text})
    folder = REPOSITORY / "examples/frameworks"
    paths = os.pathsep.join([str(folder), str(REPOSITORY)])
    done = start([python, "-c", OPEN_CLIP], tmp_path, **ENVIRONMENT, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr[-3000:]


def write_recipe(name: str, model: str, folder: Path) -> None:
    samples = {
        "train": png_samples("train", NUM_SAMPLES, num_classes=48),
        "val": png_samples("val", 16),
    }
    write_shard_set(open_storage(str(folder / "shards")), samples, num_classes=48)
    (folder / "my_model.py").write_text(model)
    recipe = RECIPES[name].replace(
        'TrainingArguments("run", ', 'TrainingArguments("run", use_cpu=True, '
    )
    (folder / "recipe.py").write_text((MANY_CORES if name == "ray" else "") + recipe)


def start_recipe(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    return start([*words, "recipe.py"], folder, **ENVIRONMENT, PYTHONPATH=path)


def seen_in(folder: Path) -> list[list[int]]:
    """The labels that each process has trained on; a sample's label is its number."""
    return [list(map(int, path.read_text().split())) for path in sorted(folder.glob("seen-*"))]


def halves(seen: list[list[int]]) -> list[list[int]]:
    """The labels of each epoch of each process."""
    return [
        labels[i * len(labels) // 2 : (i + 1) * len(labels) // 2]
        for labels in seen
        for i in range(2)
    ]
