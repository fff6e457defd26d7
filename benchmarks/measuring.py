"""Runs a command and measures it from outside: time, CPU time, memory of the largest process."""

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

LOOK_S = 0.5
"""Between two looks at all processes, whose dozens of threads cost milliseconds each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a command that wrote `num_bytes`; `peak_bytes` is of its largest process.

    `cpu_s` is of all its processes: what the system accounts for those that were waited for, or,
    where that is more, what was last seen of each.
    """

    seconds: float
    cpu_s: float
    peak_bytes: int
    num_bytes: int


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the text of a module, as it is written."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=text, formatter_class=raw)


def in_process(*words: str) -> Any:
    """What `python -m` these words prints in its last line, as JSON."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def watch(words: Sequence[str], output: Path, log: Path, environment: Mapping[str, str]) -> Run:
    """Runs a command that writes to `output`, except into `plan/`; RuntimeError, with its last
    output, if it fails.
    """
    started = time.perf_counter()
    with log.open("wb") as printed:
        process = subprocess.Popen(
            words, stdout=printed, stderr=printed, env={**os.environ, **environment}
        )
    peak = 0
    seen: dict[int, float] = {}
    ended = os.pidfd_open(process.pid)
    while not select.select([ended], [], [], LOOK_S)[0]:
        processes = list(family(process.pid))
        peak = max([peak, *map(peak_bytes_of, processes)])
        seen |= {pid: spent for pid in processes if (spent := cpu_s(pid))}
    seconds = time.perf_counter() - started
    os.close(ended)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(words)}: code"
            f" {process.returncode}\n{log.read_text(errors='replace')[-3000:]}"
        )
    written = (
        path
        for path in output.rglob("*")
        if path.is_file() and path.relative_to(output).parts[0] != "plan"
    )
    return Run(
        seconds=seconds,
        cpu_s=max(usage.ru_utime + usage.ru_stime, sum(seen.values())),
        peak_bytes=peak,
        num_bytes=sum(path.stat().st_size for path in written),
    )


def compare(
    what: str, commands: Mapping[str, tuple[Sequence[str], Path]], rounds: int, folder: Path
) -> None:
    """Prints the medians of whole processes, in turns, and what the first of them takes of each.

    `commands` are words and the checkout whose packages they import; what they write to
    `folder/output` is removed.
    """
    output = folder / "output"
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, (words, checkout) in commands.items():
            shutil.rmtree(output, ignore_errors=True)
            runs[name].append(watch(words, output, folder / "log.txt", of_checkout(checkout)))
    seconds = {name: median(run.seconds for run in found) for name, found in runs.items()}
    ours = next(iter(seconds.values()))
    print(
        f"| {what}, medians of {rounds} | seconds | processor time | this checkout takes, times |"
    )
    print("|---|---|---|---|")
    for name, found in runs.items():
        cpu = median(run.cpu_s for run in found)
        print(f"| {name} | {seconds[name]:.2f} | {cpu:.2f} | {ours / seconds[name]:.2f} |")


def of_checkout(checkout: Path) -> dict[str, str]:
    """The variables of a process that imports the packages of a checkout."""
    return {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"}


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield from family(int(child))
    except (FileNotFoundError, ProcessLookupError):
        return


def cpu_s(pid: int) -> float:
    """The processor time of a process, without its children; 0 once it is gone."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def peak_bytes_of(pid: int) -> int:
    """The most memory that a process has had resident; 0 once it is gone."""
    return _num_bytes(_read(pid, "status"), "VmHWM:")


def proportional_bytes(pid: int) -> int:
    """The memory of a process now, where memory that n processes share counts as 1/n; 0 once it is
    gone.
    """
    return _num_bytes(_read(pid, "smaps_rollup"), "Pss:")


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _num_bytes(text: str, title: str) -> int:
    return next(
        (int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(title)), 0
    )


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between, which may be written like 1e6."""
    return tuple(int(float(word)) for word in text.split(","))
