from __future__ import annotations

import math

import pytest

from sluice._base import validate
from sluice._base.errors import InputError


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (validate.positive, [1, 0.5], [0, -1, math.inf, math.nan, "1", None, True]),
        (validate.positive_or_infinite, [1, math.inf], [0, -1, math.nan, "inf"]),
        (validate.non_negative, [0, 2.5], [-1e-9, math.inf, math.nan]),
        (validate.finite, [0, -3], [math.inf, math.nan, "x"]),
        (validate.fraction, [1, 1e-9], [0, 1.1, math.nan]),
        (validate.open_fraction, [1e-5, 0.5], [0, 1, math.nan]),
        (validate.positive_integer, [1, 7], [0, 1.0, -1, True]),
    ],
)
def test_each_validator_accepts_the_good_and_names_the_bad(check, good, bad):
    for value in good:
        check(noise_multiplier=value)
    for value in bad:
        with pytest.raises(InputError, match=r"noise_multiplier=.* is not allowed: it must be"):
            check(noise_multiplier=value)


def test_one_of_lists_the_choices():
    validate.one_of({"rdp", "pld"}, accountant="rdp")
    with pytest.raises(InputError, match="accountant='prv' is not allowed: it must be one of pld, rdp"):
        validate.one_of({"rdp", "pld"}, accountant="prv")
