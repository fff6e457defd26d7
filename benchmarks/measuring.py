"""Runs a command and measures it from outside: time, CPU time, memory of the largest process, first byte written."""

import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
LOOK_S = 0.5
"""Between two looks at all processes, whose dozens of threads cost milliseconds each time."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class FailedRun(RuntimeError):
    """A command that ended with another code than 0; the message ends with what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a command. `first_byte_s` is None where it wrote nothing; `peak_bytes` is of the largest process.

    `cpu_s` is of all its processes: what the system accounts for those that were waited for, or, where that is more,
    what was last seen of each.
    """

    seconds: float
    cpu_s: float
    peak_bytes: int
    first_byte_s: float | None
    num_bytes: int


def watch(words: Sequence[str], output: Path, log: Path, environment: Mapping[str, str]) -> Run:
    """Runs a command that writes below `output`; raises FailedRun if it fails. What stands in `plan/` is no output."""
    started = time.perf_counter()
    with log.open("wb") as printed:
        process = subprocess.Popen(words, stdout=printed, stderr=printed, env={**os.environ, **environment})
    peak, first_byte, look_at = 0, None, started
    seen: dict[int, float] = {}
    ended = os.pidfd_open(process.pid)
    while not select.select([ended], [], [], POLL_S)[0]:
        if time.perf_counter() >= look_at:
            look_at += LOOK_S
            processes = list(family(process.pid))
            peak = max([peak, *map(peak_bytes_of, processes)])
            seen |= {pid: spent for pid in processes if (spent := _cpu_s(pid))}
        if first_byte is None and size_of(output):
            first_byte = time.perf_counter() - started
    seconds = time.perf_counter() - started
    os.close(ended)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise FailedRun(f"{' '.join(words)}: code {process.returncode}\n{log.read_text(errors='replace')[-3000:]}")
    return Run(
        seconds=seconds,
        cpu_s=max(usage.ru_utime + usage.ru_stime, sum(seen.values())),
        peak_bytes=peak,
        first_byte_s=first_byte,
        num_bytes=size_of(output),
    )


def size_of(folder: Path) -> int:
    """The bytes of all files below a folder, those in `plan/` left out; files may come and go meanwhile."""
    total = 0
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "plan"]
        total += sum(map(_size, (os.path.join(path, name) for name in names)))
    return total


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield from family(int(child))
    except (FileNotFoundError, ProcessLookupError):
        return


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def peak_bytes_of(pid: int) -> int:
    """The most memory that a process has had resident; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
