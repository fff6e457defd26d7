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

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pipelines import parsers
from scripts.api import api_page
from scripts.limits import limits_page
from shardset import settings, verbs
from trainer import cli as trainer_program
from trainer import recipes
from trainer.config import TrainConfig

REPOSITORY = Path(__file__).parent.parent
ON_GITHUB = "https://github.com/shardset/shardset/blob/main/docs"
LINK = re.compile(r"\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file under docs/ holds."""
    pages = {
        "index.md": from_root("README.md"),
        "reference/commands.md": commands_page(),
        "reference/recipes.md": recipes_page(),
        "reference/api.md": api_page(),
        "reference/limits.md": limits_page(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
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
    # Absolute for PyPI. Links to what the site leaves out (docs/dev) stay.
    text = re.sub(rf"\]\({ON_GITHUB}/(?!dev/)", "](docs/", text)

    def seen_from_docs(found: re.Match[str]) -> str:
        path = found[1].removeprefix("docs/") if found[1].startswith("docs/") else f"../{found[1]}"
        return f"]({path}{found[2] or ''})"

    return LINK.sub(seen_from_docs, text).replace('src="docs/', 'src="')


def commands_page() -> str:
    """What `--help` prints, for `shardset` and each of its verbs."""
    text = f"# Commands\n\n```text\n{verbs.help_text()}```\n"
    for program in (parsers.parser(), trainer_program.parser()):
        for title, parser in verbs_of(program):
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
