"""Loads a recipe: YAML without ambiguity, strict keys and types, then the rules that need more than one field.

PyYAML reads YAML 1.1, most authors mean 1.2: a value with two readings, or a key that stands twice, is refused with its
line. `check_recipe` holds the rules; `load_recipe` does it all.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from hyco_export.core.files import resource_path
from hyco_export.core.numerics import COLDEST, HOTTEST, NODE_LIMIT
from hyco_export.core.recipe import Price, Recipe
from hyco_export.core.recipe_sections import as_source, check_keepset_choice, check_source
from hyco_export.core.targets import Target, find_target
from hyco_export.errors import CompileError, RecipeError

PREFIX = "tag:yaml.org,2002:"
NULL, BOOL, INT, FLOAT, TEXT = f"{PREFIX}null", f"{PREFIX}bool", f"{PREFIX}int", f"{PREFIX}float", f"{PREFIX}str"
CORE_SCHEMA = {  # YAML 1.2.2, section 10.3.2
    NULL: re.compile("null|Null|NULL|~|"),
    BOOL: re.compile("true|True|TRUE|false|False|FALSE"),
    INT: re.compile("[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    FLOAT: re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
}


RECIPES_FOLDER = "recipes"  # in the package, or beside it in a checkout
LARGEST_FLOAT = float(np.finfo(np.float32).max)
LPBQ_BITS = 4  # the only width of low-power blocks on HTP
Rule = tuple[bool, str]
"""Whether it holds, and the message where it does not."""


def read_yaml(path: Path) -> Any:
    """The plain values of a YAML file.

    Raises:
        RecipeError: it cannot be read, is not YAML, a mapping has a key twice, or a value has two readings; names the
            lines.
    """
    try:
        return yaml.load(path.read_bytes(), _Loader)
    except FileNotFoundError as error:
        raise RecipeError(
            f"recipe {path} does not exist",
            f"give a YAML file, the name of one that ships ({', '.join(shipped_recipes())}), or none for the embedded "
            "tiny family",
        ) from error
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}", "give a file that can be read") from error
    except _MistakeError as error:
        raise RecipeError(f"recipe {path}: {error}", error.hint) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"recipe {path} is not YAML: {' '.join(str(error).split())}", "correct the file") from error


class _MistakeError(Exception):
    """Valid YAML that is surely a mistake."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class _Loader(yaml.SafeLoader):
    """Refuses what PyYAML accepts silently: a repeated key, and an unquoted scalar that YAML 1.2 reads otherwise."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Treat a scalar with an explicit tag (`!!str 0200`) as quoted: it has one reading."""
        tag = self.peek_event().tag  # type: ignore[no-untyped-call]  # absent from its stub
        node = super().compose_scalar_node(anchor)
        if tag is not None:
            node.style = node.style or "'"
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                message = f"`{key.value}` stands twice, in lines {seen[key.value]} and {line}"
                raise _MistakeError(message, "remove one of them")
            seen[key.value] = line
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A node's value; an unquoted scalar must mean the same in YAML 1.1 and 1.2.

        Text in 1.1 is read by 1.2: `1e-5` is a number.
        """
        if not isinstance(node, yaml.ScalarNode) or node.style is not None or not node.tag.startswith(PREFIX):
            return super().construct_object(node, deep)
        new = _core_value(node.value)
        if node.tag == TEXT:
            old = new
        elif node.tag in (NULL, BOOL, INT, FLOAT, f"{PREFIX}timestamp"):
            old = super().construct_object(node, deep)
        else:  # a merge key
            return super().construct_object(node, deep)
        place = f"line {node.start_mark.line + 1}: `{node.value}`"
        if repr(new) != repr(old):  # repr, because 1 == True and NaN != NaN
            message = f"{place} is {_words(old)} in YAML 1.1 and {_words(new)} in YAML 1.2"
            raise _MistakeError(message, "write the value that is meant, or quote a text")
        return new


def _core_value(text: str) -> Any:
    """An unquoted scalar by YAML 1.2's core schema."""
    tag = next((tag for tag, pattern in CORE_SCHEMA.items() if pattern.fullmatch(text)), TEXT)
    if tag == NULL:
        return None
    if tag == BOOL:
        return text.lower() == "true"
    if tag == INT:
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan")) if tag == FLOAT else text


def _words(value: Any) -> str:
    return f"the text {value!r}" if isinstance(value, str) else str(value).lower()


def check_recipe(recipe: Recipe) -> None:
    """Check the rules that need more than one field.

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
    """Raises RecipeError: a number that float32 cannot hold; everything here computes in it."""
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        inside = ((f"{field}.{name}", part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        inside = ((f"{field}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:  # also true for NaN
        raise RecipeError(f"{field} is {value}, it must be finite in float32", "change the field")
    for name, part in inside:
        _require_finite(part, name)


def _graph_rules(recipe: Recipe) -> tuple[Rule, ...]:
    """Rings, rows and the tree that they must hold."""
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
            recipe.drafting.largest_tree >= planted,
            f"$.drafting.budget is {recipe.drafting.largest_tree}, smaller than the {planted} planted nodes",
        ),
        (
            recipe.drafting.largest_tree <= NODE_LIMIT,
            f"$.drafting.budget is {recipe.drafting.budget}, the server takes trees of at most {NODE_LIMIT} nodes",
        ),
        (
            recipe.drafting.objective != Price(),
            "$.drafting.objective gives neither server_ms nor wall_ms a price",
        ),
    )


def _qat_rules(recipe: Recipe, target: Target) -> tuple[Rule, ...]:
    """Widths that the target computes, clip ranges in order, and a schedule that fits."""
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
            f"$.qat.grid is {recipe.qat.grid}, which has {LPBQ_BITS} bits, "
            f"and $.qat.weight_bits is {recipe.qat.weight_bits}",
        ),
    )


def _validation_rules(recipe: Recipe) -> tuple[Rule, ...]:
    """Systems and their gates."""
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
    """Prompts and sampling."""
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


def load_recipe(path: Path) -> Recipe:
    """The recipe of a YAML file, checked.

    Raises:
        RecipeError: file or pipe missing, not YAML, an unknown or repeated key, a wrong type or an impossible pair;
            names the field.
    """
    if path.is_dir():
        raise RecipeError(f"recipe {path} is a folder", "give the YAML file in it")
    try:
        recipe = msgspec.convert(read_yaml(path), Recipe, strict=True)
    except msgspec.ValidationError as error:
        raise RecipeError(
            f"recipe {path.name}: {error}", "`hyco-export recipes show tiny` prints one with its fields explained"
        ) from error
    check_recipe(recipe)
    return recipe


def embedded_recipe() -> Path:
    """The tiny family's recipe, shipped with the package."""
    return resource_path(f"{RECIPES_FOLDER}/tiny.yaml")


def shipped_recipes() -> dict[str, Path]:
    """The recipes of this installation by name, in order of the names."""
    return {path.stem: path for path in sorted(resource_path(RECIPES_FOLDER).glob("*.yaml"))}


def recipe_file(reference: Path) -> Path:
    """The file that a `--recipe` means: `reference` itself, or the shipped recipe of that name where there is no such
    file."""
    if reference.exists() and not reference.is_dir():
        return reference
    return shipped_recipes().get(str(reference), reference)
