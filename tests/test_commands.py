"""The two programs as a shell sees them: names, completion, versions."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

from shardset.version import __version__

SCRIPTS = Path(sysconfig.get_path("scripts"))
PROGRAMS = {"shardset-pipelines": ["build", "verify", "inspect", "plan"], "shardset-trainer": ["train", "evaluate"]}


def run(words: list[str], text: str | None = None) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, input=text).stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_installed_program_says_its_version(program):
    assert run([str(SCRIPTS / program), "--version"]) == f"shardset {__version__}\n"


@pytest.mark.parametrize("program", PROGRAMS)
def test_bash_completes_the_verbs_and_flags(program):
    script = run([str(SCRIPTS / program), "--print-completion", "bash"])
    ask = f"""{script}
COMP_WORDS=({program} '') COMP_CWORD=1 COMP_LINE='{program} ' COMP_POINT=${{#COMP_LINE}}
"$(complete -p {program} | sed -E 's/.*-F ([^ ]+).*/\\1/')" {program} '' {program}
echo "${{COMPREPLY[@]}}"
"""
    found = run(["bash"], ask).split()
    assert set(PROGRAMS[program]) <= set(found)
