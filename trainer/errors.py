"""What can go wrong in a run, below shardset.errors.ShardsetError."""

import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from shardset.errors import ShardsetError

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "RESOURCE_EXHAUSTED")
"""What the errors of CUDA, CPUs and XLA say where memory was too small."""


UNREADABLE = (
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    MemoryError,
)
"""What `torch.load` raises for bytes that are not a state, as any flipped bit in its pickle can
make them.
"""


class TrainingError(ShardsetError):
    """A run could not continue."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, cut in the middle, or belongs to another run."""


class NotFinite(TrainingError):
    """The loss became NaN or infinite."""


class EpochMismatch(TrainingError):
    """The samples of an epoch are not those that are expected."""


class PeerLost(TrainingError):
    """Another process of the run ended, or does not answer."""


class RunTaken(TrainingError):
    """Another run writes to the run folder that this run held."""


class CloudError(TrainingError):
    """A command of gcloud failed, or a TPU is in a state that it can't be used in."""


class Preempted(TrainingError):
    """The machine asked the run to stop; its state is saved and the same command resumes there."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 200 characters: native libraries write pages."""
    return str(error).strip().partition("\n")[0][:200]


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns the errors of torch about memory into a TrainingError that names the flags to change.

    Also decorates.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        raise TrainingError(
            f"memory is too small for a step ({first_line(error)}); raise --set accumulate= (the"
            " same batches in more passes), or give a smaller --global-batch-size, --image-size or"
            " --model"
        ) from error
