"""Estimates for `--dry-run`: disk and memory of every stage from the recipe, the models' sizes and the data.

Coefficients were measured; stages on the head's side come first, then the SLM's. Memory is resident memory as the
kernel counts it (mapped files that were read included), of the stage's process and its children at one moment;
manifests record the peak of each.
"""

import msgspec

from hyco_export.core.estimates.shapes import (
    BITS_PER_BYTE,
    GOLDEN_TREES,
    PACKED_ROWS,
    ROOTS_PER_SEQUENCE,
    SAMPLES_PER_GRAPH,
    SAVED_EVERY,
    FamilyShape,
    HeadShape,
    Matrix,
    SlmShape,
)
from hyco_export.core.recipe import Recipe

BASE_BYTES = 920_000_000  # of a process with torch and transformers, before it holds a model
TRAINING_BASE_BYTES = 1_000_000_000  # with aimet-torch and onnx besides
FLOAT_BYTES = 4
HEADER_BYTES = 700  # of a safetensors file with a handful of tensors
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Estimate(msgspec.Struct, frozen=True):
    """The estimate of a stage. `tokens`: those that pass through a model and are stored; 0 where none are."""

    disk_bytes: int
    ram_bytes: int
    tokens: int = 0
    binary_bytes: int = 0


class Split(msgspec.Struct, frozen=True):
    """Sequences of one kind: `prompt_tokens` of all prompts together, `answer_tokens` of one answer."""

    sequences: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sequences * self.answer_tokens


class Work(msgspec.Struct, frozen=True):
    """The amount of data a recipe names."""

    calibration: Split
    sampled: Split
    validation: Split
    conversations: int  # those of the keep set, counted or not

    @property
    def splits(self) -> tuple[Split, ...]:
        return (self.calibration, self.sampled, self.validation)

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits)

    @property
    def sequences(self) -> int:
        return sum(split.sequences for split in self.splits)


# ---- the head's side

ID_BYTES = 8  # a token id in a capture
ANSWER_BYTES = 8  # of a token in answers.jsonl: its id and its text
GOLDEN_TREE_BYTES = 70_000  # of a golden tree as JSON: 50 nodes and 24 draws under five samplings
CURVE_LINE_BYTES = 115  # one training step
REPORT_BYTES = 12_000  # JSON files beside the tensors
CURVE_BYTES, CONVERSATION_BYTES = 23_000, 40  # coverage curve with its picture; a line with a conversation's id
INT4_CHANNEL_BYTES = 4.5  # of an output channel in a graph: a float32 scale and a 4-bit zero point
LAYER_STEP_BYTES = 38_000  # nodes, names and encodings of one layer in one step of the head's graph
LOGIT_BYTES = 32  # of one logit in a training pass: teacher's, student's, both log-softmaxes, gradients
TRAINED_BYTES = 23  # of a trained weight: master, gradient, 2 moments, fake-quantised copy (4 each), 3 int8 variants
ENTRY_BYTES = 530  # of a vocabulary's entry: the tokenizer, and what is counted and ranked
GRAPH_COPIES = 5  # of the graph while it is made: initializers, serialised, linted
HEAD_BINARY_FACTOR, BINARY_STEP_BYTES = 1.04, 56_000  # context binary: of its weights; of one layer in one step


def capture_estimate(recipe: Recipe, family: FamilyShape, work: Work) -> Estimate:
    """The verifier in its precision; e, h, K and V of every token."""
    width = DTYPE_BYTES[recipe.models.verifier.dtype]
    verifier = family.verifier
    token = (verifier.round_values + verifier.row_values) * width + ID_BYTES + ANSWER_BYTES
    return Estimate(
        tokens=work.tokens,
        disk_bytes=work.tokens * token + work.sequences * HEADER_BYTES + work.validation.sequences * GOLDEN_TREE_BYTES,
        ram_bytes=BASE_BYTES + verifier.parameters * width,
    )


def capture_text_estimate(recipe: Recipe, family: FamilyShape, work: Work) -> Estimate:
    """Capture of a recipe without a head, which stores text alone."""
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
        disk_bytes=graph
        + -(-compared // SAVED_EVERY) * sample
        + min(GOLDEN_TREES, work.validation.sequences) * GOLDEN_TREE_BYTES,
        ram_bytes=TRAINING_BASE_BYTES + max(made, judged),
    )


def head_graph_bytes(recipe: Recipe, family: FamilyShape) -> int:
    """Bytes of head.onnx."""
    return head_weight_bytes(recipe, family) + LAYER_STEP_BYTES * _layer_steps(recipe, family.require_head())


def head_binary_bytes(recipe: Recipe, family: FamilyShape) -> int:
    """Bytes of the head's context binary."""
    steps = BINARY_STEP_BYTES * _layer_steps(recipe, family.require_head())
    return int(HEAD_BINARY_FACTOR * head_weight_bytes(recipe, family)) + steps


def head_weight_bytes(recipe: Recipe, family: FamilyShape) -> int:
    """Weights at the recipe's width and the 8-bit table, which all steps share."""
    kept, head = kept_tokens(recipe, family), family.require_head()
    weights = (head.body_values + kept * head.width) * recipe.qat.weight_bits // 8
    channels = head.channels - head.vocab_size + kept
    return weights + kept * family.verifier.hidden + int(INT4_CHANNEL_BYTES * channels)


def kept_tokens(recipe: Recipe, family: FamilyShape) -> int:
    """Size of the keep set; the whole vocabulary where the recipe asks for a coverage, known only after counting."""
    return recipe.keepset.size or family.verifier.vocab_size


