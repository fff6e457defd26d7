"""Who may import what: two arrows between three packages, floors of folders, one door for each
heavy library.
"""

import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

from tests.makers.documented import REPOSITORY, lists_of_project, run
from tests.makers.shardset import encode, image_sample, new_set

PACKAGES = ("shardset", "pipelines", "trainer")
FILES = sorted(
    str(path.relative_to(REPOSITORY))
    for name in PACKAGES
    for path in (REPOSITORY / name).rglob("*.py")
)

DOORS = {
    "shardset": ["shardset/*", "pipelines/*", "trainer/*"],
    "pipelines": ["pipelines/*"],
    "trainer": ["trainer/*"],
    "apache_beam": [
        "pipelines/pipeline.py",
        "pipelines/build.py",
        "pipelines/runners/*",
        "pipelines/transforms/*",
    ],
    "jpegio": ["pipelines/images/restart_markers.py"],
    "google.cloud": ["shardset/storage/gcs*.py"],
    "google.auth": ["shardset/storage/gcs*.py"],
    "requests": [
        "shardset/storage/gcs*.py",
        "shardset/storage/https.py",
        "shardset/storage/served.py",
    ],
    "urllib3": ["shardset/storage/served.py"],
    "obstore": ["shardset/storage/s3.py"],
    "pytest": ["shardset/testing.py"],
    "torch": ["trainer/*", "shardset/adapters/torch.py"],
    "duckdb": ["pipelines/sets/view_maker.py"],
    "grain": ["shardset/adapters/grain.py"],
    "jax": ["shardset/adapters/jax.py"],
    "torchvision": ["trainer/*"],
    "timm": ["trainer/*"],
    "torch_xla": ["trainer/runtime/xla.py"],
    "onnx": ["trainer/tools/export.py"],
    "wandb": ["trainer/telemetry/loggers.py"],
    "webdataset": ["trainer/*", "shardset/adapters/webdataset.py"],
    "jinja2": ["shardset/html/page.py"],
}

FLOORS = {
    "shardset": ["errors", "order", "storage", "format", "read", "decode", "stream", "adapters"],
    "pipelines": [
        *("images", "config", "sources", "plan", "write", "build", "transforms", "sets", "cli"),
    ],
    "trainer": [
        "config",
        "run_folder",
        "runtime",
        "data",
        "telemetry",
        "model",
        "run",
        "loop",
        "tools",
        "tpu",
        "cli",
    ],
}
"""From the lowest up: a folder or module imports from those below it.

Others stand wherever no circle arises.
"""

DISTRIBUTIONS = {
    "PIL": "pillow",
    "apache_beam": "apache-beam",
    "cv2": "opencv-python-headless",
    "google": "google-cloud-storage",
    "google_crc32c": "google-crc32c",
    "grpc": "apache-beam",
    "jpegio": "pyjpegio",
    "kornia_rs": "kornia-rs",
    "yaml": "pyyaml",
}
"""By import name, where the distribution that brings it is called otherwise; the client of storage
needs the last.
"""

OPTIONAL = ("shardset/adapters/", "shardset/storage/s3.py", "shardset/testing.py")
"""Each needs a library that the rest of its package does without."""


@dataclass(frozen=True)
class Import:
    """One imported name: `google.cloud.storage`; `late` if it happens when a function is called."""

    file: str
    line: int
    name: str
    late: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.name}"

    def is_of(self, library: str) -> bool:
        return self.name == library or self.name.startswith(f"{library}.")


def tree_of(file: str) -> ast.Module:
    return ast.parse((REPOSITORY / file).read_text(encoding="utf-8"), file)


def late_nodes(tree: ast.Module) -> set[ast.AST]:
    """Everything that runs only when a function is called; not its decorators, defaults and
    annotations.
    """
    bodies: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bodies += node.body
        elif isinstance(node, ast.Lambda):
            bodies.append(node.body)
    return {node for body in bodies for node in ast.walk(body)}


def imports_of(file: str) -> Iterator[Import]:
    tree = tree_of(file)
    late = late_nodes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{file}:{node.lineno}: relative imports hide which package they name"
            )
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (Import(file, node.lineno, name, node in late) for name in names)


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


IMPORTS = [found for file in FILES for found in imports_of(file)]
MODULES = {module_of(file): file for file in FILES}


