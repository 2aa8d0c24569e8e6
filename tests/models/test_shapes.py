"""Shapes from configs, and estimates at real sizes beside figures that were measured there."""

import numpy as np
import pytest

from hyco_export.core.estimates import stages as head_sizes
from hyco_export.core.estimates import stages as slm_sizes
from hyco_export.core.estimates.coefficients import MEASURED
from hyco_export.core.estimates.shapes import FamilyShape
from hyco_export.core.estimates.stages import Split, Work
from hyco_export.core.recipe import Recipe
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.models.families.released_configs import known_config
from hyco_export.models.shapes import head_shape, slm_shape, verifier_shape
from hyco_export.models.slm.float import Rounding

CLOSE = 0.2  # of the measured value
PAPER = load_recipe(embedded_recipe().parent / "gemma4-26b-a4b-sm8850.yaml")


def shape_of(recipe: Recipe) -> FamilyShape:
    models = recipe.models
    return FamilyShape(
        verifier_shape(known_config(models.verifier.model)),
        head_shape(known_config(models.head.model)),
        slm_shape(known_config(models.slm.model)),
    )


@pytest.fixture(scope="module")
def family() -> FamilyShape:
    return shape_of(PAPER)


def test_the_papers_models(family: FamilyShape) -> None:
    assert family.verifier.parameters == pytest.approx(25.2e9, rel=0.01)  # the model card
    assert (family.verifier.round_values, family.verifier.row_values) == (5_632, 6_144)  # Appendix A
    assert family.head.body_values + family.head.output_values == pytest.approx(419.7e6, rel=1e-3)
    assert (family.slm.layers, len(family.slm.storing)) == (35, 15)
    assert family.slm.per_layer_width == 35 * 256


def test_sizes_of_the_papers_artifacts(family: FamilyShape) -> None:
    table = PAPER.keepset.size * family.verifier.hidden
    assert table == pytest.approx(242e6, rel=0.01)  # §3.3
    binary = head_sizes.head_binary_bytes(PAPER, family)
    assert binary == pytest.approx(376e6, rel=0.03)  # measured, 4-bit weights; the paper: 365
    tree = slm_sizes.slm_binary_bytes(slm_sizes.tree_weight_bytes(PAPER, family), family.slm.layers)
    assert tree == pytest.approx(1_047e6, rel=0.03)  # measured with 4-bit carriers
    prefill = slm_sizes.slm_binary_bytes(slm_sizes.prefill_weight_bytes(family.slm), len(family.slm.storing))
    assert prefill == pytest.approx(289e6, rel=0.03)  # measured
    assert PAPER.compile.two_bit_weights
    narrow = slm_sizes.slm_binary_bytes(slm_sizes.tree_weight_bytes(PAPER, family, True), family.slm.layers)
    assert narrow == pytest.approx(
        732e6, rel=0.03
    )  # measured with the checkpoint's 2-bit weights in 2 bits; paper: 754
    answer = slm_sizes.compile_estimate(PAPER, family, Work(*[Split(0, 0, 0)] * 3, conversations=0))
    assert answer.binary_bytes == binary + narrow + prefill  # prefill has no 2-bit weights


def test_stages_at_full_size_beside_a_measured_run(family: FamilyShape) -> None:
    """Three prompts a set, 32 new tokens, two training steps: created checkpoints at scale `full`."""
    answers = Split(3, 63, 32)
    work = Work(answers, Split(0, 0, 32), answers, conversations=907)
    capture = head_sizes.capture_estimate(PAPER, family, work)
    assert capture.tokens == 318
    trees = answers.sequences * MEASURED.golden_tree  # the run was measured before captures held golden trees
    assert capture.disk_bytes - trees == pytest.approx(7_509_000, rel=0.01)
    qat = head_sizes.qat_estimate(PAPER, family, work)
    assert qat.disk_bytes == pytest.approx(421_221_000, rel=0.01)
    assert qat.ram_bytes == pytest.approx(13_601e6, rel=0.05)
    keepset = head_sizes.keepset_estimate(PAPER, family, work)
    assert keepset.disk_bytes == pytest.approx(243_174_000, rel=0.001)
    assert keepset.ram_bytes == pytest.approx(925e6, rel=CLOSE)  # by itself
    assert keepset.ram_bytes == pytest.approx(1_244e6, rel=CLOSE)  # in one process after capture and qat-head
    head = head_sizes.convert_head_estimate(PAPER, family, work)
    assert head.disk_bytes == pytest.approx(383_055_000, rel=0.01)
    assert head.ram_bytes == pytest.approx(4_464e6, rel=0.1)
    slm = slm_sizes.convert_slm_estimate(PAPER, family, work)
    assert slm.disk_bytes == pytest.approx(3_074e6, rel=0.02)
    assert slm.ram_bytes == pytest.approx(5_440e6, rel=0.1)
    assert slm_sizes.compile_estimate(PAPER, family, work).ram_bytes == pytest.approx(7_020e6, rel=0.1)


def test_unknown_models_have_no_shape() -> None:
    assert known_config("somebody/else") is None


def test_an_unquantised_slm_counts_the_floats_that_it_is_judged_beside() -> None:
    config = known_config("gemma-3-270m-q4_k_m.gguf")
    assert config is not None
    rounded = slm_shape(config, Rounding(8, 8, np.array([1.0])))
    assert rounded.float_values == 268_098_176  # the model card: 268 M
    assert shape_of(PAPER).slm.float_values == 0  # packed
