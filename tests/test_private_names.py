"""The private names of libraries that the product uses: each is still there, and no other one is
used.
"""

import ast
import importlib.metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
BEAM, HANDLERS = "apache_beam", "apache_beam/runners/portability/fn_api_runner/worker_handlers.py"

# distribution, the version that it was seen in, file, how it is defined there, the file of ours
# that uses it
USED = [
    (
        "apache-beam",
        "2.77.0",
        f"{BEAM}/options/pipeline_options.py",
        "class _BeamArgumentParser(",
        "runners/options.py",
    ),
    (
        "apache-beam",
        "2.77.0",
        f"{BEAM}/options/pipeline_options.py",
        "def _add_argparse_args(",
        "runners/options.py",
    ),
    ("apache-beam", "2.77.0", HANDLERS, "self._futures_by_id =", "runners/local.py"),
    ("apache-beam", "2.77.0", HANDLERS, "def register_environment(", "runners/local.py"),
    ("apache-beam", "2.77.0", HANDLERS, "class SubprocessSdkWorkerHandler(", "runners/local.py"),
    (
        "apache-beam",
        "2.77.0",
        f"{BEAM}/runners/worker/sdk_worker_main.py",
        "def main(",
        "runners/local.py",
    ),
    (
        "google-cloud-core",
        "2.8.0",
        "google/cloud/client/__init__.py",
        "def _http(self)",
        "shardset/storage/gcs_http.py",
    ),
    (
        "torch_xla",
        "2.9.0",
        "torch_xla/_internal/tpu.py",
        "def num_available_chips(",
        "trainer/runtime/xla.py",
    ),
    (
        "torch_xla",
        "2.9.0",
        "torch_xla/_internal/tpu.py",
        "def get_worker_ips(",
        "trainer/runtime/xla.py",
    ),
    (
        "torch_xla",
        "2.9.0",
        "torch_xla/_internal/tpu.py",
        "def worker_id(",
        "trainer/runtime/xla.py",
    ),
    ("torch", "2.9.1", "torch/utils/_pytree.py", "def tree_map_only(", "trainer/runtime/base.py"),
    (
        "torch",
        "2.9.1",
        "torch/nn/modules/batchnorm.py",
        "class _BatchNorm(",
        "trainer/model/build.py",
    ),
    (
        "torch",
        "2.9.1",
        "torch/_C/_VariableFunctions.pyi",
        "def _foreach_lerp_(",
        "trainer/model/learner.py",
    ),
    (
        "torch",
        "2.9.1",
        "torch/_C/_VariableFunctions.pyi",
        "def _foreach_copy_(",
        "trainer/model/learner.py",
    ),
    (
        "torch",
        "2.9.1",
        "torch/_C/_distributed_c10d.pyi",
        "class TCPStore(Store)",
        "trainer/runtime/distributed.py",
    ),
    (
        "timm",
        "1.0.31",
        "timm/optim/_optim_factory.py",
        "def create_optimizer_v2(",
        "trainer/model/build.py",
    ),
    (
        "timm",
        "1.0.31",
        "timm/optim/_optim_factory.py",
        "def get_optimizer_info(",
        "trainer/model/build.py",
    ),
    (
        "timm",
        "1.0.31",
        "timm/optim/_optim_factory.py",
        "def list_optimizers(",
        "trainer/model/build.py",
    ),
]
OF_PYTHON = {
    "_ActionsContainer",
    "_ArgumentGroup",
    "_SubParsersAction",
    "_Unpickler",
    "_asdict",
    "_csv",
    "_exit",
    "_getframe",
    "_replace",
    "_typeshed",
}
OURS = {"_find_device", "_full", "_objects"}


def missing(distribution: str, seen: str, file: str, definition: str, user: str) -> str | None:
    """The sentence for a name that is gone; None if it is there."""
    installed = importlib.metadata.distribution(distribution)
    path = Path(str(installed.locate_file(file)))
    if path.is_file() and definition in path.read_text():
        return None
    return (
        f"{distribution} {installed.version} has moved {definition!r} out of {file} ({seen} had"
        f" it); see {user}"
    )


@pytest.mark.parametrize(("distribution", "seen", "file", "definition", "user"), USED)
def test_a_private_name_of_a_library_is_still_there(distribution, seen, file, definition, user):
    try:
        sentence = missing(distribution, seen, file, definition, user)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")
    assert sentence is None, sentence


def test_a_name_that_moved_is_said_in_one_sentence():
    sentence = missing("apache-beam", "2.1", HANDLERS, "class _NotThere(", "runners/local.py")
    version = importlib.metadata.version("apache-beam")
    assert (
        sentence
        == f"apache-beam {version} has moved 'class _NotThere(' out of {HANDLERS} (2.1 had it); see"
        " runners/local.py"
    )


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
    listed = " ".join(f"{file} {definition}" for _, _, file, definition, _ in USED)
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
