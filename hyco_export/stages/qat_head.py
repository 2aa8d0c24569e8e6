"""Stage `qat-head`: the head's linear weights in 4 bits, trained against the original head (Table 4 of the paper).

Files:
    head.safetensors   integers, scales, norms and shape (`core.network.weight_files`)
    agreement.json     top-1 agreement and KL with the original head per depth: rounded, clip-searched, trained, 8-bit;
                       and what a dense output layer changes of a head with ordered embeddings
    curve.jsonl        one line a step: step, loss, learning rate, gradient norm
    and, where the recipe asks for them, those of `stages.sensitivity`

Rounded, clip-searched and 8-bit weights have one scale per output channel whatever the recipe asks for, so that all its
options are compared with the same; a row of their own shows the options before training.

A killed build goes on from its last checkpoint (every CHECKPOINT_STEPS steps; the number changes no byte of the result,
so it is no part of the recipe). The processes of a launch train together.

What agreement means: on every response token of the validation sequences both heads read the same hand-off and the same
tokens, and from depth 2 on each its own projected state (`models.head.agreement`).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hyco_export.core import recipe as recipes
from hyco_export.core.artifact import CAPTURE, QAT_HEAD, PartialBuild
from hyco_export.core.files import write_json
from hyco_export.core.handoff import HiddenNorm
from hyco_export.core.memory import release_freed
from hyco_export.core.network.weight_files import HEAD_FILE, write_head
from hyco_export.stages.capture import sequence_paths, training_paths
from hyco_export.stages.capture_text import Reading, captured_rows, require_norm_side
from hyco_export.stages.declarations import Metrics, Progress, Source, Stage
from hyco_export.stages.sensitivity import Heads, write_evidence

if TYPE_CHECKING:
    import torch

    from hyco_export.core.network.weights import IntegerMatrix
    from hyco_export.models.families.gemma4_assistant import HeadModel
    from hyco_export.models.head.agreement import DepthAgreement
    from hyco_export.models.head.qat import TrainingPlan
    from hyco_export.models.head.quantisers import LayerGrid
    from hyco_export.models.head.unroll import RootRows

AGREEMENT_FILE = "agreement.json"
CURVE_FILE = "curve.jsonl"
CHECKPOINT_STEPS = 20  # a fifth of the paper's 100; a state of its head is 5 GB, written in seconds
WIDE_BITS = 8  # the reference width beside the trained one
NEAREST, SEARCHED, TRAINED, WIDE = "nearest", "clip-searched", "trained", "nearest-8-bit"
CHOSEN = "clip-searched on the recipe's grids"  # halves, blocks or overrides: what training starts from


class QatConfig(msgspec.Struct, frozen=True):
    """What changes the bytes of a quantised head. `steps` depths are compared; `window` positions are visible."""

    qat: recipes.Qat
    dtype: recipes.Dtype  # of the original head, the teacher
    hidden_norm: HiddenNorm
    steps: int
    window: int


def config(recipe: recipes.Recipe) -> QatConfig:
    """The recipe's fields that this stage reads."""
    models, head = recipe.models, recipe.head
    return QatConfig(recipe.qat, models.require_head().dtype, models.hidden_norm, head.steps, head.window)


def sources(recipe: recipes.Recipe) -> Mapping[str, Source]:
    """The head, and the verifier it must belong to."""
    return {"head": recipe.models.require_head(), "verifier": recipe.models.verifier}


def check(config: QatConfig, sources: Mapping[str, Path]) -> None:
    """The head is whole and can be converted; overrides name its layers, and those in blocks can be cut into them.

    Raises:
        CheckpointError: a weight is missing or not finite, or the static network lacks a part of the head.
        RecipeError: overrides do not fit the head.
    """
    from hyco_export.models.head.quantisers import linear_widths
    from hyco_export.models.head.stored import head_architecture
    from hyco_export.models.verifier import load_head

    head_architecture(load_head(sources["head"], config.dtype))
    release_freed()
    _grids(config.qat, linear_widths(sources["head"], config.qat.split_projection))


