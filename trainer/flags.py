"""The flags that mean a training configuration: added to a parser, read as a config, written as arguments again."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardset.program import Parser, did_you_mean
from shardset.settings import assignments, parsed, settings_of, value_text, with_values
from trainer import recipes
from trainer.config import TrainConfig

# Flags and setting; the first flag is the one that messages name. `--set KEY=VALUE` changes every other setting.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "data and folders": {
        "manifest": ("--manifest",),
        "run_dir": ("--run-dir",),
        "resume": ("--resume",),
    },
    "model": {
        "model.name": ("--model",),
        "model.pretrained": ("--pretrained",),
        "model.freeze": ("--freeze",),
        "image.size": ("--image-size",),
    },
    "training": {
        "epochs": ("--epochs",),
        "global_batch_size": ("--global-batch-size",),
        "optimizer.learning_rate": ("--lr",),
        "optimizer.head_learning_rate": ("--head-lr",),
        "optimizer.weight_decay": ("--weight-decay",),
        "seed": ("--seed",),
        "max_steps": ("--max-steps",),
        "target_accuracy": ("--target-accuracy",),
    },
    "output": {
        "logger": ("--logger",),
        "show_steps": ("--show-steps",),
    },
    "machine": {
        "strategy": ("--strategy",),
        "precision": ("--precision",),
        "num_decode_threads": ("--decode-threads",),
        "compile": ("--compile",),
        "compile_cache": ("--compile-cache",),
        "profile_steps": ("--profile-steps",),
    },
}
FLAGS = {key: flags[0] for group in GROUPS.values() for key, flags in group.items()}
"""The flag of each setting that has one."""

OF_TRAINING = (
    "model.pretrained", "model.freeze", "epochs", "optimizer.learning_rate", "optimizer.head_learning_rate",
    "optimizer.weight_decay", "seed", "max_steps", "target_accuracy", "logger", "show_steps", "profile_steps",
)  # fmt: skip
"""The settings that mean nothing to an evaluation, which has no flags for them."""

EMPTY: Mapping[str, Any] = MappingProxyType({})

BOOLEANS = ("model.freeze", "show_steps", "compile")
"""The settings whose flags take no value: `--compile` or `--no-compile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFlags:
    """What the flags say: a recipe, text by setting, and `--set` texts."""

    recipe: str | None
    values: dict[str, str]
    changes: list[str]
    fake_data: bool

    @property
    def given(self) -> dict[str, Any]:
        """The value of each setting that the command line names; `--set` wins. Raises ConfigError."""
        fake_data = {"fake_data": True} if self.fake_data else {}
        return parsed(TrainConfig, self.values | fake_data | assignments(self.changes))

    def config(self, base: TrainConfig | None = None, chosen: Mapping[str, Any] = EMPTY) -> TrainConfig:
        """The recipe, else `base`, else the default recipe; then `chosen`, flags and `--set`. Raises ConfigError."""
        config = recipes.recipe(self.recipe) if self.recipe else base or recipes.default()
        return with_values(config, {**self._resize(config), **chosen, **self.given})

    def arguments(self) -> list[str]:
        """The same as a command line."""
        given = [f"--recipe={self.recipe}"] if self.recipe is not None else []
        for key, value in self.values.items():
            flag = FLAGS[key]
            given.append(f"{flag}={value}" if key not in BOOLEANS else flag if value == "true" else f"--no-{flag[2:]}")
        return given + [f"--set={change}" for change in self.changes] + ["--fake-data"] * self.fake_data

    def _resize(self, config: TrainConfig) -> dict[str, Any]:
        """What `--image-size` changes besides: an evaluation resizes in proportion."""
        if "image.size" not in self.values:
            return {}
        scale = self.given["image.size"] / config.image.size
        sizes = {"image.eval_resize": config.image.eval_resize, "image.eval_size": config.image.eval_size}
        return {key: math.ceil(scale * size) for key, size in sizes.items() if size is not None}


def add_config_flags(verb: argparse.ArgumentParser, *, is_training: bool = True) -> None:
    """Adds the flags, with the help lines of their settings."""
    base = "they follow from the shard set" if is_training else "they are those in the run folder"
    settings = settings_of(TrainConfig)
    groups = {title: verb.add_argument_group(title) for title in GROUPS}
    groups["data and folders"].add_argument(
        "--recipe",
        help=f"settings to start from: {', '.join(recipes.RECIPES)}; without one {base}",
    )
    for title, flags in GROUPS.items():
        for key, names in flags.items():
            if key in OF_TRAINING and not is_training:
                continue
            one, help = settings[key], settings[key].help.replace("%", "%%")
            if key in BOOLEANS:
                groups[title].add_argument(*names, dest=key, action=argparse.BooleanOptionalAction, help=help)
                continue
            bare: dict[str, Any] = {"nargs": "?", "const": "timm"} if key == "model.pretrained" else {}
            groups[title].add_argument(*names, dest=key, metavar=_metavar(key), help=f"{help} ({one.expected})", **bare)
    groups["data and folders"].add_argument("--fake-data", action="store_true", help=settings["fake_data"].help)
    groups["machine"].add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change any setting; `train --help` lists all of them",
    )


def config_flags(options: argparse.Namespace) -> ConfigFlags:
    """What the parsed flags say."""
    values = {key: value_text(value) for key in FLAGS if (value := getattr(options, key, None)) is not None}
    return ConfigFlags(recipe=options.recipe, values=values, changes=options.set, fake_data=options.fake_data)


def near_miss(argument: str, verb: Parser) -> str:
    """A hint at the flag or setting that an unknown flag may have meant; empty if none is near."""
    name = argument.partition("=")[0]
    hint = verb.near_miss(argument)
    if hint or not name.startswith("--") or "--set" not in verb.flags:
        return hint
    key = did_you_mean(name.removeprefix("--").replace("-", "_"), settings_of(TrainConfig))
    if not key:
        return ""
    setting = key.split("'")[1]
    flag = FLAGS.get(setting, f"--set {setting}=")
    return f", did you mean {flag}?" if flag.startswith("--set") or flag in verb.flags else ""


def _metavar(key: str) -> str:
    if key == "profile_steps":
        return "A:B"
    return FLAGS[key].rsplit("-", 1)[-1].upper()
