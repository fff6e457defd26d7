"""Settings by name: the fields of a config record and of the records inside it, with types, help
lines and checks.

A field made by `setting` carries its help line, and what is special about its flag. Its type
carries its limits, as `msgspec.Meta`.
"""

import argparse
import dataclasses
import json
import operator
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
from msgspec import inspect

from shardset.errors import ConfigError
from shardset.program import did_you_mean

Default = typing.TypeVar("Default")
Record = typing.TypeVar("Record")

HELP_COLUMN = 38
_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_NO_LIMIT = (None, sys.float_info.max)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name (`optimizer.momentum`), the type of its field, and its help line."""

    key: str
    hint: Any
    help: str

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false (or none), so that its flag takes no value."""
        return set(typing.get_args(self.hint) or [self.hint]) <= {bool, type(None)}

    @property
    def expected(self) -> str:
        """What it accepts, in words."""
        return _in_words(inspect.type_info(self.hint))

    def convert(self, value: Any, *, strict: bool = True) -> Any:
        """The value as the field holds it; reads text unless `strict`. Raises ConfigError."""
        try:
            return msgspec.convert(value, self.hint, strict=strict)
        except msgspec.ValidationError as error:
            given = ":".join(map(str, value)) if isinstance(value, list | tuple) else value
            raise ConfigError(f"{self.key} is {given}, expected {self.expected}") from error

    def parse(self, text: str) -> Any:
        """The value that a text means: `none`, A:B, or what the type of the field reads.

        Raises ConfigError.
        """
        if text.lower() == "none":
            return self.convert(None)
        origins = [typing.get_origin(option) for option in (self.hint, *typing.get_args(self.hint))]
        if dict in origins:
            return self.convert(self._pairs(text))
        is_tuple = tuple in origins
        return self.convert(text.split(":") if is_tuple else text, strict=False)

    def _pairs(self, text: str) -> dict[str, Any]:
        """`a=1,b=[0.9,0.95],c=text` as values by name. Raises ConfigError."""
        pairs = [part.partition("=") for part in re.split(r",(?![^\[]*\])", text)]
        if not all(name.isidentifier() and equals for name, equals, _ in pairs):
            raise ConfigError(f"{self.key} is {text}, expected {self.expected}")
        return {name: _plain_value(value) for name, _, value in pairs}


def setting(default: Default, help: str, **flag: Any) -> Default:
    """A field of a frozen dataclass, with its help line, and with arguments that `add_flags` passes
    on.
    """
    metadata = {"help": help, "flag": flag}
    if isinstance(default, dict):
        return typing.cast(
            Default, dataclasses.field(default_factory=default.copy, metadata=metadata)
        )
    return dataclasses.field(default=default, metadata=metadata)


