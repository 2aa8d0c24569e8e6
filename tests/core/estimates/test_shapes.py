"""Sizes that files and memory depend on, beside the paper's figures and counts made by hand."""

import pytest

from hyco_export.core.estimates.shapes import FamilyShape, HeadShape, KvLayer, Matrix, VerifierShape
from tests.support.family_shapes import family_shape


def test_packed_bytes_of_every_width() -> None:
    assert [Matrix(6, 8, bits).packed_bytes for bits in (2, 4, 8, 16)] == [12, 24, 48, 96]
    assert Matrix(6, 8, 4).values == 48


def test_the_hand_off_of_gemma_4_26b_a4b() -> None:
    """Appendix A: e and h of 2,816 values; two layers of K and V, a sliding one of 8 x 256, a full one of 2 x 512."""
    layers = (KvLayer("sliding", 8, 256), KvLayer("full", 2, 512))
    verifier = VerifierShape(25_200_000_000, 2816, 262_144, layers)
    assert (verifier.round_values, verifier.row_values) == (5_632, 6_144)
    assert VerifierShape(1, 8, 16, ()).row_values == 0


def test_a_heads_weights_and_scales() -> None:
    head = HeadShape(width=4, vocab_size=10, layers=1, matrices=(Matrix(6, 4, 16), Matrix(4, 6, 16)), norm_values=9)
    assert (head.output_values, head.body_values, head.channels) == (40, 48, 20)


def test_a_family_without_a_head_has_none_to_give() -> None:
    family = family_shape(1)
    assert family.require_head() is family.head
    with pytest.raises(AssertionError):
        FamilyShape(family.verifier, None, family.slm).require_head()
