"""Estimates of the stages on the SLM's side: convert-slm, and compile for all graphs.

Knows what each stage holds and writes, in bytes per value. The factors without a derivation were fitted to runs of the
embedded family and of created checkpoints up to E2B's size. Legend: R rows, W ring slots, n kept tokens.
"""

from hyco_export.core.recipe import Recipe
from hyco_export.core.sizes.amounts import SAMPLES_PER_GRAPH
from hyco_export.core.sizes.estimate import BASE_BYTES, FLOAT_BYTES, TRAINING_BASE_BYTES, Estimate, Work
from hyco_export.core.sizes.head import INT4_CHANNEL_BYTES, head_binary_bytes, kept_tokens
from hyco_export.core.sizes.shapes import BITS_PER_BYTE, FamilyShape, Matrix, SlmShape

CARRIER_BITS = 4  # 2-bit integers travel in 4 bits
LAYER_BYTES = 53_000  # nodes, names and activation grids of one layer in a graph
BINARY_FACTOR, BINARY_LAYER_BYTES = 1.018, 58_000  # of a context binary: of its weights, and of one layer
GRIDS_BYTES = 7_500  # of a layer in the JSON files
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
        disk_bytes=files + samples + GRIDS_BYTES * slm.layers,
        ram_bytes=TRAINING_BASE_BYTES + int(FILE_FACTOR * files) + OUTPUT_BYTES * output,
    )


def compile_estimate(recipe: Recipe, family: FamilyShape, work: Work) -> Estimate:
    """One binary a graph, compiled one after the other: the largest decides the compiler's memory.

    The graph on the CPU, which each binary is compared with, is opened only when the compiler has ended.
    """
    slm = family.slm
    head = head_binary_bytes(recipe, family) if family.head else 0
    tree = slm_binary_bytes(tree_weight_bytes(recipe, family), slm.layers)
    prefill = slm_binary_bytes(prefill_weight_bytes(slm), len(slm.storing))
    packed = sum(matrix.packed_bytes for matrix in slm.matrices)
    return Estimate(
        disk_bytes=head + tree + prefill + SMALL_ANSWER_BYTES,
        ram_bytes=BASE_BYTES
        + max(
            COMPILER_BASE_BYTES + int(COMPILER_FACTOR * max(head, tree, prefill)),
            int(FILE_FACTOR * (packed + tree)),
        ),
        binary_bytes=head + tree + prefill,
    )


def slm_binary_bytes(weight_bytes: int, layers: int) -> int:
    """A context binary."""
    return int(BINARY_FACTOR * weight_bytes) + BINARY_LAYER_BYTES * layers


def tree_weight_bytes(recipe: Recipe, family: FamilyShape) -> int:
    """Integers in their carriers and scales of a tree pass, the output layer with kept rows."""
    output = Matrix(kept_tokens(recipe, family), family.slm.hidden, family.slm.output_bits)
    return sum(map(_carried_bytes, (*family.slm.matrices, output)))


def prefill_weight_bytes(slm: SlmShape) -> int:
    """The same for the part that a prefill pass needs."""
    return sum(_carried_bytes(matrix) for matrix in slm.matrices if matrix.in_prefill)


def feed_bytes(recipe: Recipe, slm: SlmShape, rows: int) -> int:
    """Inputs of one pass: K/V rings in 8 bits, embeddings and masks in 16."""
    slots = {"sliding": recipe.slm.sliding_ring, "full": recipe.slm.ring}
    rings = sum(2 * layer.values * slots[layer.layer_type] for layer in slm.storing)
    masks = sum(rows * (slots[kind] + rows) for kind in {layer.layer_type for layer in slm.storing})
    return rings + INTEGER16_BYTES * (masks + rows * (slm.hidden + slm.per_layer_width))


def _carried_bytes(matrix: Matrix) -> int:
    bits = BITS_PER_BYTE if matrix.bits == BITS_PER_BYTE else CARRIER_BITS
    return matrix.values * bits // BITS_PER_BYTE + int(INT4_CHANNEL_BYTES * matrix.rows)
