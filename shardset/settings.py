"""Settings by name: the fields of a config record and of the records inside it, with types, help
lines and checks.

A field made by `setting` carries its help line, and what is special about its flag. Its type
carries its limits, as `msgspec.Meta`, and says how its text is read.
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Annotated, Any

import msgspec
from msgspec import Meta, inspect

from shardset.errors import ConfigError
from shardset.program import did_you_mean

Default = typing.TypeVar("Default")
Record = typing.TypeVar("Record")

Count = Annotated[int, Meta(ge=1)]
Size = Annotated[int, Meta(ge=0)]

HELP_COLUMN = 38
_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_NO_LIMIT = (None, sys.float_info.max)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name (`optimizer.momentum`), the type of its field, its default, its help
    line, and what is special about its flag.
    """

    key: str
    hint: Any
    default: Any
    help: str
    options: Mapping[str, Any]

    @property
    def flag(self) -> str:
        """Its flag: the name of its field, unless the field says another."""
        name = self.key.rpartition(".")[2].replace("_", "-")
        return str(self.options.get("flag", f"--{name}"))

    @property
    def expected(self) -> str:
        """The accepted values, in words."""
        return _in_words(inspect.type_info(self.hint))

    def convert(self, value: Any, *, text: str | None = None, strict: bool = True) -> Any:
        """The value, from this text, as the field holds it. Raises ConfigError.

        Unless `strict`, it may be the text of a number.
        """
        try:
            return msgspec.convert(value, self.hint, strict=strict)
        except msgspec.ValidationError as error:
            given = value if text is None else text
            raise ConfigError(f"{self.key} is {given}, expected {self.expected}") from error

    def parse(self, text: str) -> Any:
        """The value that a text means, by the type of the field. Raises ConfigError.

        `none` is None where the field may be, A:B a tuple, `a=1,b=2` values by name.
        """
        if read := self.options.get("read"):
            return read(text)
        hints = (self.hint, *typing.get_args(self.hint))
        if type(None) in hints and text.lower() == "none":
            return None
        origins = [typing.get_origin(hint) for hint in hints]
        if dict in origins:
            return self.convert(self._pairs(text), text=text)
        value = text.split(":") if tuple in origins else text
        return self.convert(value, text=text, strict=False)

    def _pairs(self, text: str) -> dict[str, Any]:
        """`a=1,b=[0.9,0.95],c=text` as values by name; a value without one has the name "".

        Raises ConfigError.
        """
        pairs = [part.rpartition("=") for part in re.split(r"[,;](?![^\[]*\])", text)]
        values = {name: _plain_value(value) for name, _, value in pairs}
        if len(values) < len(pairs):
            raise ConfigError(f"{self.key} is {text}, expected one value for each name")
        return values

    def add_to(self, group: argparse._ActionsContainer, *, shows_default: bool) -> None:
        """Adds its flag to a parser. What it means is read later, by `texts_of` and `parse`."""
        hints = (self.hint, *typing.get_args(self.hint))
        origins = {typing.get_origin(hint): typing.get_args(hint) for hint in hints}
        options: dict[str, Any] = {"metavar": self.flag.rpartition("-")[2].upper()}
        notes = [self.expected] if shows_default else []
        if bool in hints:
            options, notes = {"action": argparse.BooleanOptionalAction}, []
        elif typing.Literal in origins:
            options, notes = {"choices": origins[typing.Literal]}, []
        elif dict in origins:
            options["action"] = "append"
        if shows_default and type(self.default) in (int, float, str):
            notes.append(f"default {self.default}")
        noted = "; ".join(note for note in notes if not note.startswith("text"))
        options |= {
            "dest": self.key,
            "default": None,
            "required": self.default is dataclasses.MISSING,
            "help": f"{self.help} ({noted})" if noted else self.help,
            **self.options,
        }
        options.pop("read", None)
        group.add_argument(options.pop("flag", self.flag), **options)


def setting(
    default: Default,
    help: str,
    *,
    read: Callable[[str], Default] | None = None,
    **flag: Any,
) -> Default:
    """A field of a frozen dataclass, with its help line, and with arguments that `add_flags` passes
    on; `flag` names the flag otherwise than the field.

    Its text is read by its type, or by `read`.
    """
    options = flag | ({"read": read} if read else {})
    metadata = {"help": help, "options": options}
    if isinstance(default, dict):
        return typing.cast(
            Default, dataclasses.field(default_factory=default.copy, metadata=metadata)
        )
    return dataclasses.field(default=default, metadata=metadata)


def required(help: str, **flag: Any) -> Any:
    """A field as `setting` makes it, without a default."""
    return setting(dataclasses.MISSING, help, **flag)


def add_flags(
    group: argparse._ActionsContainer,
    kind: type,
    names: Iterable[str] = (),
    *,
    shows_default: bool = True,
) -> None:
    """Adds the flags of these settings of a record type to a parser; of all that have a help line
    if none is named.
    """
    settings = settings_of(kind)
    for name in names or [key for key, each in settings.items() if each.help]:
        settings[name].add_to(group, shows_default=shows_default)


def texts_of(args: argparse.Namespace, names: Iterable[str]) -> dict[str, str]:
    """The values of the parsed flags of these settings: text by name, without flags not given."""
    given = {name: getattr(args, name, None) for name in names}
    return {
        name: ";".join(value) if isinstance(value, list) else value_text(value)
        for name, value in given.items()
        if value is not None
    }


def record_of(kind: Callable[..., Record], args: argparse.Namespace, **others: Any) -> Record:
    """The record that parsed flags mean, with `others` as they are. Raises ConfigError."""
    record = typing.cast(type, kind)
    return kind(**parsed(record, texts_of(args, settings_of(record))) | others)


def _settings_of(kind: type) -> Mapping[str, Setting]:
    settings: dict[str, Setting] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        name, hint = field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            inner = settings_of(typing.cast(type, hint)).values()
            added = [dataclasses.replace(each, key=f"{name}.{each.key}") for each in inner]
        else:
            said = {"help": "", "options": {}, **field.metadata}
            has_factory = field.default_factory is not dataclasses.MISSING
            added = [Setting(name, hint, None if has_factory else field.default, **said)]
        settings |= {each.key: each for each in added}
    return settings


settings_of: Callable[[type], Mapping[str, Setting]] = cache(_settings_of)
"""All settings of a record type by name. Those of inner records have a dot:
`optimizer.learning_rate`.
"""


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
                f"no setting {key!r}{did_you_mean(key, settings)};"
                " `train --help-settings` lists all"
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
    for name, group in groupby(settings, key=lambda each: each.key.rpartition(".")[0]):
        text += f" {name or 'run'}:\n"
        for each in group:
            name = f"  {each.key} = {value_text(values[each.key])}"
            line = f"{name.ljust(HELP_COLUMN - 2)}  {each.help} ({each.expected})"
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
            f"{name}={each if isinstance(each, str) else json.dumps(each)}"
            for name, each in value.items()
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
        case inspect.DictType(value_type=inspect.IntType() as number):
            return f"N or SPLIT=N,SPLIT=N, each {_in_words(number)}"
        case inspect.DictType(value_type=inspect.FloatType()):
            return "SPLIT=SHARE,SPLIT=SHARE, for example test=0.1"
        case inspect.DictType(value_type=inspect.StrType()):
            return "texts by name"
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
