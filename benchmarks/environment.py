"""The Python environment of the peers, and a description of this machine."""

import os
import platform
import subprocess
from pathlib import Path

from scripts import venvs

REPOSITORY = Path(__file__).parent.parent
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
PEERS = REPOSITORY / ".tools" / "bench-venv"


def peers_python() -> str:
    """The interpreter of the peers. Installs their environment again if requirements changed (6 GB, mostly torch)."""
    return str(venvs.install(PEERS, REQUIREMENTS, on_top=False))


def versions(python: str, names: list[str]) -> dict[str, str]:
    """The installed versions of distributions in the environment of an interpreter."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run([python, "-c", code, *names], check=True, capture_output=True, text=True).stdout
    return dict(zip(names, found.split(), strict=True))


def machine() -> str:
    """Cores, memory and processor, as a few words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, {_processor()}, Python {platform.python_version()}"


def commit() -> str:
    """The commit of the working tree."""
    words = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
