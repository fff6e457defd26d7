"""`import shardset` as a user meets it: the base requirements suffice, and the reader says what it
lacks.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import shardset

ROOT = Path(__file__).parents[2]
DECODERS = ("cv2", "kornia_rs", "pyspng", "simplejpeg")
EXTRAS = (
    *DECODERS,
    "apache_beam",
    "jinja2",
    "jpegio",
    "scipy",
    "timm",
    "torch",
    "torchvision",
    "webdataset",
)


def run_without(libraries: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """What a fresh interpreter prints that can import none of the libraries."""
    block = f"import sys; sys.modules.update(dict.fromkeys({libraries!r}))"
    return subprocess.run(
        [sys.executable, "-c", f"{block}\n{code}"], cwd=ROOT, capture_output=True, text=True
    )


def test_importing_the_library_needs_the_base_requirements_only():
    done = run_without(
        EXTRAS, "import shardset; print(shardset.Manifest, shardset.open_storage('memory://a').url)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" memory://a\n")


def test_the_reader_comes_with_its_extra_and_without_the_others():
    others = tuple(name for name in EXTRAS if name not in DECODERS)
    done = run_without(others, "import shardset; print(shardset.Stream, shardset.ImageSpec)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["Stream", "ImageSpec"])
def test_without_a_decoder_the_reader_names_the_extra(name):
    done = run_without(DECODERS, f"from shardset import {name}")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("shardset.errors.MissingLibrary: the library ")
    assert "`pip install 'shardset[read]'`" in last


@pytest.mark.parametrize("name", shardset.__all__)
def test_every_public_name_is_there(name):
    assert getattr(shardset, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'shardset' has no attribute 'Streams'"):
        shardset.Streams  # noqa: B018
