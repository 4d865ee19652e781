"""What a user may write as features."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.features.catalog import FEATURES, Block, blocks_of, has_rows


def test_blocks_have_weights_and_options():
    blocks = blocks_of("stroke-net:deskew + 0.5*whitened-scattering:prior=pen-strokes,deskew")
    assert blocks == (
        Block(name="stroke-net", options={"deskew": True}),
        Block(name="whitened-scattering", weight=0.5, options={"prior": "pen-strokes", "deskew": True}),
    )


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "form"),
        ("strokes", "must be one of"),
        ("0*patches", "must be positive"),
        ("nan*patches", "form"),
        ("1.2.3*patches", "not a number"),
        ("patches:", "form"),
        ("patches:a,a", "stands once"),
        ("patches:a=", "stands once"),
        ("patches+plain", "cannot be joined"),
        ("weighted-words+bag-of-words", "cannot be joined"),
        ("patches++patches", "form"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(expression: str, why: str):
    with pytest.raises(InputError, match=why):
        blocks_of(expression)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str):
    with suppress(InputError):
        assert all(block.name in FEATURES for block in blocks_of(text))


def test_rows_are_made_by_what_has_an_implementation_for_images():
    assert has_rows("patches")
    assert has_rows("patches+stroke-net")
    assert not any(has_rows(each) for each in ("plain", "scattering", "bag-of-words", "weighted-words"))


def test_every_feature_says_where_it_comes_from():
    for entry in FEATURES.values():
        assert "No record of any data set" in entry.origin or "by itself" in entry.origin
