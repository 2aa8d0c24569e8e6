"""Which values of a recipe fit together: rules that need more than one field, and what is said of a broken one.

Knows the fields and what the target computes; not how a recipe is read.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from hyco_export.core.data.source import as_source, check_source
from hyco_export.core.keepset_choice import check_keepset_choice
from hyco_export.core.limits import COLDEST, HOTTEST, NODE_LIMIT
from hyco_export.core.recipe import Recipe
from hyco_export.core.targets import Target, find_target
from hyco_export.errors import CompileError, RecipeError

LARGEST_FLOAT = float(np.finfo(np.float32).max)
LPBQ_BITS = 4  # the only width of low-power blocks on HTP
Rule = tuple[bool, str]
"""Does it hold, and what is said where it does not."""


def check_recipe(recipe: Recipe) -> None:
    """Rules that need more than one field.

    Raises:
        RecipeError: the first broken rule, with the path of the field to change.
    """
    _require_finite(msgspec.to_builtins(recipe), "$")
    try:
        target = find_target(recipe.target)
    except CompileError as error:
        raise RecipeError(f"$.target: {error.message}", error.hint) from error
    for name in ("calibration", "validation", "conversations"):
        check_source(getattr(recipe.data, name), f"$.data.{name}")
    check_keepset_choice(recipe.keepset)
    for holds, message in (
        *_graph_rules(recipe),
        *_qat_rules(recipe, target),
        *_data_rules(recipe),
        *_validation_rules(recipe),
    ):
        if not holds:
            raise RecipeError(message, "change the field")


def _require_finite(value: Any, field: str) -> None:
    """Raises RecipeError: a number that float32, in which everything here computes, does not have."""
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        inside = ((f"{field}.{name}", part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        inside = ((f"{field}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:  # NaN is not either
        raise RecipeError(f"{field} is {value}, it must be finite in float32", "change the field")
    for name, part in inside:
        _require_finite(part, name)


def _graph_rules(recipe: Recipe) -> tuple[Rule, ...]:
    """Keep set, rings, rows and the tree that they must hold."""
    planted = recipe.head.steps + recipe.head.runner_up_steps
    return (
        (
            recipe.slm.ring >= recipe.slm.rows,
            f"$.slm.ring is {recipe.slm.ring}, shorter than a tree pass of $.slm.rows = {recipe.slm.rows}",
        ),
        (
            recipe.slm.sliding_ring >= recipe.slm.rows,
            f"$.slm.sliding_ring is {recipe.slm.sliding_ring}, shorter than a tree pass of {recipe.slm.rows} rows",
        ),
        (
            min(recipe.slm.ring, recipe.slm.sliding_ring) >= recipe.slm.prefill_rows,
            f"$.slm.prefill_rows is {recipe.slm.prefill_rows}, longer than the shortest ring",
        ),
        (
            recipe.head.runner_up_steps <= recipe.head.steps,
            f"$.head.runner_up_steps is {recipe.head.runner_up_steps}, more than $.head.steps = {recipe.head.steps}",
        ),
        (
            recipe.slm.rows > planted,
            f"$.slm.rows is {recipe.slm.rows}, too few for the root and {planted} planted nodes",
        ),
        (
            recipe.drafting.budget >= planted,
            f"$.drafting.budget is {recipe.drafting.budget}, smaller than the {planted} planted nodes",
        ),
        (
            recipe.drafting.budget <= NODE_LIMIT,
            f"$.drafting.budget is {recipe.drafting.budget}, the server takes trees of at most {NODE_LIMIT} nodes",
        ),
    )


def _qat_rules(recipe: Recipe, target: Target) -> tuple[Rule, ...]:
    """Widths and grids that the target computes, and a schedule that ends."""
    return (
        (
            recipe.qat.clip_ratio_low <= recipe.qat.clip_ratio_high,
            f"$.qat.clip_ratio_low {recipe.qat.clip_ratio_low} is above clip_ratio_high {recipe.qat.clip_ratio_high}",
        ),
        (
            not recipe.slm.weights or recipe.slm.weights.clip_ratio_low <= recipe.slm.weights.clip_ratio_high,
            "$.slm.weights.clip_ratio_low is above clip_ratio_high",
        ),
        (
            not recipe.slm.weights
            or {recipe.slm.weights.bits, recipe.slm.weights.output_bits} <= set(target.weight_bits),
            f"$.slm.weights has widths that {target.name} does not compute: it has {sorted(target.weight_bits)}",
        ),
        (
            recipe.qat.warmup_steps <= recipe.qat.steps,
            f"$.qat.warmup_steps is {recipe.qat.warmup_steps}, more than $.qat.steps = {recipe.qat.steps}",
        ),
        (
            recipe.qat.unrolled_steps <= recipe.head.steps,
            f"$.qat.unrolled_steps is {recipe.qat.unrolled_steps}, more than $.head.steps = {recipe.head.steps}",
        ),
        (
            recipe.qat.weight_bits in target.weight_bits,
            f"$.qat.weight_bits is {recipe.qat.weight_bits}, {target.name} computes {sorted(target.weight_bits)}",
        ),
        *(
            (
                bits in target.weight_bits,
                f"$.qat.overrides: {pattern} has {bits}, {target.name} computes {sorted(target.weight_bits)}",
            )
            for pattern, bits in recipe.qat.overrides.items()
        ),
        (
            recipe.qat.grid == "per-channel" or recipe.qat.weight_bits == LPBQ_BITS,
            f"$.qat.grid is lpbq, which has {LPBQ_BITS} bits, and $.qat.weight_bits is {recipe.qat.weight_bits}",
        ),
    )


def _validation_rules(recipe: Recipe) -> tuple[Rule, ...]:
    """Systems, and what is demanded of them."""
    plan = recipe.validation
    strangers = sorted(set(plan.gates.min_mat) - set(plan.systems))
    return (
        (
            len(set(plan.systems)) == len(plan.systems),
            f"$.validation.systems names a system twice: {', '.join(plan.systems)}",
        ),
        (
            not strangers,
            f"$.validation.gates.min_mat has a limit for {', '.join(strangers)}, not in $.validation.systems",
        ),
    )


def _data_rules(recipe: Recipe) -> tuple[Rule, ...]:
    """Prompts and what is drawn from them."""
    return (
        (
            recipe.sampling.temperature == 0 or COLDEST <= recipe.sampling.temperature <= HOTTEST,
            f"$.sampling.temperature is {recipe.sampling.temperature}, it must be 0 or lie in [{COLDEST}, {HOTTEST}]",
        ),
        (
            COLDEST <= recipe.drafting.slm_temperature <= HOTTEST,
            f"$.drafting.slm_temperature is {recipe.drafting.slm_temperature}, it must lie in [{COLDEST}, {HOTTEST}]",
        ),
        (
            recipe.capture.sampled_answers == 0 or recipe.sampling.temperature > 0,
            f"$.capture.sampled_answers is {recipe.capture.sampled_answers}, $.sampling.temperature 0 draws nothing",
        ),
        (
            as_source(recipe.data.calibration) != as_source(recipe.data.validation),
            "$.data.validation is the same source as $.data.calibration",
        ),
    )
