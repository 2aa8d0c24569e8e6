"""Estimates of the stages on the head's side: capture (and of text alone), qat-head, build-keepset, convert-head.

Knows what each stage holds and writes, in bytes per value; see the stage for why. The factors without a derivation
were fitted to runs of the embedded family and of created checkpoints of three sizes.
Legend: H the verifier's hidden size, M the head's, V vocabulary, n kept tokens.
"""

from hyco_export.core.recipe import Recipe
from hyco_export.core.sizes.amounts import PACKED_ROWS, ROOTS_PER_SEQUENCE, SAVED_EVERY
from hyco_export.core.sizes.estimate import (
    BASE_BYTES,
    DTYPE_BYTES,
    FLOAT_BYTES,
    HEADER_BYTES,
    TRAINING_BASE_BYTES,
    Estimate,
    Work,
)
from hyco_export.core.sizes.shapes import FamilyShape, HeadShape

ID_BYTES = 8  # a token id in a capture
ANSWER_BYTES = 8  # of a token in answers.jsonl: its id and its text
CURVE_LINE_BYTES = 115  # one training step
REPORT_BYTES = 12_000  # JSON files beside the tensors
CURVE_BYTES, CONVERSATION_BYTES = 23_000, 40  # coverage curve with its picture; a line with a conversation's id
INT4_CHANNEL_BYTES = 4.5  # of an output channel in a graph: a float32 scale and a 4-bit zero point
LAYER_STEP_BYTES = 38_000  # nodes, names and activation grids of one layer in one step of the head's graph
LOGIT_BYTES = 32  # of one logit in a training pass: teacher's, student's, both log-softmaxes, gradients
TRAINED_BYTES = (
    23  # of a trained weight: master, gradient, two moments, fake-quantised copy (4 each), 3 variants in int8
)
ENTRY_BYTES = 530  # of a vocabulary's entry: the tokenizer, and what is counted and ranked
GRAPH_COPIES = 5  # of the graph while it is made: initializers, serialised, linted
BINARY_FACTOR, BINARY_STEP_BYTES = 1.04, 56_000  # of the context binary: of its weights, and of one layer in one step


def capture_estimate(recipe: Recipe, family: FamilyShape, work: Work) -> Estimate:
    """The verifier in its precision; e, h, K and V of every token."""
    width = DTYPE_BYTES[recipe.models.verifier.dtype]
    verifier = family.verifier
    token = (verifier.round_values + verifier.row_values) * width + ID_BYTES + ANSWER_BYTES
    return Estimate(
        tokens=work.tokens,
        disk_bytes=work.tokens * token + work.sequences * HEADER_BYTES,
        ram_bytes=BASE_BYTES + verifier.parameters * width,
    )


def capture_text_estimate(recipe: Recipe, family: FamilyShape, work: Work) -> Estimate:
    """The same of a recipe without a head, which hands nothing off."""
    weights = family.verifier.parameters * DTYPE_BYTES[recipe.models.verifier.dtype]
    return Estimate(tokens=work.tokens, disk_bytes=work.tokens * ANSWER_BYTES, ram_bytes=BASE_BYTES + weights)


def qat_estimate(recipe: Recipe, family: FamilyShape, work: Work) -> Estimate:
    """Teacher, student with an output layer of its own, AdamW's moments, and the variants that are compared."""
    head, qat = family.require_head(), recipe.qat
    trained = head.body_values + head.output_values
    teacher = DTYPE_BYTES[recipe.models.require_head().dtype]
    cast = 0 if qat.autocast == "float32" else DTYPE_BYTES[qat.autocast]  # autocast keeps cast weights of a pass
    rows = max(work.calibration.answer_tokens, min(PACKED_ROWS, qat.accumulation * work.calibration.answer_tokens))
    logits = rows * head.vocab_size * LOGIT_BYTES * qat.unrolled_steps
    return Estimate(
        disk_bytes=trained + FLOAT_BYTES * (head.channels + head.norm_values) + _report_bytes(qat.steps),
        ram_bytes=TRAINING_BASE_BYTES
        + trained * (teacher + TRAINED_BYTES + cast)
        + head.output_values * FLOAT_BYTES  # the tied table stays beside the untied output layer
        + logits,
    )


def keepset_estimate(recipe: Recipe, family: FamilyShape, work: Work) -> Estimate:
    """The table in 8 bits, written as a stream; in memory the vocabulary."""
    table = kept_tokens(recipe, family) * family.verifier.hidden
    ids_and_scales = 2 * FLOAT_BYTES * kept_tokens(recipe, family)
    reports = CURVE_BYTES + CONVERSATION_BYTES * work.conversations
    return Estimate(
        disk_bytes=table + ids_and_scales + HEADER_BYTES + reports,
        ram_bytes=BASE_BYTES + ENTRY_BYTES * family.verifier.vocab_size,
    )


def convert_head_estimate(recipe: Recipe, family: FamilyShape, work: Work) -> Estimate:
    """The graph with kept rows, table and samples.

    In memory first the kept weights in integers and floats while the graph is made of them, then transformers' head in
    floats while it takes the stored integers, its output layer last.
    """
    graph = head_graph_bytes(recipe, family)
    kept = kept_tokens(recipe, family)
    head = family.require_head()
    stored = head.body_values + head.output_values
    weights = head.body_values + kept * head.width
    compared = work.validation.sequences * min(ROOTS_PER_SEQUENCE, work.validation.answer_tokens)
    sample = family.verifier.round_values + recipe.head.window * family.verifier.row_values
    captured = work.validation.tokens * (family.verifier.round_values + family.verifier.row_values)
    made = weights * (1 + FLOAT_BYTES) + kept * family.verifier.hidden + graph * GRAPH_COPIES
    judged = (
        stored * (1 + FLOAT_BYTES)
        + head.output_values * FLOAT_BYTES
        + captured * DTYPE_BYTES[recipe.models.verifier.dtype]
    )
    return Estimate(
        disk_bytes=graph + -(-compared // SAVED_EVERY) * sample,
        ram_bytes=TRAINING_BASE_BYTES + max(made, judged),
    )


def head_graph_bytes(recipe: Recipe, family: FamilyShape) -> int:
    """head.onnx."""
    return head_weight_bytes(recipe, family) + LAYER_STEP_BYTES * _layer_steps(recipe, family.require_head())


def head_binary_bytes(recipe: Recipe, family: FamilyShape) -> int:
    """The head's context binary."""
    steps = BINARY_STEP_BYTES * _layer_steps(recipe, family.require_head())
    return int(BINARY_FACTOR * head_weight_bytes(recipe, family)) + steps


def head_weight_bytes(recipe: Recipe, family: FamilyShape) -> int:
    """Weights at the recipe's width and the 8-bit table, which all steps share."""
    kept, head = kept_tokens(recipe, family), family.require_head()
    weights = (head.body_values + kept * head.width) * recipe.qat.weight_bits // 8
    channels = head.channels - head.vocab_size + kept
    return weights + kept * family.verifier.hidden + int(INT4_CHANNEL_BYTES * channels)


def kept_tokens(recipe: Recipe, family: FamilyShape) -> int:
    """n; the whole vocabulary for a recipe that asks for a coverage, whose size only counting tells."""
    return recipe.keepset.size or family.verifier.vocab_size


def _layer_steps(recipe: Recipe, head: HeadShape) -> int:
    return recipe.head.steps * head.layers


def _report_bytes(steps: int) -> int:
    return CURVE_LINE_BYTES * steps + REPORT_BYTES
