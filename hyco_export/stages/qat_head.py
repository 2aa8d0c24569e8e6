"""Stage `qat-head`: the head's linear weights in 4 bits, trained against the original head (Table 4 of the paper).

Files:
    head.safetensors   integers, scales, norms and shape (`core.network.weight_files`)
    agreement.json     top-1 agreement and KL with the original head per depth: rounded, clip-searched, trained, 8-bit;
                       and what a dense output layer changes of a head with ordered embeddings
    curve.jsonl        one line a step: step, loss, learning rate, gradient norm
    and, where the recipe asks for them, those of `stages.parts.sensitivity`

Rounded, clip-searched and 8-bit weights have one scale per output channel whatever the recipe asks for, so that all its
options are compared with the same; a row of their own shows the options before training.

A killed build goes on from its last checkpoint (every CHECKPOINT_STEPS steps; the number changes no byte of the result,
so it is no part of the recipe). The processes of a launch train together.

What agreement means: on every response token of the validation sequences both heads read the same hand-off and the same
tokens, and from depth 2 on each its own projected state (`models.head.agreement`).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from hyco_export.core import recipe as recipes
from hyco_export.core.artifact import CAPTURE, FINAL_NORM_FILE, PartialBuild
from hyco_export.core.files import write_json
from hyco_export.core.handoff import HiddenNorm
from hyco_export.core.memory import release_freed
from hyco_export.core.network.weight_files import HEAD_FILE, write_head
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.models.capture import load_capture
from hyco_export.models.families.gemma4_assistant import HeadModel, make_dense, ordered_embeddings
from hyco_export.models.head import quantisers
from hyco_export.models.head.agreement import DepthAgreement, compare_heads, match_verifier, share_won_back
from hyco_export.models.head.norm_side import OTHER, compare_readings, require_reading, require_side
from hyco_export.models.head.qat import Checkpoints, TrainingPlan, TrainingPoint, train
from hyco_export.models.head.quantisers import (
    LayerGrid,
    layer_grids,
    linear_widths,
    load_matrices,
    nearest_on,
    searched_on,
    split_matrices,
    split_projection,
)
from hyco_export.models.head.stored import head_architecture, store
from hyco_export.models.head.unroll import RootRows, head_spans, load_norm, response_rows
from hyco_export.models.process_group import current_group
from hyco_export.models.verifier import TORCH_DTYPES, load_config, load_head
from hyco_export.stages.captured import sequence_paths, training_paths
from hyco_export.stages.declarations import Metrics, Progress
from hyco_export.stages.parts.sensitivity import Heads, write_evidence
from hyco_export.stages.table import QatConfig

AGREEMENT_FILE = "agreement.json"
CURVE_FILE = "curve.jsonl"
CHECKPOINT_STEPS = 20  # a fifth of the paper's 100; a state of its head is 5 GB, written in seconds
WIDE_BITS = 8  # the reference width beside the trained one
NEAREST, SEARCHED, TRAINED, WIDE = "nearest", "clip-searched", "trained", "nearest-8-bit"
CHOSEN = "clip-searched on the recipe's grids"  # halves, blocks or overrides: what training starts from


SIDE_SEQUENCES = 8  # hundreds of tokens: enough to tell which side of the norm h comes from


@dataclass(frozen=True)
class Reading:
    """How captured sequences are read: the first `limit` tokens, `window` positions visible, h from this side."""

    limit: int
    window: int
    hidden_norm: HiddenNorm


def check(config: QatConfig, sources: Mapping[str, Path]) -> None:
    """The head is whole and can be converted; overrides name its layers, and those in blocks can be cut into them.

    Raises:
        CheckpointError: a weight is missing or not finite, or the static network lacks a part of the head.
        RecipeError: overrides do not fit the head.
    """
    head_architecture(load_head(sources["head"], config.dtype))
    release_freed()
    layer_grids(linear_widths(sources["head"], config.qat.split_projection), config.qat)


def build(config: QatConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Search clips, train, compare with the original head; see the module for the files."""
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


