"""Whether this process is one of several: what launchers write into the environment, and what
libraries in use know.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardset.errors import ConfigError, require_int

_LAUNCHERS = {
    "WORLD_SIZE": "RANK",  # torchrun, accelerate, DeepSpeed
    # srun; SLURM_NTASKS is also set in a batch script that is one process
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",  # Open MPI
    "PMI_SIZE": "PMI_RANK",  # MPICH, Intel MPI
}
"""The variables that hold the number of processes and the number of this one."""

_TEXT_BYTES = 4096
"""jax.distributed gathers arrays of one size; a fingerprint takes about 250 bytes of it."""

_XLA_LOCAL_SIZE = "PJRT_LOCAL_PROCESS_COUNT"
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", _XLA_LOCAL_SIZE)
"""The variables that hold the number of processes on this machine: of torchrun, Open MPI and
torch_xla.
"""

CGROUP = Path("/sys/fs/cgroup")


def which_process(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world_size) as given; one process where neither is.

    Raises ConfigError where only one is given, and where neither is but this process is one of
    several, or a worker of a DataLoader: each of them would read the same samples.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"rank is {rank} and world_size is {world_size}, expected a whole number for each; give"
            " both, or neither to read everything in one process"
        )
    if rank is not None and world_size is not None:
        return require_int("rank", rank), require_int("world_size", world_size)
    for evidence, rank_here, num_processes in _launches():
        raise ConfigError(
            f"rank and world_size are not given, but {evidence}: each process would read the same"
            f" samples; pass rank={rank_here}, world_size={num_processes}, or rank=0, world_size=1"
            " to read everything here"
        )
    _refuse_in_workers()
    return 0, 1


def refuse_copies(owner: int) -> None:
    """Raises ConfigError in DataLoader workers that have copies of a stream, which was made in the
    process `owner`.
    """
    if os.getpid() != owner:
        _refuse_in_workers()


def check_same(fingerprint: str, rank: int, world_size: int) -> None:
    """Raises ConfigError naming what differs if another process has another fingerprint; all must
    call it alike.

    Compares nothing unless torch.distributed or jax.distributed runs `world_size` processes, nor in
    DataLoader workers.
    """
    if world_size < 2 or _worker_info() is not None:
        return
    words = fingerprint.split(" ")
    for other, text in enumerate(gather(fingerprint, world_size)):
        for here, there in zip(words, text.split(" "), strict=True):
            if here != there:
                raise ConfigError(
                    f"processes read differently: {here} in process {rank} and {there} in process"
                    f" {other}; give all of them the same shard set and options"
                )


def gather(text: str, world_size: int) -> list[str]:
    """The text of each process, by rank; none where the libraries in use run another number of
    processes.
    """
    if (size := _torch_size()) > 1:
        if size != world_size:
            return []
        texts = [""] * world_size
        sys.modules["torch.distributed"].all_gather_object(texts, text)
        return texts
    if _jax_size() == world_size > 1:
        row = np.frombuffer(text.encode().ljust(_TEXT_BYTES), np.uint8)
        rows = importlib.import_module("jax.experimental.multihost_utils").process_allgather(row)
        return [bytes(np.asarray(each)).decode().rstrip() for each in rows]
    return []


def refuse_second_division(rank: int, world_size: int) -> None:
    """Raises ConfigError where a loader that accelerate prepared iterates: it would divide the
    share of this process among the processes again. A SkipDataLoader is of a loader that was not
    prepared.
    """
    accelerate, data = sys.modules.get("accelerate.state"), sys.modules.get("torch.utils.data")
    if world_size < 2 or accelerate is None or data is None:
        return
    loader = accelerate.GradientState().active_dataloader
    name = type(loader).__name__
    is_prepared = loader is not None and name != "SkipDataLoader"
    if is_prepared and isinstance(loader.dataset, data.IterableDataset):
        raise ConfigError(
            f"accelerate's {name} divides batches among the processes, but this"
            f" stream gives only the part of rank {rank} of {world_size}: the others would be lost;"
            " keep the loader out of accelerator.prepare, iterate over it in each process, and move"
            " each batch to accelerator.device"
        )


def num_local_processes() -> int:
    """Processes on this machine that a launcher started together with this one, which share its
    memory and cores.
    """
    return next((int(size) for name in _LOCAL_SIZES if (size := _several(name))), 1)


def num_own_cores(root: Path = CGROUP) -> int:
    """Cores for the threads of this process: its share of those that the local processes may use
    together.

    A launcher may have bound its processes to different cores: those are not divided again.
    """
    cores, parents_cores = (len(os.sched_getaffinity(pid)) for pid in (0, os.getppid()))
    of_all = min(max(cores, parents_cores), _core_limit(root))
    return max(1, int(min(cores, of_all / num_local_processes())))


def _core_limit(root: Path) -> float:
    """The cores that the container may use at a time, by cgroups v2."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except OSError:
        return float("inf")
    return float("inf") if quota == "max" else int(quota) / int(period)


def _refuse_in_workers() -> None:
    """Raises ConfigError if this process is one of several workers of torch's DataLoader."""
    info = _worker_info()
    if info is not None and info.num_workers > 1:
        raise ConfigError(
            f"each of the {info.num_workers} workers of a DataLoader would read the same samples of"
            " this stream; make the stream before the loader and give it"
            " shardset.adapters.torch.BatchDataset(stream), or iterate over the stream itself,"
            " which decodes in threads"
        )


def _worker_info() -> Any:
    """Of torch's DataLoader, if this process is one of its workers."""
    data = sys.modules.get("torch.utils.data")
    return None if data is None else data.get_worker_info()


def _torch_size() -> int:
    """The processes of torch.distributed; 1 unless the caller imported and initialised it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


def _jax_size() -> int:
    """The processes of jax.distributed; 1 unless the caller imported and initialised it."""
    is_initialized = getattr(sys.modules.get("jax.distributed"), "is_initialized", lambda: False)
    return int(sys.modules["jax"].process_count()) if is_initialized() else 1


def _launches() -> Iterator[tuple[str, str, str]]:
    """Who says that there are several processes, and the expressions for this process's number and
    for how many there are.
    """
    if (size := _torch_size()) > 1:
        says = f"torch.distributed runs {size} processes"
        yield says, "torch.distributed.get_rank()", str(size)
    if (size := _jax_size()) > 1:
        yield f"jax.distributed runs {size} processes", "jax.process_index()", str(size)
    for size_name, rank_name in _LAUNCHERS.items():
        if several := _several(size_name):
            yield f"{size_name} is {several}", f'int(os.environ["{rank_name}"])', several
    if several := _several(_XLA_LOCAL_SIZE):
        # The variables of torch_xla's `xmp.spawn` know the processes of this host only.
        runtime = "torch_xla.runtime"
        says = f"{_XLA_LOCAL_SIZE} is {several}"
        yield says, f"{runtime}.global_ordinal()", f"{runtime}.world_size()"


def _several(name: str) -> str:
    """The value of a variable if it is a number above 1, else nothing."""
    size = os.environ.get(name, "")
    return size if size.isdecimal() and int(size) > 1 else ""
