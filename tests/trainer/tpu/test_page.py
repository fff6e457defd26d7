"""Every `tpu` command that the documentation shows, as a dry run: it is understood, and gcloud
would be too.
"""

import shlex

import pytest

from shardset.program import OK
from tests.makers.documented import commands_of, shown
from tests.trainer.tpu.fake_gcloud import parsed
from trainer import cli as command

START = "python -m trainer tpu "


@pytest.mark.parametrize("line", shown(START))
def test_a_command_of_the_documentation_makes_commands_that_gcloud_knows(line, capsys):
    words = [word for word in shlex.split(line)[3:] if word != "--dry-run"]
    assert command.main([*words, "--dry-run"]) == OK, capsys.readouterr().err
    printed = [shlex.split(text) for text in capsys.readouterr().out.splitlines()]
    of_gcloud = [parsed(words[1:]) for words in printed if words[0] == "gcloud"]
    assert of_gcloud


def test_the_page_shows_every_verb():
    lines = [line for line in commands_of("docs/how-to/tpu.md") if line.startswith(START)]
    verbs = {line.removeprefix(START).split()[0] for line in lines}
    assert verbs == {"create", "setup", "train", "ssh", "logs", "delete"}
