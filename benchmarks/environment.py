"""The Python environment of the peers, a description of this machine, and the marks of pages."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from scripts import venvs

REPOSITORY = Path(__file__).parent.parent
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
PEERS = REPOSITORY / ".tools" / "bench-venv"


def peers_python() -> str:
    """The interpreter of the peers.

    Installs their environment again if requirements changed (6 GB, mostly torch).
    """
    return str(venvs.install(PEERS, REQUIREMENTS, on_top=False))


def versions(python: str, names: list[str]) -> dict[str, str]:
    """The installed versions of distributions in the environment of an interpreter."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run(
        [python, "-c", code, *names], check=True, capture_output=True, text=True
    ).stdout
    return dict(zip(names, found.split(), strict=True))


def machine() -> str:
    """Cores, memory and processor, as a few words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
    return (
        f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, {processor}, Python"
        f" {platform.python_version()}"
    )


def commit() -> str:
    """The commit of the working tree; `unknown` in a copy without one."""
    words = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"


def today() -> str:
    """The date, the machine and the commit: the head of every table."""
    return f"{datetime.now(UTC).date()}, {machine()}, commit {commit()}"


def write_between(page: Path, name: str, content: str) -> None:
    """Replaces what is between `<!-- NAME -->` and the next `<!-- end -->` of a page; ends the
    program without them.
    """
    before, mark, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not end:
        raise SystemExit(f"{page} has no lines '<!-- {name} -->' and '<!-- end -->' for a table")
    page.write_text(before + mark + content + end + after)


def show(tables: dict[str, str], page: Path | None) -> None:
    """Prints tables by name, and replaces those of a page if there is one."""
    for name, table in tables.items():
        print(table)
        if page:
            write_between(page, name, table)
