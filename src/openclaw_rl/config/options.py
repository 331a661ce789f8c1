"""How options are defined, read and shown.

Each part of the program defines its own options in a `Section`. Their names are unique over all sections, so flags,
variables and files are flat. A value comes from the first of: flag, environment, configuration file (TOML), preset,
default.
"""

import argparse
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from openclaw_rl.errors import UserError

#: The largest whole number that an option takes; columns of databases and tensors take no larger one.
MAX_INTEGER = 2**63 - 1
#: How much of a wrong value a message quotes.
MAX_QUOTED_CHARACTERS = 200
#: Options by name, over several sections.
Fields = Mapping[str, FieldInfo]


class ConfigError(UserError):
    """An option, or a file that an option names, is wrong. The message is one sentence that says how to fix it."""


class Section(BaseModel):
    """The options of one part of the program. A part receives only its own section.

    An option that does not say otherwise is in the group `heading`, and its environment variable has its name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
    heading: ClassVar[str]
    """The group of its options in the docs and in --help."""

    @field_validator("*")
    @classmethod
    def _is_no_huge_number(cls, value: Any) -> Any:
        # Arithmetic with larger ones fails where nobody expects it.
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"it must be at most {MAX_INTEGER}")
        return value

    @classmethod
    def __pydantic_init_subclass__(cls, **settings: Any) -> None:
        for name, field in cls.model_fields.items():
            given = option_of(field)
            definition = replace(given, group=given.group or cls.heading, env=given.env or (name.upper(),))
            field.json_schema_extra = {"option": cast(Any, definition)}


def fields_of(sections: Iterable[type[Section]]) -> dict[str, FieldInfo]:
    """The options of several sections, by name."""
    fields: dict[str, FieldInfo] = {}
    for section in sections:
        twice = fields.keys() & section.model_fields.keys()
        assert not twice, f"{section.__name__} defines {twice} again"
        fields |= section.model_fields
    return fields


@dataclass(frozen=True)
class Option:
    """What an option has besides its name and type: its group in the docs, environment variables, more flags."""

    group: str
    env: tuple[str, ...]
    flags: tuple[str, ...] = ()
    shown_default: str = ""
    """The default in the docs, where it depends on something else."""
    secret: bool = False
    """Whether the value must never be printed."""
    choices: tuple[str, ...] = ()
    """The values to list in the docs, where other values are possible too."""


def option(
    default: Any,
    doc: str,
    *,
    group: str = "",
    env: str | tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
    shown: str = "",
    secret: bool = False,
    choices: tuple[str, ...] = (),
    **limits: Any,
) -> Any:
    """Define one option. `Section` completes one without `group` or `env`."""
    names = (env,) if isinstance(env, str) else env
    extra: Any = {"option": Option(group, names, flags, shown, secret, choices)}
    return Field(default, description=doc, json_schema_extra=extra, repr=not secret, **limits)


def option_of(field: FieldInfo) -> Option:
    """The definition that `option` stored with a field."""
    extra: Any = field.json_schema_extra
    definition: Option = extra["option"]
    return definition


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_flags(
    parser: argparse.ArgumentParser,
    fields: Fields,
    only: Sequence[str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> None:
    """Add options to a parser (all, or `only` some), in groups. A flag that is not given leaves no value.

    `defaults` has the words for defaults of this parser that differ from those of the options.
    """
    groups: dict[str, Any] = {}
    for name, field in fields.items():
        if only is not None and name not in only:
            continue
        definition = option_of(field)
        if definition.group not in groups:
            groups[definition.group] = parser.add_argument_group(definition.group)
        default = (defaults or {}).get(name) or shown_default(field)
        doc = f"{field.description} [{definition.env[0]}; default: {default}]"
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": doc.replace("%", "%%")}
        if field.annotation is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            choices = choices_of(field)
            is_number = {int, float} & {field.annotation, *get_args(field.annotation)}
            settings["metavar"] = "|".join(choices) or ("N" if is_number else name.rsplit("_", 1)[-1].upper())
        if definition.secret:
            settings["action"] = "append"
        groups[definition.group].add_argument(flag(name), *definition.flags, **settings)


def read(
    fields: Fields,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    in_file: Mapping[str, Any],
    file: Path | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The given values, and the origin of each option's value."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, field in fields.items():
        variable = next((v for v in option_of(field).env if environment.get(v)), None)
        if name in flags:
            values[name] = flags[name]
            origins[name] = "flag"
        elif variable:
            values[name] = environment[variable]
            origins[name] = f"environment {variable}"
        elif name in in_file:
            values[name] = in_file[name]
            origins[name] = f"file {file}"
        else:
            origins[name] = "default"
        value = values.get(name)
        if isinstance(value, str) and value.lower() in choices_of(field):
            values[name] = value.lower()
        keys = values.get(name)
        if option_of(field).secret and isinstance(keys, list) and all(isinstance(key, str) for key in keys):
            values[name] = ",".join(keys)
    return values, origins


def read_file(path: Path, fields: Fields) -> dict[str, Any]:
    """Options from a TOML file; their names may have dashes or underscores."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"The configuration file {path} could not be read: {error.strerror}.") from None
    except RecursionError:
        raise ConfigError(f"The configuration file {path} is nested too deeply.") from None
    # Also of a number with thousands of digits.
    except ValueError as error:
        raise ConfigError(f"The configuration file {path} is not valid TOML: {error}.") from None
    options = {key.replace("-", "_"): value for key, value in content.items()}
    for key in options:
        if key not in fields:
            raise ConfigError(f"The configuration file {path} sets {key!r}, which is not an option.")
    return options


