"""What runs with which requirements: a program started with all other libraries hidden, in its workers too."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

from shardset.errors import ShardsetError, brought_by
from shardset.storage.open import open_storage
from tests.makers.folders import write_class_folders
from tests.makers.shardset import image_sample, write_shard_set

REPOSITORY = Path(__file__).parent.parent

HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def requirements(*extras: str) -> list[str]:
    """The distributions that setup.py names for the base and these extras."""
    lists: dict[str, list[str]] = {}
    text = (REPOSITORY / "setup.py").read_text()
    exec(text[text.index("BASE = ") : text.index("setup(")], lists)
    return [spec for name in ("BASE", *extras) for spec in lists[name]]


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
            each.partition(";")[0] for each in theirs
            if "extra" not in each.partition(";")[2] or any(one in each.replace("'", "\"") for one in wanted)
        ]  # fmt: skip
    return {name.partition("[")[0] for name in brought}


def hidden_by(allowed: set[str]) -> set[str]:
    """The libraries that are installed here and come with other distributions than the allowed ones."""
    libraries = metadata.packages_distributions()
    names = {
        library: {re.sub(r"[-_.]+", "-", name).lower() for name in distributions}
        for library, distributions in libraries.items()
    }
    ours = {"shardset", "pipelines", "trainer"}
    return {library for library, distributions in names.items() if not distributions & allowed} - ours


def run_without(hidden: set[str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "hide").mkdir(exist_ok=True)
    (folder / "hide/sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    path = os.pathsep.join([str(folder / "hide"), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.parametrize("words", [("pipelines", "estimate", "--help"), ("trainer", "train", "--help")])
def test_help_needs_the_base_requirements_only(words, tmp_path):
    hidden = hidden_by(with_theirs(requirements()))
    assert {"apache_beam", "torch", "jinja2", "cv2", "scipy"} <= hidden
    assert not hidden & {"numpy", "pyarrow", "PIL", "rich"}
    done = run_without(hidden, tmp_path, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage:" in done.stdout


@pytest.mark.slow
def test_a_build_needs_nothing_but_the_requirements_of_the_pipelines(tmp_path):
    hidden = hidden_by(with_theirs(requirements("PIPELINES")))
    assert {"torch", "torchvision", "timm", "webdataset", "cv2", "simplejpeg", "pandas", "datasets"} <= hidden
    write_class_folders(tmp_path / "photos", ["cat", "dog"], 6)
    where = ["--source=folder", "--input=photos", "--output=shards", "--holdout=test=0.1"]
    done = run_without(hidden, tmp_path, "pipelines", "build", *where, "--direct_num_workers=2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "shards/report.html").exists()
    for words in (["verify", "shards", "--deep"], ["inspect", "shards"], ["estimate", "shards"]):
        done = run_without(hidden, tmp_path, "pipelines", *words)
        assert done.returncode == 0, done.stderr


def test_a_hidden_library_is_hidden_from_a_program_and_its_workers(tmp_path):
    done = run_without({"apache_beam"}, tmp_path, "pipelines", "build", "--source=x", "--input=y", "--output=z")
    assert "the library apache_beam is not installed" in done.stderr
    assert "pip install 'shardset[pipelines]'" in done.stderr


def test_a_stream_of_bytes_needs_no_opencv(tmp_path):
    samples = [image_sample("train", serial, bytes(50_000), "png", 10) for serial in range(4)]
    write_shard_set(open_storage(str(tmp_path / "set")), {"train": samples})
    read = "shardset.Stream('set', 'train', batch_size=2, image=None, fields=('png',), num_threads=2)"
    (tmp_path / "read.py").write_text(f"import shardset\nprint(sum(len(each['png'][0]) for each in {read}))\n")
    done = run_without({"cv2"}, tmp_path, "read")
    assert (done.stdout, done.returncode) == ("100000\n", 0), done.stderr


@pytest.mark.parametrize(
    ("adapter", "library"),
    [("torch", "torch"), ("grain", "grain"), ("jax", "jax"), ("huggingface", "datasets"), ("webdataset", "simplejpeg")],
)
def test_an_adapter_without_a_library_names_its_extra(adapter, library, tmp_path):
    done = run_without({library}, tmp_path, f"shardset.adapters.{adapter}")
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"shardset.errors.MissingLibrary: the library {library} is not installed")
    assert f"`pip install 'shardset[{adapter}]'` brings it" in said


def test_a_missing_library_is_an_import_error_and_a_missing_module_of_ours_stays_one():
    with pytest.raises(ImportError, match=r"shardset\[grain\]") as missing, brought_by("grain"):
        importlib.import_module("no_such_library")
    assert isinstance(missing.value, ShardsetError)
    assert missing.value.name == "no_such_library"
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'shardset\.none'$"), brought_by("grain"):
        importlib.import_module("shardset.none")
