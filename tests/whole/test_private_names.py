"""The private names of libraries that the product uses: each is still there, and no other one is
used.
"""

import ast
import importlib.metadata
from pathlib import Path

import pytest

from tests.makers.documented import REPOSITORY

BEAM, HANDLERS = "apache_beam", "apache_beam/runners/portability/fn_api_runner/worker_handlers.py"

# distribution, the version that it was seen in, file, the file of ours that uses it: how each name
# is defined there
USED: dict = {
    ("apache-beam", "2.77.0", HANDLERS, "runners/local.py"): (
        "self._futures_by_id =",
        "def register_environment(",
        "class SubprocessSdkWorkerHandler(",
    ),
    ("apache-beam", "2.77.0", f"{BEAM}/runners/worker/sdk_worker_main.py", "runners/local.py"): (
        "def main(",
    ),
    ("torch", "2.9.1", "torch/nn/modules/batchnorm.py", "trainer/runtime/xla.py"): (
        "class _BatchNorm(",
    ),
    ("torch", "2.9.1", "torch/_C/_VariableFunctions.pyi", "trainer/model/learner.py"): (
        "def _foreach_lerp_(",
        "def _foreach_copy_(",
    ),
    ("pillow", "12.3.0", "PIL/Image.py", "shardset/format/images/pillow.py"): (
        "return self._size",
    ),
}
OF_PYTHON = {
    "_ActionsContainer",
    "_ArgumentGroup",
    "_asdict",
    "_exit",
    "_replace",
    "_typeshed",
}
OURS = {"_find_device", "_full", "_objects"}


def missing(distribution: str, seen: str, file: str, user: str, definition: str) -> str | None:
    """The sentence for a name that is gone; None if it is there."""
    installed = importlib.metadata.distribution(distribution)
    path = Path(str(installed.locate_file(file)))
    if path.is_file() and definition in path.read_text():
        return None
    return (
        f"{distribution} {installed.version} has moved {definition!r} out of {file} ({seen} had"
        f" it); see {user}"
    )


@pytest.mark.parametrize("place", USED)
def test_the_private_names_of_a_library_are_still_there(place):
    try:
        sentences = [missing(*(*place, definition)) for definition in USED[place]]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{place[0]} is not installed")
    assert not any(sentences), sentences


def private_names(tree: ast.Module) -> set[str]:
    """Names that begin with one underscore, imported, or reached through anything but `self` and
    `cls`.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names.update(
                part for alias in node.names for part in f"{node.module}.{alias.name}".split(".")
            )
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_every_private_name_that_is_used_is_in_the_table():
    listed = " ".join(f"{place[2]} {definitions}" for place, definitions in USED.items())
    files = [
        path
        for name in ("shardset", "pipelines", "trainer")
        for path in (REPOSITORY / name).rglob("*.py")
    ]
    used = {(name, path) for path in files for name in private_names(ast.parse(path.read_text()))}
    strangers = {
        f"{path}: {name}"
        for name, path in used
        if name not in OF_PYTHON | OURS and name not in listed
    }
    assert not strangers
