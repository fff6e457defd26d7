"""Screenshots of a page in headless Chromium: `python -m scripts.screenshots PAGE OUTPUT.png
[--width 1280] [--dark]`.

Debian's browser (`apt-get install chromium`) driven by playwright. The pictures of
docs/how-to/check.md, after `make demo` and `shardset report demo/digits/run`:

    ... demo/digits/shards/report.html docs/images/report-set.png --width 1120 --height 1240
    ... demo/digits/run/report.html docs/images/report-run.png --width 1120 --height 1240 --dark
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from shardset.errors import ConfigError


def chromium() -> str:
    """The browser's program; raises ConfigError if there is none."""
    found = next(
        (
            path
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (path := shutil.which(name))
        ),
        None,
    )
    if found is None:
        raise ConfigError("no chromium on the PATH; install it with `apt-get install chromium`")
    return found


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless browser that needs neither a sandbox (which root has none of) nor a large
    /dev/shm.
    """
    with sync_playwright() as playwright:
        flags = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        found = playwright.chromium.launch(executable_path=chromium(), args=flags)
        try:
            yield found
        finally:
            found.close()


@contextmanager
def opened(
    found: Browser, page: Path, *, width: int, height: int = 900, dark: bool = False
) -> Iterator[Any]:
    """A page from disk in a window of that size."""
    context = found.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        offline=True,
    )
    try:
        tab = context.new_page()
        tab.goto(page.resolve().as_uri())
        yield tab
    finally:
        context.close()


def main() -> int:
    """One screenshot."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("page", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true", help="the whole page, not a window of it")
    args = parser.parse_args()
    try:
        with (
            browser() as found,
            opened(found, args.page, width=args.width, height=args.height, dark=args.dark) as tab,
        ):
            tab.screenshot(path=str(args.output), full_page=args.whole)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
