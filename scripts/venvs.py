"""Python environments beside the project's own.

python -m scripts.venvs peers       the other readers that tests compare with
python -m scripts.venvs frameworks  the frameworks whose recipes tests run
python -m scripts.venvs torch       the newest torch that the trainer is tested with
python -m scripts.venvs torchtpu    TorchTPU, on top of the newest torch: run it with the Python
                                    of that environment
"""

import argparse
import subprocess
import sys
import sysconfig
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
PEERS = REPOSITORY / ".tools" / "peers-venv"
REQUIREMENTS = REPOSITORY / "tests" / "peers" / "requirements.txt"
TORCH = REPOSITORY / ".tools" / "torch-venv"
NEWEST_TORCH = REPOSITORY / "tests" / "torch" / "requirements.txt"
TORCHTPU = REPOSITORY / ".tools" / "torchtpu-venv"
TORCHTPU_PACKAGES = REPOSITORY / "tests" / "torch" / "torchtpu.txt"
FRAMEWORKS = REPOSITORY / ".tools" / "frameworks-venv"
FRAMEWORK_PACKAGES = REPOSITORY / "tests" / "frameworks" / "requirements.txt"

ENVIRONMENTS = {
    "peers": (PEERS, REQUIREMENTS, True),
    "frameworks": (FRAMEWORKS, FRAMEWORK_PACKAGES, True),
    "torch": (TORCH, NEWEST_TORCH, True),
    "torchtpu": (TORCHTPU, TORCHTPU_PACKAGES, False),
}
"""The folder and the requirements of each, and whether what these require is installed too."""

_STAMP = ".requirements"


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def is_current(folder: Path, requirements: Path) -> bool:
    """Whether the environment holds what the file says."""
    stamp = folder / _STAMP
    return stamp.exists() and stamp.read_text() == requirements.read_text()


def install(folder: Path, requirements: Path, *, on_top: bool, deep: bool = True) -> Path:
    """The interpreter of an environment that holds the requirements, installed anew where they
    changed.

    With `on_top` it sees the packages of the environment that runs this (torch is not brought a
    second time); what it has itself comes first, so conflicting pins do no harm. Without `deep`,
    what they require in turn is left out.
    """
    python = python_of(folder)
    if not is_current(folder, requirements):
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        if on_top:
            _packages(python).joinpath("below.pth").write_text(
                "".join(f"{path}\n" for path in _own_packages())
            )
        options = ["--quiet", *([] if deep else ["--no-deps"])]
        subprocess.run(
            [str(python), "-m", "pip", "install", *options, "-r", str(requirements)], check=True
        )
        (folder / _STAMP).write_text(requirements.read_text())
    return python


def _own_packages() -> list[str]:
    """The folders of packages that this process sees: of its environment, and of the
    environment below it.
    """
    own = sysconfig.get_path("purelib")
    return [own, *(path for path in sys.path if Path(path).name == "site-packages" and path != own)]


def _packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(
        subprocess.run(
            [str(python), "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()
    )


def main() -> None:
    """`peers`, `frameworks`, `torch` or `torchtpu`."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.venvs",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(ENVIRONMENTS))
    folder, requirements, deep = ENVIRONMENTS[parser.parse_args().name]
    print(install(folder, requirements, on_top=True, deep=deep))


if __name__ == "__main__":
    main()
