"""The flags that mean a training configuration: added to a parser, read as a config, written as
arguments again.
"""

import argparse
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shardset.program import Parser, nearest
from shardset.settings import (
    add_flags,
    assignments,
    parsed,
    settings_of,
    texts_of,
    with_values,
)
from trainer import recipes
from trainer.config import TrainConfig, mixed_sets

GROUPS = {
    "data and folders": ("manifest", "run_dir", "resume", "fake_data"),
    "model": ("model.name", "image.size"),
    "training": (
        "mix",
        "model.pretrained",
        "model.freeze",
        "epochs",
        "optimizer.learning_rate",
        "optimizer.head_learning_rate",
        "optimizer.weight_decay",
        "seed",
        "max_steps",
        "target_accuracy",
        "wandb",
        "record_losses",
        "show_steps",
        "profile_steps",
    ),
    "steps on devices": (
        "global_batch_size",
        "strategy",
        "precision",
        "num_decode_threads",
        "compile",
    ),
}
"""The settings that have a flag; an evaluation has none of the training ones.

`--set KEY=VALUE` changes any setting.
"""

FLAGS = {key: settings_of(TrainConfig)[key].flag for keys in GROUPS.values() for key in keys}
"""The flag of each setting that has one."""

EVALUATION = FLAGS.keys() - set(GROUPS["training"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFlags:
    """What the flags say: a recipe, text by setting, and `--set` texts."""

    recipe: str | None
    values: dict[str, str]
    changes: list[str]

    @property
    def given(self) -> dict[str, Any]:
        """The value of each setting that the command line names; `--set` wins. Raises ConfigError.

        A mixture without a manifest is evaluated on its first set.
        """
        given = parsed(TrainConfig, self.values | assignments(self.changes))
        sets = mixed_sets(given.get("mix"))
        return ({"manifest": sets[0][0]} if sets else {}) | given

    def config(
        self, base: TrainConfig | None = None, chosen: Mapping[str, Any] | None = None
    ) -> TrainConfig:
        """The recipe, else `base`, else the default recipe; then `chosen`, flags and `--set`.

        Raises ConfigError.
        """
        config = recipes.recipe(self.recipe) if self.recipe else base or recipes.default()
        given, image = self.given, config.image
        # An evaluation resizes in proportion to the image size.
        scale = given.get("image.size", image.size) / image.size
        sizes = {"image.eval_resize": image.eval_resize, "image.eval_size": image.eval_size}
        resized = {key: math.ceil(scale * size) for key, size in sizes.items() if size is not None}
        return with_values(config, {**resized, **(chosen or {}), **given})

    def arguments(self) -> list[str]:
        """The same as a command line."""
        given = [f"--recipe={self.recipe}"] if self.recipe is not None else []
        for key, value in self.values.items():
            switches = {"true": FLAGS[key], "false": f"--no-{FLAGS[key][2:]}"}
            given.append(switches.get(value, f"{FLAGS[key]}={value}"))
        return given + [f"--set={change}" for change in self.changes]


def add_config_flags(
    verb: Parser,
    keys: Collection[str] = FLAGS,
    base: str = "follow from the data if they say `auto`",
) -> None:
    """Adds the flags of these settings, with their help lines.

    Without a recipe the settings come from `base`.
    """
    for title, names in GROUPS.items():
        if named := [key for key in names if key in keys]:
            add_flags(verb.add_argument_group(title), TrainConfig, named, shows_default=False)
    listed = ", ".join(recipes.RECIPES)
    verb.add_argument("--recipe", help=f"settings to start from: {listed}; without one they {base}")
    text = "change any setting; --help-settings of `train` lists all"
    verb.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def config_flags(options: argparse.Namespace) -> ConfigFlags:
    """What the parsed flags say."""
    values = texts_of(options, FLAGS)
    return ConfigFlags(recipe=options.recipe, values=values, changes=options.set)


def near_miss(argument: str, verb: Parser) -> str:
    """A hint at the flag or setting that an unknown flag may have meant; empty if none is near."""
    name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
    setting = nearest(name, settings_of(TrainConfig))
    is_setting = setting and setting.rpartition(".")[2] == name
    hint = "" if is_setting else verb.near_miss(argument)
    if hint or "--set" not in verb.flags:
        return hint
    flag = FLAGS.get(setting or "", f"--set {setting}=")
    return (
        f", did you mean {flag}?"
        if setting and (flag.startswith("--set") or flag in verb.flags)
        else ""
    )