def environment_reads(tree: ast.Module) -> list[int]:
    """The lines that look at the environment when the module is imported."""
    late = late_nodes(tree)
    return [
        node.lineno
        for node in ast.walk(tree)
        if node not in late
        and isinstance(node, ast.Attribute | ast.Name | ast.alias)
        and (
            getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
        )
        in ("environ", "environb", "getenv", "getenvb")
    ]


def test_a_library_comes_in_through_its_door_only():
    strangers = [
        f"{each}, which only {', '.join(doors)} may"
        for library, doors in DOORS.items()
        for each in IMPORTS
        if each.is_of(library) and not any(fnmatch(each.file, door) for door in doors)
    ]
    assert not strangers, "\n".join(strangers)
    # any of several files might import it, one does at most
    for library in ("webdataset", "google.cloud.storage"):
        assert len({each.file for each in IMPORTS if each.is_of(library)}) <= 1, library


def test_the_command_line_imports_beam_in_functions_only():
    # Every other verb starts a second earlier for it.
    beam = ("pipelines.build", "pipelines.runners")
    found = [
        each for each in IMPORTS if each.file == "pipelines/cli.py" and any(map(each.is_of, beam))
    ]
    assert found
    assert all(each.late for each in found)


def target_of(each: Import) -> str | None:
    """The module of ours that an import names."""
    return next(
        (name for name in (each.name, each.name.rpartition(".")[0]) if name in MODULES), None
    )


def folder_of(file: str) -> str:
    """The folder below the package, with what lies inside it; a module beside such folders is one
    of its own.
    """
    return module_of("/".join(Path(file).parts[:2]))


def test_folders_import_from_floors_below_them_only_and_modules_never_in_a_circle():
    modules: dict[str, set[str]] = {name: set() for name in MODULES}
    folders: dict[str, set[str]] = {folder_of(file): set() for file in FILES}
    for each in IMPORTS:
        target = target_of(each)
        if target is None or target == module_of(each.file):
            continue
        if not each.late:
            modules[module_of(each.file)].add(target)
        if folder_of(MODULES[target]) != folder_of(each.file):
            folders[folder_of(each.file)].add(folder_of(MODULES[target]))
    for package, floors in FLOORS.items():
        for below, above in itertools.pairwise(f"{package}.{floor}" for floor in floors):
            assert {below, above} <= folders.keys()
            folders[above].add(below)  # so an import that climbs closes a circle
    for graph in (modules, folders):
        # raises CycleError, which names it
        assert len(list(TopologicalSorter(graph).static_order())) == len(graph)


def test_a_public_class_name_means_one_thing():
    files: dict[str, list[str]] = {}
    for file in FILES:
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(file)
    assert not {name: where for name, where in files.items() if len(where) > 1}


def requirements() -> dict[str, set[str]]:
    """The distributions that each package, and a worker, may count on, from pyproject.toml."""
    lists = {
        name: {re.split(r"[\[<>=; ]", spec)[0].lower() for spec in specs}
        for name, specs in lists_of_project().items()
    }
    base, read = lists["base"], lists["base"] | lists["read"]
    pipelines, trainer = base | lists["pipelines"] | lists["sql"], read | lists["trainer"]
    trainer |= lists["xla"] | lists["export"] | lists["wandb"]
    both = lists["pipelines"] & lists["trainer"]  # the templates of both reports
    return {"shardset": read | both, "pipelines": pipelines, "trainer": trainer, "worker": base}


def distributions_of(imports: Iterable[Import]) -> set[str]:
    """What brings the libraries that are no part of Python and not ours."""
    ours = {*sys.stdlib_module_names, *PACKAGES, "_typeshed"}
    return {
        DISTRIBUTIONS.get(top, top).lower()
        for top in {each.name.partition(".")[0] for each in imports} - ours
    }


def test_every_library_that_a_package_imports_is_among_its_requirements():
    for package in PACKAGES:
        found = [
            each
            for each in IMPORTS
            if each.file.startswith(f"{package}/") and not each.file.startswith(OPTIONAL)
        ]
        assert distributions_of(found) <= requirements()[package]


def test_nothing_reads_the_environment_when_it_is_imported():
    reads = [f"{file}:{line}" for file in FILES for line in environment_reads(tree_of(file))]
    assert not reads, f"{', '.join(reads)}: read the environment in a function, where it is used"


def imported_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after running `code`."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    return set(run([sys.executable, "-c", script], REPOSITORY).split())


