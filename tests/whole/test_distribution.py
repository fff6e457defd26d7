"""What is handed out: a source distribution with the docs and the tests, and a wheel with the
packages' own files.
"""

import email
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.makers.documented import REPOSITORY

PACKAGES = ("shardset", "pipelines", "trainer")
FOLDERS = (*PACKAGES, "benchmarks", "docs", "examples", "scripts", "tests")
FILES = {
    ".dockerignore",
    "mkdocs.yml",
    "pyproject.toml",
    "setup.py",
    *(path.name for path in REPOSITORY.glob("[A-Z]*") if path.is_file()),
}


def files_of(root: Path, *folders: str) -> set[str]:
    found = (path for folder in folders for path in (root / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(root)) for path in found}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A copy of the tree, a distribution built from it, and what a wheel would hold."""
    root = tmp_path_factory.mktemp("built")
    tree, lib = root / "tree", root / "lib"
    for folder in FOLDERS:
        shutil.copytree(
            REPOSITORY / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in FILES:
        shutil.copy(REPOSITORY / file, tree)
    (tree / "tests/left.pyc").touch()
    words = [sys.executable, "setup.py", "sdist", "-d", root, "build_py", "--build-lib", lib]
    subprocess.run(words, cwd=tree, check=True, capture_output=True)
    (tree / "tests/left.pyc").unlink()
    with tarfile.open(next(root.glob("*.tar.gz"))) as archive:
        archive.extractall(root, filter="data")
    return tree, next(root.glob("shardset-*/")), lib


def test_the_source_distribution_has_all_files_of_the_tree(built):
    tree, source, _ = built
    expected = files_of(tree, *FOLDERS) | FILES
    assert {
        "docs/explanation/reader.md",
        "tests/data/shardset/manifest.json",
        "shardset/py.typed",
    } < expected
    found = {name for name in files_of(source, ".") if ".egg-info/" not in name}
    assert found - {"PKG-INFO", "setup.cfg"} == expected


def test_the_source_distribution_has_the_files_that_its_tests_read(built):
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("*.py"))
    read = {*re.findall(r'(?:REPOSITORY|ROOT) / "([^"/]+)', tests)} - {".tools"}
    assert {"Dockerfile", "README.md", "setup.py"} < read
    assert {name for name in read if not (built[1] / name).exists()} == set()


def test_a_wheel_has_all_files_of_the_packages_and_no_others(built):
    tree, _, lib = built
    assert files_of(lib, ".") == files_of(tree, *PACKAGES)


def test_the_metadata_say_whose_it_is_and_where(built):
    metadata = email.message_from_string((built[1] / "PKG-INFO").read_text())
    assert metadata["Author"] == "shardset maintainers"
    assert {url.partition(",")[0] for url in metadata.get_all("Project-URL")} >= {
        "Documentation",
        "Changes",
        "Issues",
    }
    assert "Typing :: Typed" in metadata.get_all("Classifier")