def add_flags(group: argparse._ArgumentGroup, kind: type, names: Iterable[str]) -> None:
    """Adds the flags of these fields of a record type to a parser, each with the default and help
    line of its field.

    A bool is `--name` and `--no-name`, a Literal a choice. What `setting` was given besides goes to
    `add_argument`; its `names` replace `--name`.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in names:
        field, hint, options = fields[name], hints[name], dict[str, Any]()
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if hint is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif typing.get_origin(hint) is typing.Literal:
            options = {"choices": typing.get_args(hint)}
        elif hint in (int, float):
            options = {"type": hint, "metavar": "N"}
        is_shown = isinstance(default, int | float | str) and not isinstance(default, bool)
        help = field.metadata["help"] + (f" (default {default})" if is_shown else "")
        options |= {"dest": name, "default": default, "help": help, **field.metadata["flag"]}
        group.add_argument(*options.pop("names", (f"--{name.replace('_', '-')}",)), **options)


def settings_of(kind: type) -> dict[str, Setting]:
    """All settings of a record type by name.

    Those of inner records have a dot: `optimizer.learning_rate`.
    """
    settings: dict[str, Setting] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        name, hint = field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            inner = settings_of(typing.cast(type, hint)).values()
            settings |= {
                f"{name}.{one.key}": Setting(f"{name}.{one.key}", one.hint, one.help)
                for one in inner
            }
        else:
            settings[name] = Setting(name, hint, field.metadata["help"])
    return settings


def values_of(record: object) -> dict[str, Any]:
    """The value of every setting by name."""
    return {key: operator.attrgetter(key)(record) for key in settings_of(type(record))}


def check(record: object) -> None:
    """Raises ConfigError for the first setting whose value its type does not allow."""
    settings = settings_of(type(record))
    for key, value in values_of(record).items():
        settings[key].convert(value)


def with_values(record: Record, values: Mapping[str, Any]) -> Record:
    """The record with these settings changed all at once, since some belong together.

    Text is parsed.

    Raises ConfigError for an unknown name, naming the nearest one, and for a value that does not
    fit.
    """
    tree = msgspec.to_builtins(record)
    for key, value in parsed(type(record), values).items():
        group, _, name = key.rpartition(".")
        (tree[group] if group else tree)[name] = value
    return msgspec.convert(tree, type(record))


def parsed(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of settings of a record type, with texts parsed.

    Raises ConfigError as `with_values` does.
    """
    settings = settings_of(kind)
    for key in values:
        if key not in settings:
            raise ConfigError(
                f"no setting {key!r}{did_you_mean(key, settings)}; `train --help` lists all of them"
            )
    return {
        key: settings[key].parse(value) if isinstance(value, str) else value
        for key, value in values.items()
    }


def assignments(texts: Iterable[str]) -> dict[str, str]:
    """The values of `KEY=VALUE` texts by key. The last one of a key counts. Raises ConfigError."""
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {text!r} is not KEY=VALUE, for example --set optimizer.learning_rate=0.2"
            )
        values[key] = value
    return values


def help_text(record: object) -> str:
    """Every setting of the record in its group: name, value, help line, and what it accepts."""
    values, settings = values_of(record), settings_of(type(record)).values()
    width = max(80, shutil.get_terminal_size().columns) - 2
    text = ""
    for name, group in groupby(settings, key=lambda one: one.key.rpartition(".")[0]):
        text += f" {name or 'run'}:\n"
        for one in group:
            name = f"  {one.key} = {value_text(values[one.key])}"
            line = f"{name.ljust(HELP_COLUMN - 2)}  {one.help} ({one.expected})"
            text += (
                textwrap.fill(
                    line, width, subsequent_indent=" " * HELP_COLUMN, break_on_hyphens=False
                )
                + "\n"
            )
        text += "\n"
    return text


def value_text(value: Any) -> str:
    """A value as `Setting.parse` reads it."""
    if isinstance(value, bool | None):
        return str(value).lower()
    if isinstance(value, dict):
        return ",".join(
            f"{name}={one if isinstance(one, str) else json.dumps(one)}"
            for name, one in value.items()
        )
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _plain_value(text: str) -> Any:
    """A number, a list of numbers, true or false as JSON has them; any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _in_words(info: inspect.Type) -> str:
    match info:
        case inspect.UnionType(types=types):
            return " or ".join(map(_in_words, types))
        case inspect.LiteralType(values=values):
            return " or ".join(filter(None, (", ".join(map(str, values[:-1])), str(values[-1]))))
        case inspect.IntType():
            return f"int{_limits_in_words(info)}"
        case inspect.FloatType():
            return f"finite float{_limits_in_words(info)}"
        case inspect.TupleType(item_types=types):
            return (
                "START:STOP, for example 10:15,"
                if len(types) == 2
                else "three numbers, for example 0.5:0.5:0.5"
            )
        case inspect.DictType():
            return "NAME=VALUE, several with commas, for example a=0.1,b=[0.9,0.95],"
        case inspect.BoolType():
            return "true or false"
        case inspect.NoneType():
            return "none"
    return "text"


def _limits_in_words(info: inspect.IntType | inspect.FloatType) -> str:
    limits = {sign: getattr(info, name) for name, sign in _LIMITS.items()}
    return " and".join(
        f" {sign} {limit}" for sign, limit in limits.items() if limit not in _NO_LIMIT
    )
