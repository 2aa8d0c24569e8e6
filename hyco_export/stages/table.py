"""The stage table: of every stage its name, what it reads, its configuration, and where its functions are.

A row costs no heavy import: a stage's module, and what it needs, is loaded when the stage is checked or built. To add a
stage, write its module with `build`, its configuration and row here, and its fields in `core.recipe`; a name in
`core.artifact` where other stages read the artifact.

A configuration holds the fields that its stage reads and no other: each is a reason to build anew. Its fields are
encoded by their places in the recipe, so that manifest and plan name them as the recipe does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import TypeVar

import msgspec

from hyco_export.core import recipe as recipes
from hyco_export.core.artifact import CAPTURE, COMPILE, HEAD, KEEPSET, QAT_HEAD, SLM
from hyco_export.core.deferred import Deferred
from hyco_export.core.handoff import HiddenNorm
from hyco_export.core.recipe import Recipe
from hyco_export.core.targets import Target, find_target
from hyco_export.errors import RecipeError
from hyco_export.stages.declarations import PYTHON, Source, Stage

VERIFIER_DTYPE, HEAD_DTYPE, HIDDEN_NORM = "models.verifier.dtype", "models.head.dtype", "models.hidden_norm"
Part = TypeVar("Part", bound=msgspec.Struct)


def part_of(section: msgspec.Struct, kind: type[Part]) -> Part:
    """The fields of a recipe's section that `kind` has."""
    return kind(**{name: getattr(section, name) for name in kind.__struct_fields__})


class CaptureConfig(msgspec.Struct, frozen=True):
    """What changes the bytes of a capture."""

    capture: recipes.Capture
    hidden_norm: HiddenNorm = msgspec.field(name=HIDDEN_NORM)
    dtype: recipes.Dtype = msgspec.field(name=VERIFIER_DTYPE)
    sampling: recipes.Sampling = recipes.Sampling()  # of the sampled answers


def capture_config(recipe: Recipe) -> CaptureConfig:
    """The recipe's fields that `capture` reads."""
    return CaptureConfig(recipe.capture, recipe.models.hidden_norm, recipe.models.verifier.dtype, recipe.sampling)


def capture_sources(recipe: Recipe) -> Mapping[str, Source]:
    """The verifier and the two prompt files."""
    data = recipe.data
    return {"verifier": recipe.models.verifier, "calibration": data.calibration, "validation": data.validation}


class TextLimits(msgspec.Struct, frozen=True):
    """The fields of `recipes.Capture` that a capture without a head reads: it samples no answers."""

    max_new_tokens: int
    validation_max_new_tokens: int
    sequence_limit: int


class CaptureTextConfig(msgspec.Struct, frozen=True):
    """What changes the bytes of a capture without a head."""

    capture: TextLimits
    dtype: recipes.Dtype = msgspec.field(name=VERIFIER_DTYPE)


def capture_text_config(recipe: Recipe) -> CaptureTextConfig:
    """The recipe's fields that `capture` reads where there is no head."""
    return CaptureTextConfig(part_of(recipe.capture, TextLimits), recipe.models.verifier.dtype)


class QatConfig(msgspec.Struct, frozen=True):
    """What changes the bytes of a quantised head. `steps` depths are compared; `window` positions are visible."""

    qat: recipes.Qat
    dtype: recipes.Dtype = msgspec.field(name=HEAD_DTYPE)  # of the original head, the teacher
    hidden_norm: HiddenNorm = msgspec.field(name=HIDDEN_NORM)
    steps: int = msgspec.field(name="head.steps")
    window: int = msgspec.field(name="head.window")


def qat_config(recipe: Recipe) -> QatConfig:
    """The recipe's fields that `qat-head` reads."""
    models, head = recipe.models, recipe.head
    return QatConfig(recipe.qat, models.require_head().dtype, models.hidden_norm, head.steps, head.window)


def head_sources(recipe: Recipe) -> Mapping[str, Source]:
    """The published head, and the verifier it belongs to."""
    return {"head": recipe.models.require_head(), "verifier": recipe.models.verifier}


class KeepSetConfig(msgspec.Struct, frozen=True):
    """What changes the bytes of a keep set."""

    size: int | None = msgspec.field(name="keepset.size")
    scripts: tuple[str, ...] = msgspec.field(name="keepset.scripts")
    held_out_share: float = msgspec.field(name="keepset.held_out_share")
    verifier_dtype: recipes.Dtype = msgspec.field(name=VERIFIER_DTYPE)  # the embedding factor is rounded to it
    coverage: float | None = msgspec.field(default=None, name="keepset.coverage")  # instead of the size
    answers_weight: float | msgspec.UnsetType = msgspec.field(  # > 0; artifacts of recipes without it lack the field
        default=msgspec.UNSET, name="keepset.answers_weight"
    )


