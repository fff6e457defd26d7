"""Both pages in a real browser, at the widths of a telephone and a desk, light and dark."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from msgspec.structs import replace
from playwright.sync_api import Browser

from pipelines.report import set_page
from scripts.screenshots import browser, opened
from shardset.format.manifest import Manifest
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.shardset import jpeg_samples, publish, quarantine, write_shard_set
from tests.trainer.tools.test_report import folder, line, whole
from trainer.tools import report as run_report

pytestmark = pytest.mark.nightly

WINDOWS = {
    "desk": (1280, False),
    "desk, dark": (1280, True),
    "telephone": (375, False),
    "telephone, dark": (375, True),
}
CONTRAST = """() => {
  const style = getComputedStyle(document.body);
  return [style.backgroundColor, style.color];
}"""
PICTURES = """() => [...document.images].map(
  one => [one.complete && one.naturalWidth > 0, one.alt.length > 0]
)"""
TOO_WIDE = "() => document.documentElement.scrollWidth - innerWidth"
FOLDED = "() => document.querySelectorAll('details').forEach(one => one.open = true)"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of a set with everything that a page can hold, and one of a run."""
    place = tmp_path_factory.mktemp("pages")
    storage = open_storage(str(place / "set"))
    splits = {
        name: jpeg_samples(name, number, num_classes=24)
        for name, number in (("train", 60), ("validation", 30))
    }
    manifest = write_shard_set(storage, splits, num_shards=8, num_classes=24)
    _with_everything(storage, manifest)
    set_page.write(str(place / "set"))
    run_report.write(str(folder(place / "run", [line(one) for one in whole()])))
    return {name: place / name / "report.html" for name in ("set", "run")}


def _with_everything(storage: Storage, manifest: Manifest) -> None:
    """Quarantine, a class with a long name, damage."""
    line = b'{"name": "cut.jpg", "split": "train", "reason": "truncated"}'
    manifest = quarantine(storage, manifest, line, line)
    classes = [*manifest.classes]
    classes[3] = replace(classes[3], name="averylongnamewithoutanyplacetobreakit" * 6)
    options = {"image": {"quality": 95, "words": "x" * 200}}
    provenance = replace(manifest.provenance, options=options)
    fixes = {"cmyk-to-rgb": 3}
    publish(storage, replace(manifest, classes=classes, fixes=fixes, provenance=provenance))
    storage.delete(manifest.splits["validation"].shards[7].path)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["set", "run"])
def test_a_page_opens_from_disk_fits_its_window_and_is_accessible(pages, chromium, name, window):
    width, dark = WINDOWS[window]
    with opened(chromium, pages[name], width=width, dark=dark) as tab:
        complaints: list[str] = []
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.reload()
        tab.evaluate(FOLDED)
        assert [url for url in asked if not url.startswith("data:")] == [
            pages[name].resolve().as_uri()
        ]
        assert complaints == []
        assert tab.evaluate(TOO_WIDE) <= 0
        assert all(loaded and described for loaded, described in tab.evaluate(PICTURES))
        found = Axe().run(tab)
        assert [
            (one["id"], one["nodes"][0]["html"][:200]) for one in found.response["violations"]
        ] == []


def test_dark_and_light_are_different_pages(pages, chromium):
    colours = []
    for dark in (False, True):
        with opened(chromium, pages["set"], width=1280, dark=dark) as tab:
            colours.append(tab.evaluate(CONTRAST))
    assert colours[0][0] != colours[1][0]
    assert colours[0][1] != colours[1][1]


def test_everything_that_scrolls_or_folds_is_reached_by_the_keyboard(pages, chromium):
    with opened(chromium, pages["set"], width=375) as tab:
        tab.keyboard.press("Tab")
        assert tab.evaluate("() => document.activeElement.textContent") == "Skip to the content"
        reached = []
        for _ in range(60):
            tab.keyboard.press("Tab")
            reached.append(tab.evaluate("() => document.activeElement.tagName"))
        assert {"A", "SUMMARY", "DIV"} <= set(reached)
        tab.locator("summary").first.focus()
        before = tab.evaluate("() => document.querySelector('details').open")
        tab.keyboard.press("Enter")
        assert tab.evaluate("() => document.querySelector('details').open") is not before
