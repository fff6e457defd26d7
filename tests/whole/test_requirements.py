"""What runs with which requirements: a program started with all other libraries hidden, in its
workers too.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from pipelines import parsers
from shardset.errors import ShardsetError, brought_by
from shardset.format.columns import npy
from shardset.storage.open import open_storage
from tests.makers.documented import REPOSITORY, lists_of_project, start
from tests.makers.folders import write_class_folders
from tests.makers.shardset import image_sample, write_shard_set
from tests.makers.tars import tar_bytes
from tests.makers.training import NUM_TRAIN, shard_set
from trainer import cli

HIDE = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        is_hidden = name.partition(".")[0] in {hidden!r}
        return None if is_hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
"""
"""What looks for libraries finds none of the hidden ones, as if they were not installed."""


def with_theirs(specs: Iterable[str]) -> set[str]:
    """The distributions that these requirements bring, as they are installed here."""
    remaining, brought = list(specs), set[str]()
    while remaining:
        spec, _, marker = remaining.pop().partition(";")
        name, extras = re.fullmatch(r"([\w.-]+)\s*(?:\[([\w.,\s-]+)\])?.*", spec.strip()).groups()
        wanted = [f'extra == "{extra.strip()}"' for extra in (extras or "").split(",") if extra]
        asked = f"{re.sub(r'[-_.]+', '-', name).lower()}[{extras or ''}]"
        if asked in brought or ("extra" in marker):
            continue
        brought.add(asked)
        try:
            theirs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        remaining += [
            each.partition(";")[0]
            for each in theirs
            if "extra" not in each.partition(";")[2]
            or any(one in each.replace("'", '"') for one in wanted)
        ]
    return {name.partition("[")[0] for name in brought}


def hidden_without(*extras: str) -> set[str]:
    """The libraries that are installed here and that neither the base nor these extras bring."""
    lists = lists_of_project()
    allowed = with_theirs(spec for name in ("base", *extras) for spec in lists[name])
    libraries = metadata.packages_distributions()
    names = {
        library: {re.sub(r"[-_.]+", "-", name).lower() for name in distributions}
        for library, distributions in libraries.items()
    }
    ours = {"shardset", "pipelines", "trainer"}
    return {
        library for library, distributions in names.items() if not distributions & allowed
    } - ours


