"""Files of a build's plan, changed as if another program had written them."""

import json
from pathlib import Path
from typing import Any

from pipelines.plan import files
from shardset.storage.base import Storage
from shardset.storage.open import open_storage


def record_of(output: Storage | Path, name: str) -> dict[str, Any]:
    """A JSON record of a plan."""
    file = files.find(_storage(output), name)
    assert file, name
    return json.loads(bytes(file.content))


def rewrite(output: Storage | Path, name: str, record: dict[str, Any]) -> None:
    """Another record in its place, of the same build."""
    file = files.find(_storage(output), name)
    assert file, name
    files.write(_storage(output), name, file.build, json.dumps(record).encode())


def _storage(output: Storage | Path) -> Storage:
    return open_storage(str(output)) if isinstance(output, Path) else output
