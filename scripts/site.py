"""The pages of the site that are made from the README, the change log and the code; mkdocs calls it
(mkdocs.yml).
"""

import argparse
import inspect
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import shardset
from pipelines import cli as pipelines_program
from scripts.limits import limits_page
from shardset import settings
from shardset.errors import ShardsetError
from trainer import cli as trainer_program
from trainer import recipes
from trainer.config import TrainConfig

REPOSITORY = Path(__file__).parent.parent
API = {
    "Read a dataset": "Stream Batch MixedStream Share DiskCache open SampleSet Sample",
    "Images and augmentation": (
        "ImageSpec RandomResizedCrop CenterCrop PadCrop"
        " RandAugment TrivialAugment RandomErasing Chain"
    ),
    "Write a dataset": "Writer",
    "Look at a dataset": "load LoadedSet Manifest Split Shard open_storage Storage",
}
"""The public names in the order of the page; those that are missing here come at the end."""
API_HEAD = """\
# Python API

These names are public: `shardset.NAME`, the modules of `shardset.adapters`, and the errors of
`shardset.errors`. Names and options that this page lists change only with a line in the
[change log](../changelog.md). Everything else may change at any time.

`pip install 'shardset[read]'` brings the decoders that `Stream` needs. `import shardset` imports
neither torch nor Beam.
"""
LINK = re.compile(r"\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file under docs/ holds."""
    pages = {
        "index.md": from_root("README.md"),
        "changelog.md": from_root("CHANGELOG.md"),
        "reference/commands.md": commands_page(),
        "reference/recipes.md": recipes_page(),
        "reference/api.md": api_page(),
        "reference/limits.md": limits_page(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for name in re.findall(r": ([\w/-]+\.md)", yaml.safe_dump(config.nav)):
        if name not in files.src_uris:  # not written yet
            files.append(File.generated(config, name, content=f"# {Path(name).stem}\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Has links to files that the site leaves out lead to the repository."""
    if page.file.generated_by:
        page.edit_url = None
    folder = posixpath.dirname(page.file.src_uri)

    def linked(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, found[1]))
        outside = not path.startswith("docs/") or path.startswith("docs/dev")
        if not outside or not os.path.lexists(REPOSITORY / path):
            return found[0]
        kind = "tree" if (REPOSITORY / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path}{found[2] or ''})"

    return LINK.sub(linked, markdown)


def from_root(name: str) -> str:
    """A Markdown file of the repository's root, with its links as seen from docs/."""
    text = (REPOSITORY / name).read_text()

    def seen_from_docs(found: re.Match[str]) -> str:
        path = found[1].removeprefix("docs/") if found[1].startswith("docs/") else f"../{found[1]}"
        return f"]({'changelog.md' if found[1] == 'CHANGELOG.md' else path}{found[2] or ''})"

    return LINK.sub(seen_from_docs, text).replace('src="docs/', 'src="')


def commands_page() -> str:
    """The help of both programs and of all their verbs, with the exit codes that each of them
    states.
    """
    text = "# Commands\n\nWhat `--help` prints, for each verb.\n"
    for program in (pipelines_program.parser(), trainer_program.parser()):
        for title, parser in [(program.prog, program), *verbs_of(program)]:
            text += f"\n## {title}\n\n```text\n{parser.format_help()}```\n"
    return text


def verbs_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every verb below a parser, and theirs, with the words that call it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in dict.fromkeys(action.choices.values()):
                yield verb.prog, verb
                yield from verbs_of(verb)


def recipes_page() -> str:
    """Each recipe's promise and what it changes, and every setting with what it means."""
    text, plain = "# Recipes and settings\n", settings.values_of(recipes.default())
    for name, make in recipes.RECIPES.items():
        text += f"\n## {name}\n\n{inspect.getdoc(make)}\n\n| setting | value |\n|---|---|\n"
        for key, value in settings.values_of(make()).items():
            if name == "default" or value != plain[key]:
                text += f"| `{key}` | `{value}` |\n"
    text += "\n## What the settings mean\n\n| setting | meaning | value |\n|---|---|---|\n"
    known = settings.settings_of(TrainConfig).values()
    return text + "".join(f"| `{one.key}` | {one.help} | {one.expected} |\n" for one in known)


def api_page() -> str:
    """The public names of the library, its adapters, and the tree of its errors."""
    text, groups = API_HEAD, {title: names.split() for title, names in API.items()}
    named = [name for names in groups.values() for name in names]
    public = [name for name in shardset.__all__ if name not in ("ShardsetError", "__version__")]
    groups["More names"] = [name for name in public if name not in named]
    for title, names in groups.items():
        text += f"\n## {title}\n\n" if names else ""
        text += "".join(
            f"::: shardset.{home_of(name)}{name}\n\n" for name in names if name in public
        )
    modules = sorted(path.stem for path in (REPOSITORY / "shardset/adapters").glob("[a-z]*.py"))
    text += "\n## Adapters\n\n"
    text += "".join(f"::: shardset.adapters.{name}\n\n" for name in modules)
    return text + "\n## Errors\n\n" + "\n".join(errors_below(ShardsetError, 0)) + "\n"


def home_of(name: str) -> str:
    """The module of a public name below `shardset`, with a dot after it."""
    lazily = {name: module for module, names in shardset._READER.items() for name in names}
    module = getattr(getattr(shardset, name), "__module__", "shardset").removeprefix("shardset")
    return f"{lazily.get(name, module.lstrip('.'))}."


def errors_below(error: type[ShardsetError], depth: int) -> Iterator[str]:
    """A line per error of the library, below the one that it is a kind of."""
    meaning = (inspect.getdoc(error) or "").split("\n\n")[0].replace("\n", " ")
    yield f"{'    ' * depth}- `{error.__name__}`: {meaning}"
    for kind in error.__subclasses__():
        if kind.__module__ == "shardset.errors":
            yield from errors_below(kind, depth + 1)