def read_text(path: Path, option: str) -> str:
    """The text of a file that an option names. Raises ConfigError."""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{option}: there is no file {path}.") from None
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{option}: {path} is not text in UTF-8.") from None


def problem(error: ValidationError, fields: Fields, origins: Mapping[str, str]) -> ConfigError:
    """The first mistake as a sentence that a user can act on. It never contains a secret."""
    first = error.errors()[0]
    message = describe_problem(first)
    if not first["loc"]:
        return ConfigError(message + ".")
    name = str(first["loc"][0])
    given = "" if option_of(fields[name]).secret else f" {quoted(first['input'])}"
    message = message[0].lower() + message[1:]
    return ConfigError(f"{flag(name)}{given} (from {origins[name]}) is not valid: {message}.")


def quoted(value: Any) -> str:
    """A value that somebody gave, as a message quotes it. A long one is cut."""
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= MAX_QUOTED_CHARACTERS else text[:MAX_QUOTED_CHARACTERS] + "…"


def literal_choices(annotation: Any) -> list[str]:
    """The values of a Literal, also inside Optional."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, types.UnionType):
        return [choice for part in get_args(annotation) for choice in literal_choices(part)]
    return []


def choices_of(field: FieldInfo) -> list[str]:
    """The values that the docs list."""
    return list(option_of(field).choices) or literal_choices(field.annotation)


def shown_default(field: FieldInfo) -> str:
    """The default as the docs and --help show it."""
    if shown := option_of(field).shown_default:
        return shown
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return str(field.default)


def options_list(fields: Fields) -> str:
    """All options in Markdown, for the docs. A variable is named if it is not the flag in capitals."""
    groups: dict[str, list[str]] = {}
    for name, field in fields.items():
        definition = option_of(field)
        variables = () if definition.env == (name.upper(),) else definition.env
        names = ", ".join(f"`{each}`" for each in (flag(name), *definition.flags, *variables))
        choices = choices_of(field)
        doc = f"{field.description}" + (f" One of {', '.join(choices)}." if choices else "")
        groups.setdefault(definition.group, []).append(f"- {names} ({shown_default(field)}): {doc}")
    return "\n\n".join("\n".join([f"### {group}", "", *lines]) for group, lines in groups.items())


#: By the type of pydantic's error.
SENTENCES = {
    "int_parsing": "it must be a whole number",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_parsing": "it must be a number",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_parsing": "it must be true or false",
    "bool_type": "it must be true or false",
    "string_type": "it must be text",
    "list_type": "it must be a list",
    "tuple_type": "it must be a list",
    "dict_type": "it must be an object",
    "model_type": "it must be an object",
    "too_short": "it has too few items: at least {min_length}",
    "too_long": "it has too many items: at most {max_length}",
    "literal_error": "it must be {expected}",
    "greater_than": "it must be above {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must be below {lt}",
    "less_than_equal": "it must be at most {le}",
}


def describe_problem(error: Mapping[str, Any]) -> str:
    """The message of one of the errors in a ValidationError."""
    sentence = SENTENCES.get(error["type"])
    if sentence is None:
        return str(error["msg"]).removeprefix("Value error, ")
    bounds: Mapping[str, Any] = error.get("ctx", {})
    return sentence.format(**{name: without_decimals(bound) for name, bound in bounds.items()})


def without_decimals(bound: Any) -> Any:
    """A whole number without a decimal point or an exponent; anything else as it is."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound
