"""Commands whose options are the fields of a frozen class, so that each option is written down once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

Options = TypeVar("Options")


def from_fields(command: Callable[[Options], None]) -> Callable[..., None]:
    """The command whose options are the fields of the class that ``command`` takes, in their order.

    A field that is such a class itself stands for its own fields. A tuple is an option that may be repeated; without it the
    field keeps its default, which is shown as it would be typed.
    """
    hints = get_type_hints(command)
    (kind,) = (hint for name, hint in hints.items() if name != "return")
    parameters = list(_parameters(kind))

    @wraps(command)
    def called(**given: Any) -> None:
        command(_made(kind, given))

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _fields(kind: Any) -> Iterator[tuple[str, Any, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return ((each.name, hints[each.name], each.default) for each in fields(kind) if each.init)


def _parameters(kind: Any) -> Iterator[inspect.Parameter]:
    for name, hint, default in _fields(kind):
        if is_dataclass(hint):
            yield from _parameters(hint)
            continue
        value, option = get_args(hint)
        if _is_tuple(hint):
            value, option, default = list[str] | None, _showing(option, default), None
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[value, option]
        )


def _made(kind: Any, given: Mapping[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for name, hint, default in _fields(kind):
        if is_dataclass(hint):
            values[name] = _made(hint, given)
        elif _is_tuple(hint):
            values[name] = tuple(given[name] or default)
        else:
            values[name] = given[name]
    return kind(**values)


def _is_tuple(hint: Any) -> bool:
    return get_origin(get_args(hint)[0]) is tuple


def _showing(option: OptionInfo, default: tuple[str, ...]) -> OptionInfo:
    shown = copy(option)
    if default and not isinstance(option.show_default, str):
        shown.show_default = ",".join(default)
    return shown
