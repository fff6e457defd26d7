"""The whole way in one go: raw images, shards, a check of them, a trained network.

`make demo` runs it.
"""

import argparse
import hashlib
import http.client
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from shardset.errors import ShardsetError, SourceError, TransientError

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_MD5 = "c58f30108f718f92721af3b95e74349a"


def write_digits(folder: Path) -> Path:
    """The 1,797 handwritten digits that scikit-learn ships, as 8x8 PNG files in class folders;
    written once.

    If they were written again, the finished shards would belong to another input.
    """
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    if folder.exists():
        return folder
    part, digits = folder.with_name(folder.name + ".part"), load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = part / f"digit-{label}" / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8)).save(path)
    return part.rename(folder)


def fetch_cifar10(folder: Path) -> Path:
    """The published archive of CIFAR-10, downloaded once.

    Raises TransientError if the connection fails, SourceError if what came is another file.
    """
    path = folder / "cifar-10-python.tar.gz"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    print(f"downloading {CIFAR10_URL} (170 MB)", flush=True)
    part = path.with_name(path.name + ".part")
    try:
        with urllib.request.urlopen(CIFAR10_URL, timeout=60) as response, part.open("wb") as out:
            shutil.copyfileobj(response, out)
    except (OSError, http.client.HTTPException) as error:
        raise TransientError(f"{CIFAR10_URL}: {error}; run it again") from error
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != CIFAR10_MD5:
        raise SourceError(
            f"{CIFAR10_URL}: MD5 is {found}, published is {CIFAR10_MD5}; run it again"
        )
    return part.rename(path)


def commands(data: str, raw: Path, folder: Path) -> list[list[str]]:
    """What a user would type, one list of words per command."""
    shards, run = str(folder / "shards"), str(folder / "run")
    source = ["folder", "--holdout", "test=0.2"] if data == "digits" else ["cifar10"]
    recipe = "digits_smoke" if data == "digits" else "cifar10_resnet18"
    return [
        ["shardset", "build", "--input", str(raw), "--output", shards, "--source", *source],
        ["shardset", "verify", shards, "--deep"],
        ["shardset", "inspect", shards],
        ["shardset", "train", "--recipe", recipe, "--manifest", shards, "--run-dir", run],
        ["shardset", "report", run, "--output", str(folder / "run.html")],
    ]


def follow(command: list[str]) -> int:
    """The exit code of a command.

    Ctrl-C reaches it too, and it ends by itself when it has saved.
    """
    child = subprocess.Popen(command)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue


def main() -> int:
    """Prepares the raw data, then runs each command and stops at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", choices=["digits", "cifar10"], default="digits")
    parser.add_argument("--folder", type=Path, default=Path("demo"))
    args = parser.parse_args()
    folder = args.folder / args.data
    try:
        raw = (
            write_digits(folder / "raw") if args.data == "digits" else fetch_cifar10(folder / "raw")
        )
    except ShardsetError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for command in commands(args.data, raw, folder):
        print(f"\n$ {shlex.join(command)}", flush=True)
        code = follow([sys.executable, "-m", *command])
        if code:
            return code
    print(f"\nthe set: {folder / 'shards' / 'report.html'}\nthe run: {folder / 'run.html'}")
    images = sorted(raw.rglob("*.png"))
    if images:
        of_run = shlex.join(["--from", str(folder / "run"), str(images[0])])
        print(f"next: source .venv/bin/activate && shardset predict {of_run}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