def _plain_variants(qat: recipes.Qat, weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, IntegerMatrix]]:
    """Untrained weights with one width and one scale per output channel, by their name in the table."""
    grids = dict.fromkeys(weights, LayerGrid(qat.weight_bits))
    return {
        NEAREST: nearest_on(weights, grids),
        SEARCHED: searched_on(weights, grids, _clip_ratios(qat)),
        WIDE: nearest_on(weights, dict.fromkeys(weights, LayerGrid(WIDE_BITS))),
    }


def _asks_for_more(qat: recipes.Qat) -> bool:
    """Does the recipe want other grids than the plain ones?"""
    return qat.split_projection or qat.grid != "per-channel" or bool(qat.overrides)


def _on_chosen_grids(qat: recipes.Qat, weights: Mapping[str, torch.Tensor]) -> dict[str, IntegerMatrix]:
    """Untrained weights on the grids that the recipe wants."""
    grids = layer_grids({name: weight.shape[1] for name, weight in weights.items()}, qat)
    return searched_on(weights, grids, _clip_ratios(qat))


def _clip_ratios(qat: recipes.Qat) -> np.ndarray:
    return np.linspace(qat.clip_ratio_high, qat.clip_ratio_low, qat.clip_ratio_count)


def _reading(config: QatConfig) -> Reading:
    return Reading(config.qat.sequence_limit, config.window, config.hidden_norm)


def captured_rows(capture: Path, paths: Sequence[Path], head: HeadModel, reading: Reading) -> list[RootRows]:
    """Response rows of captured sequences that have any, in their stored precision."""
    norm = load_norm(capture / FINAL_NORM_FILE) if reading.hidden_norm == "pre" else None
    captures = [load_capture(path).cut(reading.limit) for path in paths]
    long_enough = [capture for capture in captures if capture.roots]
    return [response_rows(capture, head_spans(head.config), reading.window, norm) for capture in long_enough]


def require_norm_side(capture: Path, paths: Sequence[Path], head: HeadModel, reading: Reading) -> None:
    """h comes from the side of the verifier's final norm that the recipe names, and the head wants it from there.

    Raises:
        GateError: it does not; names the cause.
    """
    few = paths[:SIDE_SEQUENCES]
    require_side(load_capture(few[0]).h, load_norm(capture / FINAL_NORM_FILE), reading.hidden_norm)
    mirrored = replace(reading, hidden_norm=OTHER[reading.hidden_norm])
    both = [captured_rows(capture, few, head, side) for side in (reading, mirrored)]
    require_reading(compare_readings(head, *both), reading.hidden_norm)


def _train(
    config: QatConfig,
    student: HeadModel,
    teacher: HeadModel,
    sequences: Sequence[RootRows],
    out_dir: Path,
    progress: Progress,
) -> None:
    """Train the student in place, with all processes of the launch; the main one writes the loss curve as it grows."""
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


def _plan(qat: recipes.Qat) -> TrainingPlan:

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
    teacher: HeadModel,
    candidate: HeadModel,
    variants: Mapping[str, Mapping[str, IntegerMatrix]],
    sequences: Sequence[RootRows],
    steps: int,
    progress: Progress,
) -> dict[str, list[DepthAgreement]]:
    """Each variant's weights in turn in one float module, against the original head."""
    found = {}
    for done, (name, matrices) in enumerate(variants.items(), 1):
        load_matrices(candidate, matrices)
        found[name] = compare_heads(teacher, candidate, sequences, steps)
        progress.step("weights compared with the original head", done, len(variants))
    return found


def _report(found: Mapping[str, Sequence[DepthAgreement]], match: Sequence[float]) -> Metrics:
    """The agreement table, lists by depth 1 .. K."""
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


def _dense_report(config: QatConfig, checkpoint: Path, dense: HeadModel, sequences: Sequence[RootRows]) -> Metrics:
    """What scoring every token changed of a head that is published with ordered embeddings; nothing for others."""
    ordered = ordered_embeddings(load_config(checkpoint))
    if not ordered:
        return {}
    original = load_head(checkpoint, config.dtype, str(dense.lm_head.weight.device))
    top1 = [round(depth.top1, 4) for depth in compare_heads(original, dense, sequences, config.steps)]
    # of the same weights beside transformers' head, which selects by centroids
    return {"ordered_embeddings": {**ordered, "dense_top1_agreement": top1}}
