"""Mistakes on the command line, each told in one sentence with what would be accepted.

Hydra would find most of them too, but tells them in its own terms ("Could not override ...") and after composing.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from nvfp4_train.errors import ConfigError


def check_overrides(overrides: Sequence[str], schema: type, groups: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError unless every override parses and names a group's option or a key of `schema`."""
    parser = OverridesParser.create()
    chosen: set[str] = set()
    for text in overrides:
        override = _parse(parser, text, groups)
        key = override.key_or_group
        if key in groups:
            _check_option(override, text, groups[key])
            if key in chosen:
                raise ConfigError(f"{text}: {key} is given twice; give one option.")
            chosen.add(key)
        else:
            _check_key(override, text, schema, groups)


def open_dicts(overrides: Sequence[str], schema: type) -> list[str]:
    """`overrides` with "++" before those of a dict's keys, which Hydra otherwise takes for misspelt ones."""
    return [f"++{text.lstrip('+')}" if _names_dict(text, schema) else text for text in overrides]


def _names_dict(text: str, schema: type) -> bool:
    kind: Any = schema
    for part in text.lstrip("+").split("=")[0].split("."):
        if dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind).get(part)
    return typing.get_origin(kind) is dict


def keys(schema: type, prefix: str = "") -> list[str]:
    """Every dotted key of a dataclass tree, sections and leaves."""
    names = []
    for name, kind in typing.get_type_hints(schema).items():
        names.append(prefix + name)
        if dataclasses.is_dataclass(kind):
            names += keys(kind, f"{prefix}{name}.")
    return names


def explain(error: HydraException | OmegaConfBaseException, schema: type) -> str:
    """One sentence for what Hydra or OmegaConf raised while composing."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return _first_line(error)
    reason = _first_line(cause)
    # Hydra knows the override whose merge failed, OmegaConf the key below it (in a list, say).
    key = cause.full_key or ""
    named = f"{key}: " if key and key not in reason else ""
    expected = _expected(schema, key)
    return f"{named}{reason}" + (f"; it must be {expected}." if expected else ".")


def _parse(parser: OverridesParser, text: str, groups: Mapping[str, Sequence[str]]) -> Override:
    if "=" not in text and not text.startswith("~"):
        if text.lstrip("+") in groups.get("experiment", ()):
            raise ConfigError(f"{text!r} is not of the form key=value; write +experiment={text.lstrip('+')}.")
        raise ConfigError(f"{text!r} is not of the form key=value, group=option or +experiment=NAME.")
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"{text!r} cannot be read ({_first_line(error)}); put a value with special characters in quotes of its "
            f"own, such as '{text.split('=')[0]}=\"...\"'."
        ) from error
    if override.is_delete():
        raise ConfigError(f"{text}: nothing can be deleted from the configuration; set another value.")
    if override.is_sweep_override():
        raise ConfigError(f"{text}: several values for one key; give one, or a list as [a,b].")
    return override


def _check_option(override: Override, text: str, options: Sequence[str]) -> None:
    group, value = override.key_or_group, str(override.value())
    if value not in options:
        raise ConfigError(f"{text}: no such {group}{_closest(value, options)}; choose {', '.join(options)}.")
    if group == "experiment" and not override.is_add():
        raise ConfigError(f"{text}: write it with a plus sign, +{text.lstrip('+')}.")
    if group != "experiment" and override.is_add():
        raise ConfigError(f"{text}: write it without the plus sign, {text.lstrip('+')}.")


def _check_key(override: Override, text: str, schema: type, groups: Mapping[str, Sequence[str]]) -> None:
    key = override.key_or_group
    if key.split(".")[0] == "hydra":
        raise ConfigError(
            f"{text}: Hydra's own settings have no effect here; the run's folder is run_dir=DIR."
        )
    kind: Any = schema
    path: list[str] = []
    for part in key.split("."):
        if not dataclasses.is_dataclass(kind):
            if typing.get_origin(kind) in (list, dict):
                return  # an element: composing checks it
            raise ConfigError(f"{text}: {'.'.join(path)} is a single value and has no keys below it.")
        fields = typing.get_type_hints(kind)
        if part not in fields:
            section = f"keys of {'.'.join(path)}" if path else "top-level keys and groups"
            raise ConfigError(
                f"{text}: no such key{_closest(key, keys(schema))}; {section}: "
                f"{', '.join(dict.fromkeys([*fields, *(() if path else groups)]))}."
            )
        kind = fields[part]
        path.append(part)
    if override.is_add():
        raise ConfigError(
            f"{text}: {key} is there already; write it without the plus sign, {text.lstrip('+')}."
        )


def _closest(wrong: str, right: Iterable[str]) -> str:
    right = list(right)
    same_leaf = [key for key in right if "." in key and key.split(".")[-1] == wrong.split(".")[-1]]
    matches = same_leaf or difflib.get_close_matches(wrong, right, n=1, cutoff=0.6)
    leaves = {key.split(".")[-1]: key for key in right}
    if not matches:
        matches = [
            leaves[leaf] for leaf in difflib.get_close_matches(wrong.split(".")[-1], leaves, n=1, cutoff=0.75)
        ]
    return f", did you mean {matches[0]}?" if matches else ""


def _expected(schema: type, key: str) -> str:
    """The type of the key in words, "" where it isn't a plain leaf."""
    kind: Any = schema
    for part in key.replace("[", ".").replace("]", "").split("."):
        if typing.get_origin(kind) is list and part.isdigit():
            kind = typing.get_args(kind)[0]
        elif dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind).get(part)
        else:
            return ""
    optional = isinstance(kind, types.UnionType)
    if optional:
        kind = next(arg for arg in typing.get_args(kind) if arg is not type(None))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    word = words.get(kind) or ("a list" if typing.get_origin(kind) is list else "")
    return f"{word} or null" if word and optional else word


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
