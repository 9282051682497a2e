"""Command lines of the entry points that use a run: `key=value` words, taken as typed (no Hydra grammar)."""

from __future__ import annotations

import dataclasses
import difflib
import os
import signal
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nvfp4_train.errors import ConfigError, StoppedBySignal, UserError

Options = TypeVar("Options")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def option(help: str, default: Any = dataclasses.MISSING) -> Any:
    """A field of an options dataclass, with its line in --help."""
    return dataclasses.field(default=default, metadata={"help": help})


def parse(argv: Sequence[str], options: type[Options], prog: str) -> Options | None:
    """The options that `argv` gives, or None when it asks for --help, which is then printed.

    A word is split at its first "=", and what follows is the value, every character of it. Fields of `options` are
    str, int, float or bool, or one of these or None. Raises ConfigError on an unknown, doubled or missing key, or
    a value of another type.
    """
    if "--help" in argv or "-h" in argv:
        print(_help(options, prog))
        return None
    kinds = typing.get_type_hints(options)
    values: dict[str, Any] = {}
    for word in argv:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not of the form key=value: see --help.")
        if key not in kinds:
            close = difflib.get_close_matches(key, kinds, n=1)
            hint = f", did you mean {close[0]}?" if close else ";"
            raise ConfigError(f"{key}: no such option{hint} options: {', '.join(kinds)}.")
        if key in values:
            raise ConfigError(f"{key} is given twice: give it once.")
        values[key] = _value(key, text, kinds[key])
    missing = [
        f.name
        for f in dataclasses.fields(options)
        if f.default is dataclasses.MISSING and f.name not in values
    ]
    if missing:
        raise ConfigError(f"{missing[0]}=... is missing: see --help.")
    return options(**values)


def exit_code(main: Callable[[list[str]], None]) -> int:
    """Run `main` on the command line; a UserError becomes its sentence on standard error and its exit code.

    OpenMP reads its settings when torch is imported, so `main` must import torch itself.
    """
    # A thread that waits for the others spins, and on a machine that is busy with something else it spins away the very
    # core that they need (by default 3 to 10 times slower). After 1000 turns it sleeps, which costs an idle machine nothing.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except UserError as error:
        if isinstance(error, StoppedBySignal):
            # Launchers send several signals; the exit code tells them that this process needs no more.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        rank = int(os.environ.get("RANK", "0"))
        if rank == 0 or not error.of_all_ranks:
            print(f"Error{f' on rank {rank}' * (rank > 0)}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


def _value(key: str, text: str, kind: Any) -> Any:
    optional = isinstance(kind, types.UnionType)
    if optional:
        if text in ("null", "none", ""):
            return None
        kind = next(arg for arg in typing.get_args(kind) if arg is not type(None))
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is int:
            number = float(text)  # 1e6 is a whole number too
            if number != int(number):
                raise ValueError
            return int(number)
        return kind(text)
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"{key}={text} must be {_WORDS[kind]}{' or null' if optional else ''}.") from None


def _help(options: type, prog: str) -> str:
    rows = []
    for f in dataclasses.fields(options):
        needed = f.default is dataclasses.MISSING
        rows.append(
            (f"{f.name}=", f.metadata["help"] + ("" if needed or f.default is None else f" ({f.default})"))
        )
    width = max(len(name) for name, _ in rows)
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)
    words = " ".join(
        f"{f.name}=..." if f.default is dataclasses.MISSING else f"[{f.name}=...]"
        for f in dataclasses.fields(options)
    )
    return f"usage: python -m {prog} {words}\n\n{lines}"
