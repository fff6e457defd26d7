"""What is wrong with a file of a shard set."""

from dataclasses import dataclass

from shardset.errors import NotFound, StorageError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: `where` is a path relative to the manifest, with the sample's key where there is one."""

    where: str
    sentence: str


def problem_of(path: str, error: Exception) -> Problem:
    """The problem of a file that is missing, unreadable or damaged; the sentence leaves out the file's name."""
    if isinstance(error, NotFound):
        return Problem(path, "is missing; restore it, or rebuild the shard with --only-shards")
    sentence = str(error).partition(f"{path}: ")[2] or str(error)
    return Problem(path, f"can't be read: {sentence}" if isinstance(error, StorageError) else sentence)
