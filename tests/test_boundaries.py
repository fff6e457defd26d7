"""Who may import what: three packages with two arrows between them, and one door for each heavy library."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("shardset", "pipelines", "trainer")
FILES = sorted(str(path.relative_to(REPOSITORY)) for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py"))

DOORS = {
    "shardset": ["shardset/*", "pipelines/*", "trainer/*"],
    "pipelines": ["pipelines/*"],
    "trainer": ["trainer/*"],
    "apache_beam": ["pipelines/pipeline.py", "pipelines/build.py", "pipelines/runners/*"],
    "jpegio": ["pipelines/images/jpeg_restart.py"],
    "google.cloud": ["shardset/storage/gcs*.py"],
    "google.auth": ["shardset/storage/gcs*.py"],
    "requests": ["shardset/storage/gcs*.py"],
    "urllib3": ["shardset/storage/gcs*.py"],
    "torch": ["trainer/*", "shardset/adapters/torch.py"],
    "datasets": ["shardset/adapters/huggingface.py"],
    "grain": ["shardset/adapters/grain.py"],
    "jax": ["shardset/adapters/jax.py"],
    "torchvision": ["trainer/*"],
    "timm": ["trainer/*"],
    "torch_xla": ["trainer/runtime/xla.py"],
    "onnx": ["trainer/tools/export.py"],
    "wandb": ["trainer/record/loggers.py"],
    "mlflow": ["trainer/record/loggers.py"],
    "webdataset": ["trainer/*", "shardset/adapters/webdataset.py"],
    "jinja2": ["shardset/html/page.py"],
}

DISTRIBUTIONS = {
    "PIL": "pillow",
    "apache_beam": "apache-beam",
    "cv2": "opencv-python-headless",
    "google": "google-cloud-storage",
    "google_crc32c": "google-crc32c",
    "grpc": "apache-beam",
    "jpegio": "pyjpegio",
    "kornia_rs": "kornia-rs",
    "mlflow": "mlflow-skinny",
    "yaml": "pyyaml",
}
"""By import name, where the distribution that brings it is called otherwise; the client of storage needs the last."""


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
    """Everything that runs only when a function is called; not its decorators, defaults and annotations."""
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
            assert node.level == 0, f"{file}:{node.lineno}: relative imports hide which package they name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (Import(file, node.lineno, name, node in late) for name in names)


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


IMPORTS = [found for file in FILES for found in imports_of(file)]


def environment_reads(tree: ast.Module) -> list[int]:
    """The lines that look at the environment when the module is imported."""
    late = late_nodes(tree)
    return [
        node.lineno
        for node in ast.walk(tree)
        if node not in late
        and isinstance(node, ast.Attribute | ast.Name | ast.alias)
        and (getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None))
        in ("environ", "environb", "getenv", "getenvb")
    ]


@pytest.mark.parametrize("library", DOORS)
def test_a_library_comes_in_through_its_door_only(library):
    found = [each for each in IMPORTS if each.is_of(library)]
    strangers = [str(each) for each in found if not any(fnmatch(each.file, door) for door in DOORS[library])]
    assert not strangers, f"{library} may be imported by {', '.join(DOORS[library])} only"


def test_the_command_line_imports_beam_in_functions_only():
    # Every other verb starts a second earlier for it.
    beam = ("pipelines.build", "pipelines.runners")
    found = [each for each in IMPORTS if each.file == "pipelines/cli.py" and any(map(each.is_of, beam))]
    assert found
    assert all(each.late for each in found)


@pytest.mark.parametrize("library", ["webdataset", "google.cloud.storage"])
def test_a_library_that_any_of_several_files_might_import_is_imported_by_one_at_most(library):
    assert len({each.file for each in IMPORTS if each.is_of(library)}) <= 1


def test_the_rules_see_imports_wherever_they_stand():
    lines = ("import a.b", "def f(x=c):", "    from d import e", "class G:", "    import h", "    async def i(self):")
    tree = ast.parse("\n".join([*lines, "        import j"]))
    late = late_nodes(tree)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [(node.lineno, node in late) for node in sorted(imports, key=lambda node: node.lineno)] == [
        (1, False), (3, True), (5, False), (7, True),
    ]  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_of_a_package_do_not_import_each_other_in_a_circle(package):
    modules = {module_of(file): file for file in FILES}
    graph: dict[str, set[str]] = {name: set() for name, file in modules.items() if file.startswith(f"{package}/")}
    names = {file: name for name, file in modules.items()}
    for each in IMPORTS:
        target = next((name for name in (each.name, each.name.rpartition(".")[0]) if name in graph), None)
        if names[each.file] in graph and target and target != names[each.file] and not each.late:
            graph[names[each.file]].add(target)
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph) > 3


def test_a_public_class_name_means_one_thing():
    files: dict[str, list[str]] = {}
    for file in FILES:
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(file)
    assert not {name: where for name, where in files.items() if len(where) > 1}


def requirements() -> dict[str, set[str]]:
    """The distributions that each package, and a worker, may count on, from setup.py."""
    lists = {
        node.targets[0].id: {
            re.split(r"[\[<>=; ]", ast.literal_eval(spec))[0].lower()
            for spec in node.value.elts
            if not isinstance(spec, ast.Starred)
        }
        for node in tree_of("setup.py").body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.List)
    }
    base, read = lists["BASE"], lists["BASE"] | lists["READ"]
    pipelines, trainer = base | lists["PIPELINES"], read | lists["TRAINER"]
    trainer |= lists["XLA"] | lists["EXPORT"] | lists["WANDB"] | lists["MLFLOW"]
    both = lists["PIPELINES"] & lists["TRAINER"]  # the templates of both reports
    return {"shardset": read | both, "pipelines": pipelines, "trainer": trainer, "worker": base}


def distributions_of(imports: Iterable[Import]) -> set[str]:
    """What brings the libraries that are no part of Python and not ours."""
    ours = {*sys.stdlib_module_names, *PACKAGES, "_typeshed"}
    return {DISTRIBUTIONS.get(top, top).lower() for top in {each.name.partition(".")[0] for each in imports} - ours}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_library_that_a_package_imports_is_among_its_requirements(package):
    found = [each for each in IMPORTS if each.file.startswith(f"{package}/") and "/adapters/" not in each.file]
    assert distributions_of(found) <= requirements()[package]


@pytest.mark.parametrize("file", FILES)
def test_nothing_reads_the_environment_when_it_is_imported(file):
    assert not environment_reads(tree_of(file)), f"{file}: read the environment in a function, where it is used"


@pytest.mark.parametrize(
    "code",
    [
        "X = os.environ['A']",
        "from os import getenv",
        "def f(x=os.getenv('A')): ...",
        "class A:\n    x = environ.get('B')",
    ],
)
def test_a_read_of_the_environment_at_import_would_be_seen(code):
    assert environment_reads(ast.parse(code))


def imported_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after running `code`."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def importing_all_of(package: str) -> str:
    wanted = [file for file in FILES if file.startswith(f"{package}/") and "/adapters/" not in file]
    return "\n".join(f"import {module_of(file)}" for file in wanted)


def test_importing_the_contract_brings_neither_beam_nor_torch_nor_google_s_client():
    found = imported_after("import shardset, shardset.order.epoch, shardset.storage.base, shardset.format.tar")
    heavy = ("apache_beam", "torch", "torch_xla", "webdataset", "google.cloud.storage", "pipelines", "trainer")
    assert "shardset.format.manifest" in found
    assert not found & set(heavy)


ON_A_WORKER = (
    "shardset, shardset.order.epoch, shardset.storage.gcs, pipelines.pipeline, pipelines.build, pipelines.__main__"
)


def test_what_a_bare_worker_imports_needs_no_templates():
    assert "shardset.html.page" not in imported_after(f"import {ON_A_WORKER}")


def test_what_a_bare_worker_imports_comes_with_the_base_requirements_or_with_beam():
    loaded = imported_after(f"import {ON_A_WORKER}")
    assert "pipelines.sources.cifar" in loaded
    found = {each for each in IMPORTS if not each.late and module_of(each.file) in loaded}
    assert distributions_of(found) <= {*requirements()["worker"], "apache-beam"}


def test_importing_every_module_of_the_contract_brings_neither_beam_nor_torch():
    found = imported_after(importing_all_of("shardset"))
    assert "google.cloud.storage" in found
    assert not found & {"apache_beam", "torch", "torch_xla", "webdataset", "pipelines", "trainer"}


def test_the_verbs_that_only_read_come_up_without_beam():
    modules = ("__main__", "check.verify", "check.inspect", "estimate.estimate", "sources", "write.shard")
    assert "apache_beam" not in imported_after(f"import {', '.join(f'pipelines.{name}' for name in modules)}")


def test_importing_every_module_that_writes_brings_no_torch():
    found = imported_after(importing_all_of("pipelines"))
    assert "apache_beam" in found
    assert not found & {"torch", "torch_xla", "webdataset", "trainer"}


def test_importing_the_read_path_brings_no_torch():
    found = imported_after("import shardset.stream.stream")
    assert "shardset.read.remote" in found
    assert not found & {"apache_beam", "torch", "torch_xla", "pipelines"}


def test_importing_every_module_of_the_trainer_brings_neither_beam_nor_torch_xla():
    found = imported_after(importing_all_of("trainer"))
    assert "torch" in found
    assert not found & {"apache_beam", "torch_xla", "pipelines"}