def importing_all_of(package: str) -> str:
    wanted = [
        file for file in FILES if file.startswith(f"{package}/") and not file.startswith(OPTIONAL)
    ]
    return "\n".join(f"import {module_of(file)}" for file in wanted)


HEAVY = ("apache_beam", "torch", "torch_xla", "webdataset", "google.cloud.storage")
CONTRACT = "shardset, shardset.order.epoch, shardset.storage.base, shardset.format.tar"
READS_ONLY = (
    "__main__",
    "check.verify",
    "check.inspect",
    "estimate.estimate",
    "sources",
    "write.shard",
)


@pytest.mark.parametrize(
    ("code", "brings", "allowed"),
    [
        (f"import {CONTRACT}", "shardset.format.manifest", ()),
        ("import shardset.stream.stream", "shardset.read.remote", ("google.cloud.storage",)),
        (importing_all_of("shardset"), "shardset.html.page", ("google.cloud.storage",)),
        (
            f"import {', '.join(f'pipelines.{name}' for name in READS_ONLY)}",
            "pipelines",
            ("google.cloud.storage",),
        ),
        (importing_all_of("pipelines"), "pipelines", ("google.cloud.storage", "apache_beam")),
        pytest.param(
            importing_all_of("trainer"),
            "trainer",
            ("google.cloud.storage", "torch", "webdataset"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "the contract",
        "the read path",
        "the library",
        "verbs that only read",
        "all that writes",
        "the trainer",
    ],
)
def test_importing_brings_no_heavy_library_that_it_does_not_need(code, brings, allowed):
    found = imported_after(code)
    assert brings in found
    others = {"pipelines", "trainer"} - {brings}
    assert not found & ({*HEAVY, *others} - {*allowed})


def test_a_first_batch_imports_nothing_slow_of_pyarrow(tmp_path):
    png = encode(np.zeros((8, 8, 3), np.uint8), "PNG")
    url = new_set([image_sample("train", 0, png, "png", 1)], tmp_path / "set", num_shards=1)
    read = f"next(iter(shardset.Stream({url!r}, 'train', batch_size=1, image_size=8)))"
    found = imported_after(f"import shardset\n{read}")
    assert "pyarrow.parquet" in found
    assert not found & {"pandas", "pyarrow.compute"}  # 0.3 s of 0.6


ON_A_WORKER = (
    "shardset, shardset.order.epoch, shardset.storage.gcs, pipelines.pipeline, pipelines.build,"
    " pipelines.__main__"
)


def test_what_a_bare_worker_imports_comes_with_the_base_requirements_or_with_beam():
    loaded = imported_after(f"import {ON_A_WORKER}")
    assert "pipelines.sources.cifar" in loaded
    assert "shardset.html.page" not in loaded  # its templates
    found = {each for each in IMPORTS if not each.late and module_of(each.file) in loaded}
    assert distributions_of(found) <= {*requirements()["worker"], "apache-beam"}


NAMES_THAT_STAND_TWICE = 8
TESTS_THAT_MIRROR_NOTHING = 0.05


def test_a_file_name_stands_once_with_few_exceptions():
    files: dict[str, list[str]] = {}
    for file in FILES:
        if not file.endswith(("__init__.py", "__main__.py")):
            files.setdefault(Path(file).name, []).append(file)
    twice = {name: found for name, found in files.items() if len(found) > 1}
    assert len(twice) <= NAMES_THAT_STAND_TWICE, twice


def mirrors(test: Path) -> bool:
    """Whether it is `test_c.py` or `test_c_ASPECT.py` of a module or package `c` in its folder."""
    words = test.stem.split("_")[1:]
    folder = REPOSITORY / test.parent.relative_to(REPOSITORY / "tests")
    modules = [folder / "_".join(words[:num]) for num in range(1, len(words) + 1)]
    return any(path.with_suffix(".py").exists() or path.is_dir() for path in modules)


def test_tests_are_where_their_module_is():
    tests = [path for name in PACKAGES for path in (REPOSITORY / "tests" / name).rglob("test_*.py")]
    strays = [str(path.relative_to(REPOSITORY)) for path in tests if not mirrors(path)]
    assert len(strays) <= TESTS_THAT_MIRROR_NOTHING * len(tests), (
        f"{strays}: name them after their module, or move them to tests/whole"
    )
    assert not list((REPOSITORY / "tests").glob("test_*.py")), "move them to tests/whole"
