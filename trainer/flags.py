"""The flags that mean a training configuration: added to a parser, read as a config, written as arguments again."""

import argparse
from dataclasses import dataclass

from trainer import recipes
from trainer.config import TrainConfig
from trainer.settings import assignments, settings_of, with_values

# Flag and setting. `--set KEY=VALUE` changes every other setting.
FLAGS = {
    "--manifest": "manifest",
    "--run-dir": "run_dir",
    "--model": "model.name",
    "--epochs": "epochs",
    "--global-batch-size": "global_batch_size",
    "--strategy": "strategy",
    "--precision": "precision",
    "--resume": "resume",
    "--max-steps": "max_steps",
    "--target-accuracy": "target_accuracy",
    "--seed": "seed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFlags:
    """What the flags say: a recipe, text by setting, and `--set` texts."""

    recipe: str | None
    values: dict[str, str]
    changes: list[str]
    fake_data: bool

    def config(self, base: TrainConfig | None = None) -> TrainConfig:
        """The recipe, else `base`, else the default recipe; then the flags; then `--set`. Raises ConfigError."""
        config = recipes.recipe(self.recipe) if self.recipe else base or recipes.default()
        fake_data = {"fake_data": True} if self.fake_data else {}
        return with_values(config, self.values | fake_data | assignments(self.changes))

    def arguments(self) -> list[str]:
        """The same as a command line."""
        flags = {key: flag for flag, key in FLAGS.items()} | {"profile_steps": "--profile-steps"}
        given = [(flags[key], value) for key, value in self.values.items()]
        given += [("--set", change) for change in self.changes]
        recipe = [f"--recipe={self.recipe}"] if self.recipe is not None else []
        fake_data = ["--fake-data"] if self.fake_data else []
        return [*recipe, *(f"{flag}={value}" for flag, value in given), *fake_data]


def add_config_flags(verb: argparse.ArgumentParser) -> None:
    """Adds the flags, with the help lines of their settings."""
    settings = settings_of(TrainConfig)
    verb.add_argument("--recipe", help=f"where to start from: {', '.join(recipes.RECIPES)}")
    for flag, key in FLAGS.items():
        help_line = f"{settings[key].help} ({settings[key].expected})"
        verb.add_argument(flag, dest=key, metavar=flag.rsplit("-", 1)[-1].upper(), help=help_line)
    verb.add_argument("--fake-data", action="store_true", help=settings["fake_data"].help)
    verb.add_argument("--profile-steps", dest="profile_steps", metavar="A:B", help=settings["profile_steps"].help)
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change any setting; `train --help` lists all of them",
    )


def config_flags(options: argparse.Namespace) -> ConfigFlags:
    """What the parsed flags say."""
    keys = (*FLAGS.values(), "profile_steps")
    values = {key: text for key in keys if (text := getattr(options, key)) is not None}
    return ConfigFlags(recipe=options.recipe, values=values, changes=options.set, fake_data=options.fake_data)
