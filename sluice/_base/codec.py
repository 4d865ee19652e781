"""Frozen classes as strict JSON and back: what is written is a class's fields, and nothing unknown or missing is read.

A class inherits `Encoded`. Where several classes may stand in one place, each has a ``kind``, its family says under which
key it is written (``tag``), and `readable` makes it one that is found by it. Nested fields are read by their annotations.

>>> @dataclass(frozen=True, kw_only=True)
... class Noise(Encoded):
...     multiplier: float
...     seeds: tuple[int, ...] = ()
>>> encode(Noise(multiplier=math.inf, seeds=(1, 2)))
{'multiplier': 'inf', 'seeds': [1, 2]}
>>> Noise.from_dict({"multiplier": "inf", "seeds": [1, 2]})
Noise(multiplier=inf, seeds=(1, 2))
>>> Noise.from_dict({"multiplier": 1.0})
Traceback (most recent call last):
    ...
sluice._base.errors.InputError: Noise lacks seeds: these keys are needed: multiplier, seeds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin, get_type_hints

from sluice._base import validate
from sluice._base.errors import InputError

#: Metadata of a field that files of earlier versions lack; its default says what those meant.
ADDED: Mapping[str, Any] = MappingProxyType({"added": True})

#: The same for a field that is written only where it is given, so that earlier files are written back as they were.
ADDED_IF_GIVEN: Mapping[str, Any] = MappingProxyType({"added": True, "if_given": True})

_SCALARS = {float: "a number", int: "an integer", str: "a string", bool: "true or false"}

# Larger integers than this are refused where a float is wanted: close to the largest that can become one.
_LARGEST_INTEGER = 2**1000

_READABLE: list[Any] = []
_Class = TypeVar("_Class", bound=type)


class Encoded:
    """A frozen dataclass (or attrs class) that can be written as JSON.

    Attributes:
        tag: the key under which ``kind`` is written; None where only one class can stand in a place.
        kind: the name of the class among its family.
    """

    tag: ClassVar[str | None] = None
    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for strict JSON; ``from_dict`` gives an equal object back."""
        data: dict[str, Any] = encode(self)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of ``to_dict``; unknown kinds, unknown keys and missing ones are refused."""
        found: Self = decode(cls, data, what=cls.__name__)
        return found


def readable(cls: _Class) -> _Class:
    """Let a class be found by its ``kind`` wherever one of its family is read."""
    _READABLE.append(cls)
    return cls


def is_readable(cls: type) -> bool:
    """Whether this very class, not only one that it inherits from, can be read back by its ``kind``."""
    return cls in _READABLE


def encode(value: Any) -> Any:
    """Plain data for strict JSON. Numbers that JSON lacks become strings, tuples become lists."""
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, tuple | list):
        return [encode(each) for each in value]
    if isinstance(value, Mapping):
        return {key: encode(each) for key, each in value.items()}
    cls: Any = type(value)
    if not _has_fields(cls):
        return value
    data = {} if getattr(value, "tag", None) is None else {value.tag: value.kind}
    for slot in _slots(cls):
        item = getattr(value, slot.name)
        if item is not None or not slot.if_given:
            data[slot.key] = encode(item)
    return data


def decode(annotation: Any, data: Any, *, what: str) -> Any:
    """The value of this type that ``encode`` wrote as ``data``.

    Annotations that say no more than Mapping or Any pass whatever is there, for the validators of its owner to judge.

    Args:
        what: how messages call it.
    """
    allowed = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if data is None and NoneType in allowed:
        return None
    first = allowed[0]
    if first in _SCALARS:
        return _scalar(first, data, what)
    if get_origin(first) is tuple:
        return _tuple(get_args(first), data, what)
    if isinstance(first, type) and (_has_fields(first) or issubclass(first, Encoded)):
        return _object(tuple(one for one in allowed if one is not NoneType), data, what)
    return data


def _scalar(kind: type, data: Any, what: str) -> Any:
    value = decode_float(data) if kind is float else data
    fits = isinstance(value, bool) == (kind is bool) and isinstance(value, int | float if kind is float else kind)
    if not fits or (kind is float and isinstance(value, int) and abs(value) >= _LARGEST_INTEGER):
        raise InputError(f"{what}={data!r} is not allowed: it must be {_SCALARS[kind]}.")
    return value


def _tuple(items: tuple[Any, ...], data: Any, what: str) -> tuple[Any, ...]:
    length = None if Ellipsis in items else len(items)
    if not isinstance(data, list | tuple) or (length is not None and len(data) != length):
        raise InputError(f"{what}={data!r} is not allowed: it must be a list{f' of {length}' if length else ''}.")
    return tuple(decode(items[0], each, what=what) for each in data)


def _object(classes: tuple[Any, ...], data: Any, what: str) -> Any:
    cls, tag = classes[0], getattr(classes[0], "tag", None)
    if tag is not None:
        if not isinstance(data, Mapping) or tag not in data:
            raise InputError(f"{what}={data!r} is not allowed: it must be an object with a key {tag!r}.")
        kinds = {each.kind: each for each in _READABLE if issubclass(each, classes)}
        _scalar(str, data[tag], tag)
        validate.one_of(kinds, **{tag: data[tag]})
        cls = kinds[data[tag]]
    slots = _slots(cls)
    required = [*([] if tag is None else [tag]), *(slot.key for slot in slots if not slot.added)]
    require_keys(data, what=what, required=required, optional=[slot.key for slot in slots if slot.added])
    return cls(
        **{slot.name: decode(slot.annotation, data[slot.key], what=slot.key) for slot in slots if slot.key in data}
    )


@dataclass(frozen=True, kw_only=True)
class _Slot:
    name: str
    key: str
    annotation: Any
    added: bool
    if_given: bool


def _has_fields(cls: Any) -> bool:
    return is_dataclass(cls) or hasattr(cls, "__attrs_attrs__")


@functools.cache
def _slots(cls: Any) -> tuple[_Slot, ...]:
    annotations = get_type_hints(cls)
    return tuple(
        _Slot(
            name=field.name,
            key=field.metadata.get("key", field.name),
            annotation=annotations[field.name],
            added="added" in field.metadata,
            if_given="if_given" in field.metadata,
        )
        for field in getattr(cls, "__attrs_attrs__", None) or fields(cls)
    )


def require_keys(data: object, *, what: str, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Refuse anything but an object with all required keys and no unknown one."""
    if not isinstance(data, Mapping):
        raise InputError(f"{what}={data!r} is not allowed: it must be a JSON object.")
    missing = [key for key in required if key not in data]
    unknown = [str(key) for key in data if key not in required and key not in optional]
    if missing:
        raise InputError(f"{what} lacks {', '.join(missing)}: these keys are needed: {', '.join(required)}.")
    if unknown:
        allowed = ", ".join([*required, *optional])
        raise InputError(f"{what} has unknown keys {', '.join(unknown)}: allowed are {allowed}.")


def encode_float(value: float) -> float | str:
    """JSON has no infinity: it is written as the string "inf"."""
    return value if math.isfinite(value) else str(value)


def decode_float(value: Any) -> Any:
    """The inverse of ``encode_float``; any other value passes, for the validators of its owner to judge."""
    return math.inf if value == "inf" else value
