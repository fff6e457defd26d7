"""Each program of examples/frameworks, as it stands there: every sample of every epoch is trained
on once. docs/how-to/frameworks.md lists them.
"""

import functools
import itertools
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardset
from scripts import venvs
from shardset.adapters.torch import TensorStream
from shardset.storage.open import open_storage
from tests.makers.documented import REPOSITORY, start
from tests.makers.shardset import pixels, png_samples, write_shard_set

PROGRAMS = (REPOSITORY / "examples/frameworks").glob("*.py")
RECIPES = {path.stem.removeprefix("with_"): path.read_text() for path in PROGRAMS}
PAGE = (REPOSITORY / "docs/how-to/frameworks.md").read_text()
NUM_SAMPLES = 48

Seen = list[list[list[str]]]
ALONE, TORCHRUN = [], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]

RECORD = """
import os
from pathlib import Path

FOLDER = Path(__file__).parent
KILLED_AT = int(os.environ.get("KILLED_AT", 0))
num_batches = 0

def record(labels, loss=0.0, wait=lambda: None):
    global num_batches
    num_batches += 1
    if num_batches == KILLED_AT:
        wait()
        os._exit(1)
    with open(FOLDER / f"seen-{os.environ.get('RANK')}-{os.getpid()}", "a") as file:
        print(float(loss), *map(int, labels), file=file)
"""
TORCH = (
    RECORD
    + """
import torch

def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 48))

def loss_of(model, batch):
    logits = model(batch["image"].float() / 255)
    losses = torch.nn.functional.cross_entropy(logits, batch["label"], reduction="none")
    loss = (losses * batch["weight"]).mean()
    record(batch["label"][batch["weight"] > 0], loss, torch.distributed.barrier)
    return loss
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

@keras.saving.register_keras_serializable()
def loss(labels, predictions):
    losses = keras.losses.sparse_categorical_crossentropy(labels, predictions)
    if len(set(labels.flatten().tolist())) > 1:  # Keras first builds the model with made-up labels
        record(labels.flatten(), losses.mean())
    return losses

def make_model():
    keras.utils.set_random_seed(0)
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
    "accelerate": (TORCHRUN, TORCH, 2),
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


@pytest.fixture(scope="module")
def undisturbed(python: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seen]:
    """What a recipe has trained on at its end, by name."""

    @functools.cache
    def seen(name: str) -> Seen:
        folder = tmp_path_factory.mktemp(name)
        write_recipe(name, folder)
        for _ in range(2 // CASES[name][2]):  # a recipe of one epoch goes on at its checkpoint
            done = start_recipe(name, python, folder)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return seen_in(folder)

    return seen


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_recipe_trains_on_each_sample_once_an_epoch(
    name: str, undisturbed: Callable[[str], Seen]
) -> None:
    seen = [[int(label) for one in batches for label in one[1:]] for batches in undisturbed(name)]
    assert Counter(label for labels in seen for label in labels) == dict.fromkeys(
        range(NUM_SAMPLES), 2
    )
    assert len({tuple(labels) for labels in halves(seen)}) == 2 * len(seen), (
        "the second epoch repeats the first"
    )


STEPS, EPOCHS = "every_n_train_steps=2", "STEPS_PER_EPOCH, NUM_EPOCHS = 2, 3"
RESUMES = [  # a change of the recipe, the batch that ends the first start, those before the second
    ("lightning", (), 4, 2),
    ("lightning", (STEPS, "every_n_train_steps=3"), 5, 3),
    ("lightning", (STEPS, "every_n_epochs=1"), 5, 3),
    ("accelerate", (), 3, 2),
    ("accelerate", (), 5, 3),
    ("transformers", (), 3, 2),
    ("transformers", (), 5, 3),
    ("keras", (), 4, 2),
    ("keras", (EPOCHS, "STEPS_PER_EPOCH, NUM_EPOCHS = 3, 2"), 5, 3),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "change", "killed_at", "num_before"), RESUMES)
def test_a_recipe_resumes_exactly(
    name: str,
    change: tuple[str, ...],
    killed_at: int,
    num_before: int,
    undisturbed: Callable[[str], Seen],
    python: str,
    tmp_path: Path,
) -> None:
    write_recipe(name, tmp_path, *change)
    starts = [
        (start_recipe(name, python, tmp_path, KILLED_AT=number), seen_in(tmp_path))
        for number in (str(killed_at), "0")
    ]
    (first, killed), (second, resumed) = starts
    assert first.returncode != 0
    assert second.returncode == 0, second.stdout[-2000:] + second.stderr[-6000:]
    assert killed == [batches[: killed_at - 1] for batches in undisturbed(name)]
    assert resumed == [batches[num_before:] for batches in undisturbed(name)]


@pytest.mark.nightly
def test_groups_of_accelerate_end_with_the_epoch_and_its_rate_falls_once_per_update(
    undisturbed: Callable[[str], Seen], tmp_path: Path
) -> None:
    seen = undisturbed("accelerate")
    write_recipe("accelerate", tmp_path)
    stream = shardset.Stream(tmp_path / "shards", "train", batch_size=16, image_size=32)
    torch.manual_seed(0)
    model, losses = torch.nn.Linear(3072, 48), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for number, batch in enumerate(itertools.chain(TensorStream(stream), TensorStream(stream))):
        logits = model(batch["image"].flatten(1) / 255)
        loss = torch.nn.functional.cross_entropy(logits, batch["label"])
        losses.append(loss.item())
        (loss / (1 if number % 3 == 2 else 2)).backward()
        if number % 3:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    means = [sum(float(loss) for loss, *_ in step) / 2 for step in zip(*seen, strict=True)]
    assert losses == pytest.approx(means, rel=1e-6)


@pytest.mark.nightly
def test_accelerate_may_not_divide_a_share_again(python: str, tmp_path: Path) -> None:
    write_recipe("accelerate", tmp_path)
    recipe = (tmp_path / "recipe.py").read_text()
    loader = (
        "accelerator.prepare(torch.utils.data.DataLoader(BatchDataset(stream), batch_size=None))"
    )
    recipe = recipe.replace("import TensorStream", "import BatchDataset").replace(
        "TensorStream(stream)", loader
    )
    (tmp_path / "recipe.py").write_text(recipe)
    done = start_recipe("accelerate", python, tmp_path)
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


def write_recipe(name: str, folder: Path, old: str = "", new: str = "") -> None:
    """A recipe, its shards and its model; `new` replaces a text of the recipe."""
    samples = {
        "train": png_samples("train", NUM_SAMPLES, num_classes=48),
        "val": png_samples("val", 16),
    }
    write_shard_set(open_storage(str(folder / "shards")), samples, num_classes=48)
    (folder / "my_model.py").write_text(CASES[name][1])
    recipe = RECIPES[name].replace(
        'Arguments(\n    "run", ', 'Arguments(\n    "run", use_cpu=True, '
    )
    assert old in recipe
    recipe = recipe.replace(old, new)
    (folder / "recipe.py").write_text((MANY_CORES if name == "ray" else "") + recipe)


def start_recipe(
    name: str, python: str, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    words = [python, *CASES[name][0], "recipe.py"]
    return start(words, folder, **ENVIRONMENT, **variables, PYTHONPATH=path)


def seen_in(folder: Path) -> Seen:
    """For each process, by rank, the batches since the last call: loss and labels.

    A sample's label is its number.
    """
    paths = sorted(folder.glob("seen-*"))
    seen = [[line.split() for line in path.read_text().splitlines()] for path in paths]
    for path in paths:
        path.unlink()
    return seen


def halves(seen: list[list[int]]) -> list[list[int]]:
    """The labels of each epoch of each process."""
    return [
        labels[i * len(labels) // 2 : (i + 1) * len(labels) // 2]
        for labels in seen
        for i in range(2)
    ]
