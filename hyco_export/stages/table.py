"""The stage table, in the order of the chain, and what each row is expected to take. One row is one artifact."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from hyco_export.core.layout import SLM
from hyco_export.core.recipe import Recipe
from hyco_export.core.sizes import head as head_sizes
from hyco_export.core.sizes import slm as slm_sizes
from hyco_export.core.sizes.estimate import Estimate, Work
from hyco_export.core.sizes.shapes import FamilyShape
from hyco_export.errors import RecipeError
from hyco_export.stages.build_keepset import STAGE as BUILD_KEEPSET
from hyco_export.stages.capture import STAGE as CAPTURE
from hyco_export.stages.capture_text import STAGE as CAPTURE_TEXT
from hyco_export.stages.compile import STAGE as COMPILE
from hyco_export.stages.convert_head import STAGE as CONVERT_HEAD
from hyco_export.stages.convert_slm import STAGE as CONVERT_SLM
from hyco_export.stages.qat_head import STAGE as QAT_HEAD
from hyco_export.stages.stage import Stage

STAGES = (CAPTURE, QAT_HEAD, BUILD_KEEPSET, CONVERT_HEAD, CONVERT_SLM, COMPILE)
SLM_STAGES = (CAPTURE_TEXT, BUILD_KEEPSET, CONVERT_SLM, replace(COMPILE, needs=(SLM,)))

Estimator = Callable[[Recipe, FamilyShape, Work], Estimate]
ESTIMATORS: Mapping[str, Estimator] = {
    CAPTURE.name: head_sizes.capture_estimate,
    QAT_HEAD.name: head_sizes.qat_estimate,
    BUILD_KEEPSET.name: head_sizes.keepset_estimate,
    CONVERT_HEAD.name: head_sizes.convert_head_estimate,
    CONVERT_SLM.name: slm_sizes.convert_slm_estimate,
    COMPILE.name: slm_sizes.compile_estimate,
}

SLM_ESTIMATORS = {**ESTIMATORS, CAPTURE_TEXT.name: head_sizes.capture_text_estimate}


def estimators_of(recipe: Recipe) -> Mapping[str, Estimator]:
    """What tells what a stage takes, by its name."""
    return SLM_ESTIMATORS if recipe.models.head is None else ESTIMATORS


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages of a recipe: those of the SLM alone where it names no head."""
    return SLM_STAGES if recipe.models.head is None else STAGES


def require_stage(recipe: Recipe, name: str) -> None:
    """Raises RecipeError: this stage is about a head, and the recipe names none."""
    if name not in {stage.name for stage in stages_of(recipe)}:
        raise RecipeError(
            f"recipe {recipe.name} has no $.models.head: {name} has nothing to work on",
            "name the verifier's head in $.models, or leave this command out",
        )