def keepset_config(recipe: Recipe) -> KeepSetConfig:
    """The recipe's fields that `build-keepset` reads."""
    choice = recipe.keepset
    dtype = recipe.models.verifier.dtype
    weight = choice.answers_weight or msgspec.UNSET
    return KeepSetConfig(choice.size, choice.scripts, choice.held_out_share, dtype, choice.coverage, weight)


def keepset_sources(recipe: Recipe) -> Mapping[str, Source]:
    """The verifier, the conversations to count, and the prompt files that are left out of the count."""
    data = recipe.data
    return {
        "verifier": recipe.models.verifier,
        "conversations": data.conversations,
        "calibration": data.calibration,
        "validation": data.validation,
    }


class HeadCalibration(msgspec.Struct, frozen=True):
    """The fields of `recipes.Calibration` that the head's graph is made by."""

    activation_percentile: float
    mask_value: float


class ConvertHeadConfig(msgspec.Struct, frozen=True):
    """What changes the bytes of the head's graph."""

    head: recipes.HeadGraph
    calibration: HeadCalibration
    hidden_norm: HiddenNorm = msgspec.field(name=HIDDEN_NORM)
    dtype: recipes.Dtype = msgspec.field(name=HEAD_DTYPE)  # of the original head, which the graph is compared with


def convert_head_config(recipe: Recipe) -> ConvertHeadConfig:
    """The recipe's fields that `convert-head` reads."""
    calibration, models = part_of(recipe.calibration, HeadCalibration), recipe.models
    return ConvertHeadConfig(recipe.head, calibration, models.hidden_norm, models.require_head().dtype)


class SlmCalibration(msgspec.Struct, frozen=True):
    """The fields of `recipes.Calibration` that the SLM's graphs are made and judged by."""

    kv_percentile: float
    kv_margin: float
    slm_percentile: float
    slm_margin: float
    slm_passes: int | None
    slm_quality_passes: int
    mask_value: float


class ConvertSlmConfig(msgspec.Struct, frozen=True):
    """What changes the bytes of the SLM's graphs."""

    graph: recipes.SlmGraph = msgspec.field(name="slm")
    calibration: SlmCalibration
    sequence_limit: int = msgspec.field(name="capture.sequence_limit")

    @property
    def weights(self) -> recipes.SlmWeights | None:
        """How an unquantised checkpoint is rounded."""
        return self.graph.weights or None

    @property
    def bridge(self) -> recipes.TokenBridge | None:
        """How an SLM with another tokenizer is joined."""
        return self.graph.bridge or None


def convert_slm_config(recipe: Recipe) -> ConvertSlmConfig:
    """The recipe's fields that `convert-slm` reads."""
    calibration = part_of(recipe.calibration, SlmCalibration)
    return ConvertSlmConfig(recipe.slm, calibration, recipe.capture.sequence_limit)


def convert_slm_sources(recipe: Recipe) -> Mapping[str, Source]:
    """The SLM's checkpoint; the verifier's too, where both tokenizers must be joined."""
    return {"slm": recipe.models.slm} | ({"verifier": recipe.models.verifier} if recipe.slm.bridge else {})


COMPILER = "onnxruntime-qnn"
find_compiler = Deferred("hyco_export.graph.smaller_binaries:find_compiler")


class CompileConfig(msgspec.Struct, frozen=True):
    """What changes the bytes of the binaries, and the limits they must keep."""

    target: Target
    gates: recipes.CompileGates = msgspec.field(name="compile")
    compiler: str  # an upgrade changes the bytes
    c_compiler: bool = msgspec.field(default=False, name="C compiler")  # where the recipe asks for what needs one


def compile_config(recipe: Recipe) -> CompileConfig:
    """The recipe's fields that `compile` reads, and which compilers there are."""
    compiler = f"{COMPILER} {metadata.version(COMPILER)}"
    can_build = recipe.compile.two_bit_weights and find_compiler() is not None
    return CompileConfig(find_target(recipe.target), recipe.compile, compiler, can_build)


def no_sources(recipe: Recipe) -> Mapping[str, Source]:
    """Nothing but earlier artifacts."""
    return {}


# libraries that can change an artifact's bytes; not gguf, whose imports are checkpoints with digests of their own
BASE = (PYTHON, "numpy", "safetensors")
MODELS = (*BASE, "torch", "transformers")
TEMPLATES = ("tokenizers", "jinja2")
CONVERSATIONS = ("datasets", "pyarrow")
GRAPHS = ("onnx", "onnxruntime")
PICTURES = "matplotlib"

