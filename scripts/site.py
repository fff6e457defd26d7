"""The pages of the site that are made from the README, the change log and the code; mkdocs calls it
(mkdocs.yml).
"""

import argparse
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import pipelines
import shardset
import trainer
from pipelines import cli as pipelines_program
from shardset import settings
from trainer import cli as trainer_program
from trainer import recipes
from trainer.config import TrainConfig

REPOSITORY = Path(__file__).parent.parent
# where the README, which PyPI shows too, finds the pages
ON_GITHUB = "https://github.com/shardset/shardset/blob/main/docs"
PACKAGES = (shardset, pipelines, trainer)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file under docs/ holds."""
    pages = {
        "index.md": from_root("README.md"),
        "changelog.md": from_root("CHANGELOG.md"),
        "contributing.md": from_root("CONTRIBUTING.md"),
        "reference/commands.md": commands_page(),
        "reference/recipes.md": recipes_page(),
        **{f"reference/{package.__name__}.md": package_page(package) for package in PACKAGES},
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def from_root(name: str) -> str:
    """A Markdown file of the repository's root, with its links as seen from docs/."""
    text = (REPOSITORY / name).read_text()
    text = re.sub(
        r"\]\((docs/)?decisions\)|\]\(docs/decisions\)",
        "](decisions/0001-library-and-programs.md)",
        text,
    )
    text = re.sub(r"\[([^]]*)\]\((LICENSE|benchmarks[^)]*|examples[^)]*)\)", r"\1", text)
    for page in ("CONTRIBUTING.md", "CHANGELOG.md"):
        text = text.replace(f"]({page})", f"]({page.lower()})")
    # docs/dev is not in the site: links there stay absolute
    text = re.sub(rf"\]\({ON_GITHUB}/(?!dev/)", "](", text)
    return text.replace("](docs/", "](").replace('src="docs/', 'src="')


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


def package_page(package: ModuleType) -> str:
    """The public names of all modules of a package, from their docstrings."""
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    names = [one.name for one in found if not one.name.rpartition(".")[2].startswith("_")]
    return f"# {package.__name__}\n\n" + "".join(f"::: {name}\n\n" for name in sorted(names))
