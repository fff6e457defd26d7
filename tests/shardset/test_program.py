import subprocess
import sys
from pathlib import Path

import pytest

from shardset.errors import ConfigError, NotFound
from shardset.program import FAILED, INTERRUPTED, OK, USAGE, Parser, count, run_verb
from shardset.storage.open import open_storage
from tests.makers.shardset import encode, image_sample, pixels, write_shard_set

ROOT = Path(__file__).parents[2]


def said(*words: str, cwd: Path = ROOT) -> str:
    """What a command prints on standard error."""
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_a_warning_of_a_library_is_shown_with_debug_only(tmp_path):
    # one tag is announced, and none there
    cut = encode(pixels(0, 8, 8), "jpeg", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0")
    samples = [image_sample("train", serial, cut, "jpg", 2) for serial in range(4)]
    write_shard_set(open_storage(str(tmp_path)), {"train": samples}, num_shards=1)
    words = ["-m", "pipelines", "verify", str(tmp_path), "--deep"]
    assert "Corrupt EXIF data" not in said(*words)
    assert "Corrupt EXIF data" in said(*words, "--debug")


WARNS = "import warnings; warnings.warn('told')"


def test_processes_that_a_program_starts_are_quiet_too():
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WARNS!r}], check=True)"
    quiet = "from shardset.program import quiet_warnings; quiet_warnings(show={})"
    assert "told" not in said("-c", f"{quiet.format(False)}; {start}")
    assert "told" in said("-c", f"{quiet.format(True)}; {start}")


def test_a_command_line_that_is_refused_shows_no_password(capsys):
    with pytest.raises(SystemExit):
        Parser().parse_args(["--proxy=http://user:s3cret@host"])
    assert "http://***@host" in capsys.readouterr().err


def raising(error: BaseException):
    def verb():
        raise error

    return verb


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("8 lanes"), USAGE, "ConfigError: 8 lanes\n"),
        (NotFound("no\x1b[2J such\nfile"), FAILED, "NotFound: no\\x1b[2J such\\nfile\n"),
        (FileNotFoundError("gone"), FAILED, "FileNotFoundError: gone\n"),
        (KeyboardInterrupt(), INTERRUPTED, "stopped; the same command continues\n"),
    ],
)
def test_an_error_of_a_verb_is_one_sentence_and_an_exit_code(capsys, error, code, line):
    assert run_verb(raising(error), debug=False) == code
    assert capsys.readouterr().err == line


def test_with_debug_an_error_keeps_its_traceback():
    with pytest.raises(ConfigError, match="8 lanes"):
        run_verb(raising(ConfigError("8 lanes")), debug=True)


def test_a_verb_that_returns_nothing_is_done():
    assert run_verb(lambda: None, debug=False) == OK
    assert run_verb(lambda: FAILED, debug=False) == FAILED


def test_a_closed_pipe_and_a_bug_are_left_to_the_program():
    for error in (BrokenPipeError(), ZeroDivisionError()):
        with pytest.raises(type(error)):
            run_verb(raising(error), debug=False)


def test_counts_agree_with_their_noun():
    assert count(1, "shard") == "1 shard"
    assert count(1200, "shard") == "1,200 shards"
    assert count(2, "class", "classes") == "2 classes"