def build(config: QatConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Search clips, train, compare with the original head; see the module for the files."""
    from hyco_export.models.families.gemma4_assistant import make_dense
    from hyco_export.models.head import quantisers
    from hyco_export.models.head.agreement import match_verifier
    from hyco_export.models.head.quantisers import split_matrices, split_projection
    from hyco_export.models.head.stored import store
    from hyco_export.models.process_group import current_group
    from hyco_export.models.verifier import load_head

    group, reading = current_group(), _reading(config)
    teacher = make_dense(load_head(inputs["head"], config.dtype, str(group.device)))
    student = make_dense(load_head(inputs["head"], "float32", str(group.device)))
    held_out = sequence_paths(inputs[CAPTURE], "validation")
    if group.main:
        require_norm_side(inputs[CAPTURE], held_out, teacher, reading)
    quantisers.untie_output_layer(student)
    variants = _plain_variants(config.qat, quantisers.linear_weights(student))
    if config.qat.split_projection:
        split_projection(teacher)
        split_projection(student)
        variants = {name: split_matrices(matrices) for name, matrices in variants.items()}
    if _asks_for_more(config.qat):
        variants[CHOSEN] = _on_chosen_grids(config.qat, quantisers.linear_weights(student))
    start = variants.get(CHOSEN, variants[SEARCHED])
    quantisers.attach(student, start)
    if config.qat.trained_grids:
        quantisers.free_grids(student)
    learned = training_paths(inputs[CAPTURE])
    _train(config, student, teacher, captured_rows(inputs[CAPTURE], learned, teacher, reading), out_dir, progress)
    if not group.main:
        return {}
    variants[TRAINED] = quantisers.trained_matrices(student)

    quantisers.detach(student)
    sequences = captured_rows(inputs[CAPTURE], held_out, teacher, reading)
    found = _compare(teacher, student, variants, sequences, config.steps, progress)
    write_head(out_dir / HEAD_FILE, store(student, variants[TRAINED], config.qat.weight_bits))
    report = _report(found, match_verifier(teacher, sequences, config.steps))
    report |= _dense_report(config, inputs["head"], teacher, sequences)
    write_json(out_dir / AGREEMENT_FILE, report)
    metrics = {**report, "bytes": (out_dir / HEAD_FILE).stat().st_size}
    if config.qat.evidence_sequences:
        measured = sequence_paths(inputs[CAPTURE], "calibration")[: config.qat.evidence_sequences]
        ranked_on = captured_rows(inputs[CAPTURE], measured, teacher, reading)
        heads = Heads(teacher, student, start, variants[WIDE])
        metrics |= write_evidence(heads, ranked_on, sequences, config.steps, out_dir, progress)
    return metrics


def _plain_variants(qat: recipes.Qat, weights: Mapping[str, "torch.Tensor"]) -> dict[str, dict[str, "IntegerMatrix"]]:
    """Untrained weights with one width and one scale per output channel, by their name in the table."""
    from hyco_export.models.head.quantisers import LayerGrid, nearest_on, searched_on

    grids = dict.fromkeys(weights, LayerGrid(qat.weight_bits))
    return {
        NEAREST: nearest_on(weights, grids),
        SEARCHED: searched_on(weights, grids, _clip_ratios(qat)),
        WIDE: nearest_on(weights, dict.fromkeys(weights, LayerGrid(WIDE_BITS))),
    }


def _asks_for_more(qat: recipes.Qat) -> bool:
    """Does the recipe want other grids than the plain ones?"""
    return qat.split_projection or qat.grid != "per-channel" or bool(qat.overrides)


def _on_chosen_grids(qat: recipes.Qat, weights: Mapping[str, "torch.Tensor"]) -> dict[str, "IntegerMatrix"]:
    """Untrained weights on the grids that the recipe wants."""
    from hyco_export.models.head.quantisers import searched_on

    grids = _grids(qat, {name: weight.shape[1] for name, weight in weights.items()})
    return searched_on(weights, grids, _clip_ratios(qat))


def _clip_ratios(qat: recipes.Qat) -> np.ndarray:
    return np.linspace(qat.clip_ratio_high, qat.clip_ratio_low, qat.clip_ratio_count)


def _grids(qat: recipes.Qat, widths: Mapping[str, int]) -> dict[str, "LayerGrid"]:
    from hyco_export.models.head.quantisers import layer_grids

    return layer_grids(widths, qat.weight_bits, qat.grid == "lpbq", qat.overrides)


def _reading(config: QatConfig) -> Reading:
    return Reading(config.qat.sequence_limit, config.window, config.hidden_norm)


def _train(
    config: QatConfig,
    student: "HeadModel",
    teacher: "HeadModel",
    sequences: Sequence["RootRows"],
    out_dir: Path,
    progress: Progress,
) -> None:
    """Train the student in place, with all processes of the launch; the main one writes the loss curve as it grows."""
    from hyco_export.models.head.qat import Checkpoints, TrainingPoint, train
    from hyco_export.models.process_group import current_group

    plan = _plan(config.qat)
    group = current_group()
    checkpoints = Checkpoints(PartialBuild(out_dir), CHECKPOINT_STEPS)
    if group.main and (done := checkpoints.newest()):
        progress.note(f"  going on: {done} of {plan.steps} training steps are done")
    with (out_dir / CURVE_FILE).open("wb") if group.main else nullcontext() as curve:

        def record(point: TrainingPoint) -> None:
            if curve is not None:
                curve.write(msgspec.json.encode(point) + b"\n")
                curve.flush()  # to be watched while it grows
            progress.step("training steps", point.step + 1, plan.steps)

        train(student, teacher, sequences, plan, record, group, checkpoints)


def _plan(qat: recipes.Qat) -> "TrainingPlan":
    from hyco_export.models.head.qat import TrainingPlan
    from hyco_export.models.verifier import TORCH_DTYPES

    return TrainingPlan(
        learning_rate=qat.learning_rate,
        betas=qat.betas,
        weight_decay=qat.weight_decay,
        gradient_norm_clip=qat.gradient_norm_clip,
        warmup_steps=qat.warmup_steps,
        steps=qat.steps,
        accumulation=qat.accumulation,
        unrolled_steps=qat.unrolled_steps,
        autocast=TORCH_DTYPES[qat.autocast],
        seed=qat.seed,
    )


def _compare(
    teacher: "HeadModel",
    candidate: "HeadModel",
    variants: Mapping[str, Mapping[str, "IntegerMatrix"]],
    sequences: Sequence["RootRows"],
    steps: int,
    progress: Progress,
) -> dict[str, list["DepthAgreement"]]:
    """Each variant's weights in turn in one float module, against the original head."""
    from hyco_export.models.head.agreement import compare_heads
    from hyco_export.models.head.quantisers import load_matrices

    found = {}
    for done, (name, matrices) in enumerate(variants.items(), 1):
        load_matrices(candidate, matrices)
        found[name] = compare_heads(teacher, candidate, sequences, steps)
        progress.step("weights compared with the original head", done, len(variants))
    return found


def _report(found: Mapping[str, Sequence["DepthAgreement"]], match: Sequence[float]) -> Metrics:
    """The agreement table, lists by depth 1 .. K."""
    from hyco_export.models.head.agreement import share_won_back

    top1 = {name: [round(depth.top1, 4) for depth in depths] for name, depths in found.items()}
    won_back = share_won_back(top1[TRAINED], top1[NEAREST])
    return {
        "top1_agreement": top1,
        "kl_nats": {name: [round(depth.kl, 5) for depth in depths] for name, depths in found.items()},
        "positions": [depth.positions for depth in found[TRAINED]],
        "won_back": [round(share, 4) for share in won_back],  # of what rounding to nearest loses
        "won_back_mean": round(sum(won_back) / len(won_back), 4),
        "original_predicts_verifier": [round(share, 4) for share in match],
    }


def _dense_report(config: QatConfig, checkpoint: Path, dense: "HeadModel", sequences: Sequence["RootRows"]) -> Metrics:
    """What scoring every token changed of a head that is published with ordered embeddings; nothing for others."""
    from hyco_export.models.families.gemma4_assistant import ordered_embeddings
    from hyco_export.models.head.agreement import compare_heads
    from hyco_export.models.verifier import load_config, load_head

    ordered = ordered_embeddings(load_config(checkpoint))
    if not ordered:
        return {}
    original = load_head(checkpoint, config.dtype, str(dense.lm_head.weight.device))
    top1 = [round(depth.top1, 4) for depth in compare_heads(original, dense, sequences, config.steps)]
    # of the same weights beside transformers' head, which selects by centroids
    return {"ordered_embeddings": {**ordered, "dense_top1_agreement": top1}}


STAGE = Stage(
    QAT_HEAD,
    revision=2,
    needs=(CAPTURE,),
    config=config,
    sources=sources,
    build=build,
    check=check,
    resumable=True,
    shared=True,
)