def run_without(hidden: set[str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "hide").mkdir(exist_ok=True)
    (folder / "hide/sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    path = os.pathsep.join([str(folder / "hide"), str(REPOSITORY)])
    return start([sys.executable, "-m", *words], folder, PYTHONPATH=path)


@pytest.mark.parametrize(
    "words", [("pipelines", "estimate", "--help"), ("trainer", "train", "--help")]
)
def test_help_needs_the_base_requirements_only(words, tmp_path):
    hidden = hidden_without()
    assert {"apache_beam", "torch", "jinja2", "cv2", "scipy"} <= hidden
    assert not hidden & {"numpy", "pyarrow", "PIL", "rich"}
    done = run_without(hidden, tmp_path, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage:" in done.stdout


# --- each extra of README's table alone, with the commands that the docs give it ------------------

READ = """
import numpy as np, shardset
with shardset.Writer("written", samples_per_shard=10) as writer:
    writer.write(image=np.zeros((8, 8, 3), np.uint8), label=0)
assert shardset.open("written")[0].image.shape == (8, 8, 3)
assert len([*shardset.Stream("set", "train", batch_size=8, image_size=8)]) == 7
"""
BUILT, SET = "--source=folder --input=photos --output=shards", "--manifest=set --run-dir=run"
COMMANDS = {
    "read": ["read"],
    "pipelines": [
        f"pipelines build {BUILT} --num-shards=2 --holdout=test=0.2 --direct_num_workers=2",
        "pipelines verify shards --deep",
        "pipelines repair shards",
        *(f"pipelines {verb} shards" for verb in ("inspect", "estimate", "report")),
        "pipelines export shards --to=wids,hf",
        "pipelines view few.parquet --of=shards --per-class=2",
        "pipelines adopt --input=tars --split=train",
        "pipelines column set ids --from=ids.npy --split=train",
        "pipelines column set logits --from=tars",
        "pipelines append shards --source=folder --input=more",
        "pipelines tag shards first",
        "pipelines log shards",
        "pipelines diff shards@1 shards",
        "pipelines compact shards --drop-keys=keys.txt",
    ],
    "trainer": [
        f"trainer train {SET} --epochs=1 --record-losses",
        "trainer evaluate --run-dir=run",
        "trainer explain --run-dir=run --step=0",
        "trainer merge-logs --run-dir=run",
        f"trainer doctor {SET}",
        f"trainer bench-input {SET}",
        "trainer report run",
        "trainer export run --output=model",
        "trainer predict --from=model photos/cat/000.png",
        "trainer job --compute-type=v6e-16 --image=i --manifest=gs://b/set --run-dir=gs://b/run",
    ],
    "trainer,tpu": [f"trainer train {SET} --epochs=1 --strategy=spmd"],
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with what the commands read."""
    shard_set(tmp_path / "set")
    write_class_folders(tmp_path / "photos", ["cat", "dog"], 12)
    write_class_folders(tmp_path / "more", ["owl"], 4)
    (tmp_path / "tars").mkdir()
    values = [(f"train-{serial:06d}.npy", npy(np.zeros(3))) for serial in range(NUM_TRAIN)]
    (tmp_path / "tars/t-0.tar").write_bytes(tar_bytes(values))
    np.save(tmp_path / "ids.npy", np.arange(NUM_TRAIN, dtype=np.float32)[:, None])
    (tmp_path / "keys.txt").write_text("cat/000")
    (tmp_path / "read.py").write_text(READ)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    return tmp_path


def check_commands(extra: str, run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    for command in COMMANDS[extra]:
        done = run(*command.split())
        assert done.returncode == 0, (command, done.stdout, done.stderr)


def test_the_commands_of_an_extra_are_all_that_the_programs_have():
    text = (REPOSITORY / "README.md").read_text()
    assert re.findall(r"\| `pip install 'shardset\[([\w,]+)\]'`", text) == [*COMMANDS]
    for program, parser in {"pipelines": parsers.parser(), "trainer": cli.parser()}.items():
        verbs = {verb for action in parser.actions for verb in action.choices or ()}
        tried = {command.split()[1] for command in COMMANDS[program]}
        assert tried == verbs - {"tpu"}  # which needs gcloud


@pytest.mark.slow
@pytest.mark.parametrize("extra", COMMANDS)
def test_an_extra_alone_has_all_that_its_commands_import(extra, place):
    hidden = hidden_without(*extra.split(","))
    heavy = {
        "read": "torch apache_beam jinja2",
        "pipelines": "torch cv2 simplejpeg",
        "trainer": "apache_beam torch_xla",
    }
    assert {*heavy.get(extra, "apache_beam").split()} <= hidden
    check_commands(extra, partial(run_without, hidden, place))


@pytest.mark.nightly
@pytest.mark.parametrize("extra", COMMANDS)
def test_an_extra_alone_in_a_fresh_environment_has_all_that_its_commands_import(extra, place):
    home, source = place / "environment", place / "source"
    for name in ("shardset", "pipelines", "trainer"):
        shutil.copytree(REPOSITORY / name, source / name)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, home], check=True)
    words = ["pip", "install", "--quiet", "--python", home / "bin/python", f"{source}[{extra}]"]
    subprocess.run([*uv, *words], check=True)
    shutil.rmtree(source)
    run = partial(subprocess.run, capture_output=True, text=True, cwd=place)
    check_commands(extra, lambda *words: run([home / "bin/python", "-m", *words]))


@pytest.mark.parametrize(
    ("words", "library"),
    [
        (
            "pipelines build --source folder --input in --output out --direct_num_workers=2",
            "apache_beam",
        ),
        ("trainer train --recipe digits_smoke --fake-data --run-dir run", "torch"),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_the_extra_that_brings_it(
    words, library, tmp_path
):
    done = run_without({library}, tmp_path, *words.split())
    assert done.returncode == 1
    assert f"the library {library} is not installed" in done.stderr
    assert f"pip install 'shardset[{words.split()[0]}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stream_of_bytes_needs_no_opencv(tmp_path):
    samples = [image_sample("train", serial, bytes(50_000), "png", 10) for serial in range(4)]
    write_shard_set(open_storage(str(tmp_path / "set")), {"train": samples})
    read = (
        "shardset.Stream('set', 'train', batch_size=2, image=None, fields=('png',), num_threads=2)"
    )
    (tmp_path / "read.py").write_text(
        f"import shardset\nprint(sum(len(each['png'][0]) for each in {read}))\n"
    )
    done = run_without({"cv2"}, tmp_path, "read")
    assert (done.stdout, done.returncode) == ("100000\n", 0), done.stderr


@pytest.mark.parametrize(
    ("adapter", "library"),
    [
        ("torch", "torch"),
        ("grain", "grain"),
        ("jax", "jax"),
        ("webdataset", "simplejpeg"),
    ],
)
def test_an_adapter_without_a_library_names_its_extra(adapter, library, tmp_path):
    done = run_without({library}, tmp_path, f"shardset.adapters.{adapter}")
    said = done.stderr.splitlines()[-1]
    assert said.startswith(
        f"shardset.errors.MissingLibrary: the library {library} is not installed"
    )
    assert f"`pip install 'shardset[{adapter}]'` brings it" in said


def test_a_missing_library_is_an_import_error_and_a_missing_module_of_ours_stays_one():
    with pytest.raises(ImportError, match=r"shardset\[grain\]") as missing, brought_by("grain"):
        importlib.import_module("no_such_library")
    assert isinstance(missing.value, ShardsetError)
    assert missing.value.name == "no_such_library"
    with (
        pytest.raises(ModuleNotFoundError, match=r"^No module named 'shardset\.none'$"),
        brought_by("grain"),
    ):
        importlib.import_module("shardset.none")