def _layer_steps(recipe: Recipe, head: HeadShape) -> int:
    return recipe.head.steps * head.layers


def _report_bytes(steps: int) -> int:
    return CURVE_LINE_BYTES * steps + REPORT_BYTES


# ---- the SLM's side, and compile

CARRIER_BITS = 4  # 2-bit integers travel in 4 bits, except into a binary by `compile.two_bit_weights`
NARROW_BITS = 2
LAYER_BYTES = 53_000  # nodes, names and encodings of one layer in a graph
SLM_BINARY_FACTOR, BINARY_LAYER_BYTES = 1.018, 58_000  # of a context binary: of its weights, and of one layer
ENCODINGS_BYTES = 7_500  # of a layer in the JSON files
INTEGER16_BYTES = 2
FILE_FACTOR = 1.2  # memory for every byte of weights, tables and graphs: mapped, and partly copied
OUTPUT_BYTES = 10  # memory for every weight of the output layer: floats of the pass, their copies
COMPILER_BASE_BYTES = 170_000_000  # of the compiling process
COMPILER_FACTOR = 5.8  # its memory for every byte of the binary
SMALL_ANSWER_BYTES = 60_000  # contexts.json, parity.json, EPContext models


def convert_slm_estimate(recipe: Recipe, family: FamilyShape, work: Work) -> Estimate:
    """Weights packed as in the checkpoint for the host, and in carriers for the graphs, which share them."""
    slm, kept = family.slm, kept_tokens(recipe, family)
    tables = sum(table.packed_bytes for table in slm.tables) + FLOAT_BYTES * slm.table_scales
    output = kept * slm.hidden
    rows = kept + sum(matrix.rows for matrix in slm.matrices)
    packed = sum(matrix.packed_bytes for matrix in slm.matrices) + output * slm.output_bits // BITS_PER_BYTE
    weights = packed + FLOAT_BYTES * (rows + slm.norm_values)
    graphs = tree_weight_bytes(recipe, family) + LAYER_BYTES * (slm.layers + len(slm.storing))
    samples = SAMPLES_PER_GRAPH * (
        feed_bytes(recipe, slm, recipe.slm.rows) + feed_bytes(recipe, slm, recipe.slm.prefill_rows)
    )
    files = tables + weights + graphs
    return Estimate(
        disk_bytes=files + samples + ENCODINGS_BYTES * slm.layers,
        ram_bytes=TRAINING_BASE_BYTES + int(FILE_FACTOR * files) + OUTPUT_BYTES * output,
    )


def compile_estimate(recipe: Recipe, family: FamilyShape, work: Work) -> Estimate:
    """One binary a graph, compiled one after the other: the largest decides the compiler's memory.

    The graph on the CPU, which each binary is compared with, is opened only when the compiler has ended.
    """
    slm = family.slm
    head = head_binary_bytes(recipe, family) if family.head else 0
    narrow = recipe.compile.two_bit_weights
    carried = slm_binary_bytes(tree_weight_bytes(recipe, family), slm.layers)
    tree = slm_binary_bytes(tree_weight_bytes(recipe, family, narrow), slm.layers)
    prefill = slm_binary_bytes(prefill_weight_bytes(slm, narrow), len(slm.storing))
    packed = sum(matrix.packed_bytes for matrix in slm.matrices)
    return Estimate(
        disk_bytes=head + tree + prefill + SMALL_ANSWER_BYTES,
        ram_bytes=BASE_BYTES
        + max(
            COMPILER_BASE_BYTES + int(COMPILER_FACTOR * max(head, carried)),  # it reads carriers either way
            int(FILE_FACTOR * (packed + carried)),
        ),
        binary_bytes=head + tree + prefill,
    )


def slm_binary_bytes(weight_bytes: int, layers: int) -> int:
    """Bytes of a context binary of the SLM."""
    return int(SLM_BINARY_FACTOR * weight_bytes) + BINARY_LAYER_BYTES * layers


def tree_weight_bytes(recipe: Recipe, family: FamilyShape, narrow: bool = False) -> int:
    """Integers and scales of a tree pass, the output layer with kept rows; `narrow`: 2-bit integers take 2 bits."""
    output = Matrix(kept_tokens(recipe, family), family.slm.hidden, family.slm.output_bits)
    return sum(_carried_bytes(matrix, narrow) for matrix in (*family.slm.matrices, output))


def prefill_weight_bytes(slm: SlmShape, narrow: bool = False) -> int:
    """Weight bytes of the part that a prefill pass needs."""
    return sum(_carried_bytes(matrix, narrow) for matrix in slm.matrices if matrix.in_prefill)


def feed_bytes(recipe: Recipe, slm: SlmShape, rows: int) -> int:
    """Inputs of one pass: K/V rings in 8 bits, embeddings and masks in 16."""
    slots = {"sliding": recipe.slm.sliding_ring, "full": recipe.slm.ring}
    rings = sum(2 * layer.values * slots[layer.layer_type] for layer in slm.storing)
    masks = sum(rows * (slots[kind] + rows) for kind in {layer.layer_type for layer in slm.storing})
    return rings + INTEGER16_BYTES * (masks + rows * (slm.hidden + slm.per_layer_width))


def _carried_bytes(matrix: Matrix, narrow: bool) -> int:
    small = NARROW_BITS if narrow and matrix.bits == NARROW_BITS else CARRIER_BITS
    bits = BITS_PER_BYTE if matrix.bits == BITS_PER_BYTE else small
    return matrix.values * bits // BITS_PER_BYTE + int(INT4_CHANNEL_BYTES * matrix.rows)
