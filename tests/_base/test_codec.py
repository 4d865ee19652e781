from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from sluice._base.codec import ADDED, ADDED_IF_GIVEN, Encoded, decode, encode, readable
from sluice._base.errors import InputError


class Shape(Encoded):
    tag: ClassVar[str | None] = "shape"


@readable
@dataclass(frozen=True, kw_only=True)
class Disc(Shape):
    kind: ClassVar[str] = "disc"

    radius: float


@readable
@dataclass(frozen=True, kw_only=True)
class Box(Shape):
    kind: ClassVar[str] = "box"

    sides: tuple[float, float]
    solid: bool = field(default=True, metadata=ADDED)


class Ring(Disc):
    """Of somebody's own: it inherits a kind and cannot be read back as itself."""


@dataclass(frozen=True, kw_only=True)
class Drawing(Encoded):
    shape: Shape
    below: Disc | Box | None
    count: int
    named: str = field(metadata={"key": "name"})
    note: str | None = field(default=None, metadata=ADDED_IF_GIVEN)


DRAWING = Drawing(shape=Disc(radius=math.inf), below=Box(sides=(1.0, 2.5)), count=3, named="x")
DATA = {
    "shape": {"shape": "disc", "radius": "inf"},
    "below": {"shape": "box", "sides": [1.0, 2.5], "solid": True},
    "count": 3,
    "name": "x",
}


def test_fields_are_written_in_order_and_read_back():
    assert json.dumps(encode(DRAWING), allow_nan=False) == json.dumps(DATA)
    assert Drawing.from_dict(DATA) == DRAWING
    noted = Drawing(shape=Disc(radius=1.0), below=None, count=3, named="x", note="y")
    assert noted.to_dict()["note"] == "y"
    assert Drawing.from_dict(noted.to_dict()) == noted


def test_fields_that_were_added_may_be_missing():
    assert Shape.from_dict({"shape": "box", "sides": [1.0, 2.0]}) == Box(sides=(1.0, 2.0), solid=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "Drawing has unknown keys extra"),
        ({"count": None}, "count=None is not allowed: it must be an integer"),
        ({"count": True}, "count=True is not allowed"),
        ({"count": 3.0}, "count=3.0 is not allowed"),
        ({"name": 1}, "name=1 is not allowed: it must be a string"),
        ({"shape": {"radius": 1.0}}, "shape=.* must be an object with a key 'shape'"),
        ({"shape": {"shape": "cone"}}, "shape='cone' is not allowed: it must be one of box, disc"),
        ({"shape": {"shape": ["disc"]}}, r"shape=\['disc'\] is not allowed"),
        ({"shape": {"shape": "disc"}}, "shape lacks radius"),
        ({"shape": {"shape": "disc", "radius": "1"}}, "radius='1' is not allowed: it must be a number"),
        ({"shape": {"shape": "disc", "radius": 10**400}}, "radius=.* must be a number"),
        ({"shape": None}, "shape=None is not allowed"),
        ({"below": {"shape": "box", "sides": [1.0]}}, "sides=.* must be a list of 2"),
        ({"below": {"shape": "box", "sides": 1.0}}, "sides=1.0 is not allowed"),
        ({"below": {"shape": "box", "sides": [1.0, 2.0], "solid": 0}}, "solid=0 is not allowed: it must be true or"),
    ],
)
def test_data_of_another_form_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        Drawing.from_dict(DATA | change)


def test_a_key_that_is_missing_is_named():
    with pytest.raises(InputError, match="lacks count"):
        Drawing.from_dict({key: value for key, value in DATA.items() if key != "count"})


def test_a_class_is_found_only_where_its_family_is_wanted():
    with pytest.raises(InputError, match="shape='box' is not allowed: it must be one of disc"):
        decode(Disc, encode(Box(sides=(1.0, 2.0))), what="shape")
    assert type(Shape.from_dict(Ring(radius=1.0).to_dict())) is Disc
