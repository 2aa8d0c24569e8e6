"""Estimates for `--dry-run`: disk and memory of every stage from the recipe, the models' sizes and the data.

Measured coefficients stand in `coefficients.py`; every function takes another set of them where one is tried. Stages on
the head's side come first, then the SLM's. Memory is resident memory as the kernel counts it (mapped files that were
read included), of the stage's process and its children at one moment; manifests record the peak of each.
"""

from typing import Protocol

import msgspec

from hyco_export.core.estimates.coefficients import MEASURED, Coefficients
from hyco_export.core.estimates.shapes import (
    BITS_PER_BYTE,
    GOLDEN_TREES,
    HELD_VALUES,
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

FLOAT_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
ID_BYTES = 8  # a token id in a capture
INT4_CHANNEL_BYTES = 4.5  # of an output channel in a graph: a float32 scale and a 4-bit zero point
CARRIER_BITS = 4  # 2-bit integers travel in 4 bits, except into a binary by `compile.two_bit_weights`
NARROW_BITS = 2
INTEGER16_BYTES = 2


class Estimate(msgspec.Struct, frozen=True):
    """The estimate of a stage. `tokens`: those that pass through a model and are stored; 0 where none are."""

    disk_bytes: int
    ram_bytes: int
    tokens: int = 0
    binary_bytes: int = 0


def _rounded(disk_bytes: float, ram_bytes: float, tokens: int = 0, binary_bytes: float = 0) -> Estimate:
    """An estimate in whole bytes: coefficients are real numbers."""
    return Estimate(round(disk_bytes), round(ram_bytes), tokens, round(binary_bytes))


class Estimator(Protocol):
    """What estimates one stage."""

    def __call__(
        self, recipe: Recipe, family: "FamilyShape", work: "Work", measured: Coefficients = MEASURED
    ) -> Estimate: ...


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
    conversations: int  # read for the keep set, whether counted or held out

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


def capture_estimate(recipe: Recipe, family: FamilyShape, work: Work, measured: Coefficients = MEASURED) -> Estimate:
    """Memory: the verifier in its precision. Disk: e, h, K and V of every token."""
    width = DTYPE_BYTES[recipe.models.verifier.dtype]
    verifier = family.verifier
    token = (verifier.round_values + verifier.row_values) * width + ID_BYTES + measured.answer_token
    return _rounded(
        tokens=work.tokens,
        disk_bytes=work.tokens * token
        + work.sequences * measured.file_header
        + work.validation.sequences * measured.golden_tree,
        ram_bytes=measured.base + verifier.parameters * width,
    )


def capture_text_estimate(
    recipe: Recipe, family: FamilyShape, work: Work, measured: Coefficients = MEASURED
) -> Estimate:
    """Capture of a recipe without a head, which stores text alone."""
    weights = family.verifier.parameters * DTYPE_BYTES[recipe.models.verifier.dtype]
    tokenizer = measured.vocabulary_entry * family.verifier.vocab_size
    return _rounded(
        tokens=work.tokens,
        disk_bytes=work.tokens * measured.answer_token,
        ram_bytes=measured.base + weights + tokenizer,
    )


def qat_estimate(recipe: Recipe, family: FamilyShape, work: Work, measured: Coefficients = MEASURED) -> Estimate:
    """Memory: teacher, student with its own output layer, AdamW's moments, and the variants that are compared."""
    head, qat = family.require_head(), recipe.qat
    trained = head.body_values + head.output_values
    teacher = DTYPE_BYTES[recipe.models.require_head().dtype]
    cast = 0 if qat.autocast == "float32" else DTYPE_BYTES[qat.autocast]  # autocast keeps cast weights of a pass
    rows = max(work.calibration.answer_tokens, min(PACKED_ROWS, qat.accumulation * work.calibration.answer_tokens))
    logits = rows * head.vocab_size * measured.training_logit * qat.unrolled_steps
    return _rounded(
        disk_bytes=trained
        + FLOAT_BYTES * (head.channels + head.norm_values)
        + measured.curve_line * qat.steps
        + measured.reports,
        ram_bytes=measured.training_base
        + trained * (teacher + measured.trained_weight + cast)
        + head.output_values * FLOAT_BYTES  # the tied table stays beside the untied output layer
        + logits,
    )


def keepset_estimate(recipe: Recipe, family: FamilyShape, work: Work, measured: Coefficients = MEASURED) -> Estimate:
    """Disk: the table in 8 bits, written as a stream. Memory: the vocabulary."""
    table = kept_tokens(recipe, family) * family.verifier.hidden
    ids_and_scales = 2 * FLOAT_BYTES * kept_tokens(recipe, family)
    reports = measured.coverage_curve + measured.conversation * work.conversations
    return _rounded(
        disk_bytes=table + ids_and_scales + measured.file_header + reports,
        ram_bytes=measured.base + measured.vocabulary_entry * family.verifier.vocab_size,
    )


def convert_head_estimate(
    recipe: Recipe, family: FamilyShape, work: Work, measured: Coefficients = MEASURED
) -> Estimate:
    """Disk: the graph with kept rows, the table and samples.

    Memory: the larger of two moments. While the graph is made, the kept weights as integers and as floats; while it is
    judged, transformers' head in floats beside the stored integers that it takes, its output layer last.
    """
    graph = head_graph_bytes(recipe, family, measured)
    kept = kept_tokens(recipe, family)
    head = family.require_head()
    stored = head.body_values + head.output_values
    weights = head.body_values + kept * head.width
    compared = work.validation.sequences * min(ROOTS_PER_SEQUENCE, work.validation.answer_tokens)
    sample = family.verifier.round_values + recipe.head.window * family.verifier.row_values
    captured = work.validation.tokens * (family.verifier.round_values + family.verifier.row_values)
    made = weights * (1 + FLOAT_BYTES) + kept * family.verifier.hidden + graph * measured.graph_copies
    judged = (
        stored * (1 + FLOAT_BYTES)
        + head.output_values * FLOAT_BYTES
        + captured * DTYPE_BYTES[recipe.models.verifier.dtype]
    )
    return _rounded(
        disk_bytes=graph
        + -(-compared // SAVED_EVERY) * sample
        + min(GOLDEN_TREES, work.validation.sequences) * measured.golden_tree,
        ram_bytes=measured.training_base + max(made, judged),
    )


def head_graph_bytes(recipe: Recipe, family: FamilyShape, measured: Coefficients = MEASURED) -> int:
    """Bytes of head.onnx."""
    steps = _layer_steps(recipe, family.require_head())
    return head_weight_bytes(recipe, family) + int(measured.head_layer_step * steps)


def head_binary_bytes(recipe: Recipe, family: FamilyShape, measured: Coefficients = MEASURED) -> int:
    """Bytes of the head's context binary."""
    steps = _layer_steps(recipe, family.require_head())
    return int(measured.head_binary * head_weight_bytes(recipe, family) + measured.head_binary_step * steps)


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


# ---- the SLM's side, and compile


def convert_slm_estimate(
    recipe: Recipe, family: FamilyShape, work: Work, measured: Coefficients = MEASURED
) -> Estimate:
    """Disk: weights packed as in the checkpoint for the host, and in carriers for both graphs, which share them.

    Memory of an unquantised SLM: its weights are judged when the network is in memory in floats as it was and as it is
    rounded, beside transformers' model.
    """
    slm, kept = family.slm, kept_tokens(recipe, family)
    tables = sum(table.packed_bytes for table in slm.tables) + FLOAT_BYTES * slm.table_scales
    output = kept * slm.hidden
    rows = kept + sum(matrix.rows for matrix in slm.matrices)
    packed = sum(matrix.packed_bytes for matrix in slm.matrices) + output * slm.output_bits // BITS_PER_BYTE
    weights = packed + FLOAT_BYTES * (rows + slm.norm_values)
    graphs = tree_weight_bytes(recipe, family) + measured.slm_layer * (slm.layers + len(slm.storing))
    samples = SAMPLES_PER_GRAPH * (
        feed_bytes(recipe, slm, recipe.slm.rows) + feed_bytes(recipe, slm, recipe.slm.prefill_rows)
    )
    files = tables + weights + graphs
    if slm.float_values:
        linear = output + sum(matrix.values for matrix in slm.matrices)
        floats = slm.float_values + linear + _held(linear)
        table_values = sum(table.values for table in slm.tables)
        judged = FLOAT_BYTES * floats + tables + weights + measured.rounded_table * table_values
    else:
        judged = measured.mapped_file * files + measured.output_weight * output
    return _rounded(
        disk_bytes=files + samples + measured.slm_encodings * slm.layers,
        ram_bytes=measured.training_base + judged,
    )


def compile_estimate(recipe: Recipe, family: FamilyShape, work: Work, measured: Coefficients = MEASURED) -> Estimate:
    """One binary a graph, compiled one after the other: the largest decides the compiler's memory.

    The graph on the CPU, which each binary is compared with, is opened only when the compiler has ended.
    """
    slm = family.slm
    head = head_binary_bytes(recipe, family, measured) if family.head else 0
    narrow = recipe.compile.two_bit_weights
    carried = slm_binary_bytes(tree_weight_bytes(recipe, family), slm.layers, measured)
    tree = slm_binary_bytes(tree_weight_bytes(recipe, family, narrow), slm.layers, measured)
    prefill = slm_binary_bytes(prefill_weight_bytes(slm, narrow), len(slm.storing), measured)
    output = Matrix(kept_tokens(recipe, family), slm.hidden, slm.output_bits)
    linears = (*slm.matrices, output)
    wide = sum(matrix.values for matrix in linears if matrix.bits == BITS_PER_BYTE)
    compared = (
        measured.mapped_file * (sum(matrix.packed_bytes for matrix in slm.matrices) + carried)
        + measured.cpu_weight * wide
        + FLOAT_BYTES * _held(sum(matrix.values for matrix in linears))
    )
    return _rounded(
        disk_bytes=head + tree + prefill + measured.compile_reports,
        ram_bytes=measured.base
        + max(
            measured.compiler_base + measured.compiler * max(head, carried),  # it reads carriers either way
            compared if recipe.compile.emulated_feeds else 0,
        ),
        binary_bytes=head + tree + prefill,
    )


def _held(values: int) -> int:
    """Linear weights that torch keeps as floats."""
    return values if values <= HELD_VALUES else 0


def slm_binary_bytes(weight_bytes: int, layers: int, measured: Coefficients = MEASURED) -> int:
    """Bytes of a context binary of the SLM."""
    return int(measured.slm_binary * weight_bytes + measured.slm_binary_layer * layers)


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
