"""Settings as a user writes them: ``NAME=VALUE`` on a command line, or a TOML or JSON file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice._base.errors import DataError, InputError
from sluice._base.files import parse_json


def assignment(item: str, *, argument: str) -> tuple[str, Any]:
    """``NAME=VALUE`` as typed: the value is read as JSON where it is that, and as a word otherwise."""
    name, equals, text = item.partition("=")
    if not equals or not name:
        raise InputError(f"{argument}={item!r} is not allowed: it must be NAME=VALUE, such as lr=0.2.")
    try:
        return name, json.loads(text)
    except (ValueError, RecursionError):  # also numbers and nestings that are too long to be read
        return name, text


def settings_in(file: Path) -> Mapping[str, Any]:
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        raise InputError(f"config={str(file)!r} does not exist: give the path of a .toml or .json file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"config={str(file)!r} cannot be read: {error}.") from error
    try:
        data = parse_json(text.encode(), what="it") if file.suffix == ".json" else tomllib.loads(text)
    except (DataError, ValueError, RecursionError) as error:
        raise InputError(
            f"config={str(file)!r} cannot be read: {error} It must be TOML, or JSON in a .json file."
        ) from error
    if not isinstance(data, dict):
        raise InputError(f"config={str(file)!r} is not allowed: it must hold settings by name.")
    return data


__all__ = ["assignment", "settings_in"]
