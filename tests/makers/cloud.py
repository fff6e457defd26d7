"""A cloud to play with: a folder with the stand-in for gcloud, what it is to do, and what it was asked."""

import json
import os
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any

from trainer.tpu.commands import WHEEL

FAKE = Path(__file__).parent.parent / "trainer" / "tpu" / "fake_gcloud.py"

# Answers like uv: `uv venv ... FOLDER` makes an environment, `uv pip install ... WHEEL[EXTRAS]` looks at the wheel.
UV = """\
#!/bin/sh
for word; do last=$word; done
case $1 in
venv) mkdir -p "$last/bin" && cp "$HOME/python" "$last/bin/python" ;;
pip) test -f "${last%%\\[*}" && echo "$last" > "$HOME/installed" ;;
esac
"""
# By default a worker's Python only notes what it was to run, and ends with the code in the file `code`.
NOTING = """\
#!/bin/sh
echo "PJRT_DEVICE=$PJRT_DEVICE $*" >> "$HOME/ran"
exit "$(cat "$HOME/code" 2>/dev/null || echo 0)"
"""


class Cloud:
    """One of its own for each test; `real` gives the workers the Python that runs the tests."""

    def __init__(self, folder: Path, *, real: bool = False) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        _program(self.bin / "gcloud", f'#!/bin/sh\nexec "{sys.executable}" -I -S "{FAKE}" "$@"\n')
        self.python = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n' if real else NOTING

    @property
    def environment(self) -> dict[str, str]:
        """What lets a process find this cloud and no other: nobody's gcloud and no login."""
        return {
            "FAKE_GCLOUD": str(self.folder),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "CLOUDSDK_CONFIG": str(self.folder / "no-login"),
        }

    @property
    def calls(self) -> list[list[str]]:
        """Every call of gcloud so far, as its words."""
        file = self.folder / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def asked(self, text: str) -> int:
        """How many calls had this text in them."""
        return sum(text in " ".join(call) for call in self.calls)

    def fail(self, *failures: dict[str, Any]) -> None:
        """What is to go wrong, in this order: {"on": REGEX, "code": 1, "says": TEXT, "preempt": True, "goes_on": True}.

        With `goes_on` the call itself works; `expire` fails the queued request.
        """
        (self.folder / "failures.json").write_text(json.dumps(failures))

    def has(self, name: str, type_: str, *, node: str | None = "READY", request: str | None = "ACTIVE") -> None:
        """Puts a TPU there."""
        state = {
            "nodes": {name: {"state": node, "type": type_}} if node else {},
            "requests": {name: {"state": request, "type": type_, "node": name, "looks": 9}} if request else {},
        }
        (self.folder / "state.json").write_text(json.dumps(state))

    def home(self, name: str, worker: int) -> Path:
        """A worker's home folder, with uv in it."""
        home = self.folder / name / str(worker)
        (home / ".local/bin").mkdir(parents=True, exist_ok=True)
        _program(home / ".local/bin/uv", UV)
        _program(home / "python", self.python)
        return home

    def ready(self, name: str, type_: str, num_workers: int) -> list[Path]:
        """A TPU that is there and set up; returns its workers' home folders."""
        self.has(name, type_)
        homes = [self.home(name, worker) for worker in range(num_workers)]
        for home in homes:
            (home / "shardset-tpu/env/bin").mkdir(parents=True)
            _program(home / "shardset-tpu/env/bin/python", self.python)
        return homes


def wheel(folder: Path) -> Path:
    """Something that has the name and form of this project's wheel."""
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("trainer/tpu/worker.py", "")
    return path


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    os.chmod(path, path.stat().st_mode | stat.S_IXUSR)