CAPTURE_STAGE = Stage(
    name=CAPTURE,
    summary="Record the verifier's greedy answers and the hand-offs the head reads.",
    revision=5,
    needs=(),
    config=capture_config,
    sources=capture_sources,
    build=Deferred("hyco_export.stages.capture:build"),
    check=Deferred("hyco_export.stages.capture:check"),
    estimate=Deferred("hyco_export.core.estimates.stages:capture_estimate"),
    resumable=True,
    shared=True,
    libraries=(*MODELS, *TEMPLATES, *CONVERSATIONS),
)
CAPTURE_TEXT_STAGE = Stage(
    name=CAPTURE,
    revision=2,
    needs=(),
    config=capture_text_config,
    sources=capture_sources,
    build=Deferred("hyco_export.stages.capture_text:build"),
    check=Deferred("hyco_export.stages.capture_text:check"),
    estimate=Deferred("hyco_export.core.estimates.stages:capture_text_estimate"),
    libraries=(*MODELS, *TEMPLATES, *CONVERSATIONS),
)
QAT_HEAD_STAGE = Stage(
    name=QAT_HEAD,
    summary="Train the MTP head's 4-bit weights by KL from the original head.",
    revision=3,
    needs=(CAPTURE,),
    config=qat_config,
    sources=head_sources,
    build=Deferred("hyco_export.stages.qat_head:build"),
    check=Deferred("hyco_export.stages.qat_head:check"),
    estimate=Deferred("hyco_export.core.estimates.stages:qat_estimate"),
    resumable=True,
    shared=True,
    libraries=(*MODELS, "aimet-torch", PICTURES),
)
BUILD_KEEPSET_STAGE = Stage(
    name=KEEPSET,
    summary="Choose the token ids both drafters may propose, and their 8-bit embedding table.",
    revision=4,
    needs=(CAPTURE,),
    config=keepset_config,
    sources=keepset_sources,
    build=Deferred("hyco_export.stages.build_keepset:build"),
    check=Deferred("hyco_export.stages.build_keepset:check"),
    estimate=Deferred("hyco_export.core.estimates.stages:keepset_estimate"),
    resumable=True,
    libraries=(*MODELS, "tokenizers", *CONVERSATIONS, PICTURES),
)
CONVERT_HEAD_STAGE = Stage(
    name=HEAD,
    summary="Write the head's K steps as one integer graph.",
    revision=6,
    needs=(CAPTURE, QAT_HEAD, KEEPSET),
    config=convert_head_config,
    sources=head_sources,
    build=Deferred("hyco_export.stages.convert_head:build"),
    estimate=Deferred("hyco_export.core.estimates.stages:convert_head_estimate"),
    libraries=(*MODELS, *GRAPHS),
)
CONVERT_SLM_STAGE = Stage(
    name=SLM,
    summary="Turn the SLM into static integer graphs over K/V rings.",
    revision=2,
    needs=(CAPTURE, KEEPSET),
    config=convert_slm_config,
    sources=convert_slm_sources,
    build=Deferred("hyco_export.stages.convert_slm:build"),
    check=Deferred("hyco_export.stages.convert_slm:check"),
    estimate=Deferred("hyco_export.core.estimates.stages:convert_slm_estimate"),
    resumable=True,
    libraries=(*MODELS, "tokenizers", *GRAPHS, PICTURES),
)
COMPILE_STAGE = Stage(
    name=COMPILE,
    summary="Compile the graphs into Hexagon context binaries.",
    revision=2,
    needs=(HEAD, SLM),
    config=compile_config,
    sources=no_sources,
    build=Deferred("hyco_export.stages.compile:build"),
    estimate=Deferred("hyco_export.core.estimates.stages:compile_estimate"),
    per_target=True,
    reuses=True,
    libraries=(*BASE, "torch", *GRAPHS, COMPILER),
)

# in the order of the chain
STAGES = (CAPTURE_STAGE, QAT_HEAD_STAGE, BUILD_KEEPSET_STAGE, CONVERT_HEAD_STAGE, CONVERT_SLM_STAGE, COMPILE_STAGE)
SLM_STAGES = (CAPTURE_TEXT_STAGE, BUILD_KEEPSET_STAGE, CONVERT_SLM_STAGE, replace(COMPILE_STAGE, needs=(SLM,)))


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


def chain_to(stages: Sequence[Stage], last: str) -> list[Stage]:
    """The stages that `last` needs, itself included, in table order."""
    by_name = {stage.name: stage for stage in stages}
    wanted, queue = set(), [last]
    while queue:
        name = queue.pop()
        if name not in wanted:
            wanted.add(name)
            queue.extend(by_name[name].needs)
    return [stage for stage in stages if stage.name in wanted]
