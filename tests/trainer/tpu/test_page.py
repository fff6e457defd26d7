"""Every `tpu` command that the documentation shows, as a dry run: it is understood, and gcloud
would be too.
"""

import re
import shlex
from pathlib import Path

import pytest

from shardset.program import OK
from tests.trainer.tpu.fake_gcloud import parsed
from trainer import cli as command

ROOT = Path(__file__).parents[3]
START = "python -m trainer tpu "


def commands_of(page: Path) -> list[str]:
    blocks = re.findall(r"^```(?:console|sh|bash)?\n(.*?)^```", page.read_text(), flags=re.S | re.M)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith(START)]


PAGES = {
    page.relative_to(ROOT).as_posix(): commands_of(page)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
SHOWN = [(page, line) for page, lines in PAGES.items() for line in lines]


@pytest.mark.parametrize(("page", "line"), SHOWN)
def test_a_command_of_the_documentation_makes_commands_that_gcloud_knows(page, line, capsys):
    words = [
        word for word in shlex.split(line.removeprefix("python -m trainer ")) if word != "--dry-run"
    ]
    assert command.main([*words, "--dry-run"]) == OK, capsys.readouterr().err
    printed = [
        shlex.split(text)
        for text in capsys.readouterr().out.splitlines()
        if not text.startswith("#")
    ]
    for words in printed:
        if words[0] == "gcloud":
            parsed(words[1:])
    assert any(words[0] == "gcloud" for words in printed)


def test_the_page_shows_every_verb():
    verbs = {line.removeprefix(START).split()[0] for line in PAGES["docs/tpu.md"]}
    assert verbs == {"create", "setup", "doctor", "train", "ssh", "logs", "stop", "delete"}
