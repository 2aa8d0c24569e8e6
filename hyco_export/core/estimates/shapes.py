"""Sizes of models that belong together, as far as files and memory depend on them; `models.shapes` reads them.

Legend: H the verifier's hidden size, M the head's, V vocabulary, N K/V heads, d head dimension.
"""

import msgspec

BITS_PER_BYTE = 8

# constants of the stages that their estimates need too
PACKED_ROWS = 512  # rows of a pass that short sequences share (2.4 times as fast at 55 each); a longer one runs alone
ROOTS_PER_SEQUENCE = 8  # drafts compared in each validation sequence: 60 sequences and 4 steps give 1,920 ids
GOLDEN_TREES = 3  # trees of about 60 nodes, each under every sampling, hold thousands of probabilities
SAVED_EVERY = 10  # compared draft is stored for the emulator, which takes half a second for one
HELD_VALUES = 250_000_000  # 1 GB of floats; for more, dequantising at every use takes as long as the product
SAMPLES_PER_GRAPH = 4  # stored inputs of each SLM graph; the emulator takes seconds to minutes for one


class Matrix(msgspec.Struct, frozen=True):
    """Weights [rows, columns] of one linear layer or table, `bits` each in the checkpoint."""

    rows: int
    columns: int
    bits: int
    in_prefill: bool = True  # a prefill pass ends at the last layer that stores K/V

    @property
    def values(self) -> int:
        return self.rows * self.columns

    @property
    def packed_bytes(self) -> int:
        return self.values * self.bits // BITS_PER_BYTE


class KvLayer(msgspec.Struct, frozen=True):
    """One layer that stores K/V."""

    layer_type: str
    heads: int
    dim: int

    @property
    def values(self) -> int:
        return self.heads * self.dim


class VerifierShape(msgspec.Struct, frozen=True):
    """The verifier's sizes."""

    parameters: int
    hidden: int  # H
    vocab_size: int
    handoff: tuple[KvLayer, ...]  # the two layers whose K/V the head reads; none without a head

    @property
    def round_values(self) -> int:
        """e(root) and h: 5,632 for Gemma 4 26B-A4B."""
        return 2 * self.hidden

    @property
    def row_values(self) -> int:
        """K and V of one token for the head: 6,144 for Gemma 4 26B-A4B."""
        return sum(2 * layer.values for layer in self.handoff)


class HeadShape(msgspec.Struct, frozen=True):
    """The head's sizes. Its output layer [V, M] is not among the matrices: only kept rows reach the device."""

    width: int  # M
    vocab_size: int
    layers: int
    matrices: tuple[Matrix, ...]
    norm_values: int

    @property
    def output_values(self) -> int:
        return self.vocab_size * self.width

    @property
    def body_values(self) -> int:
        """All linear weights but the output layer's."""
        return sum(matrix.values for matrix in self.matrices)

    @property
    def channels(self) -> int:
        """Scales: output channels of all linear layers, output layer included."""
        return self.vocab_size + sum(matrix.rows for matrix in self.matrices)


class SlmShape(msgspec.Struct, frozen=True):
    """The SLM's sizes. The output layer is not among the matrices."""

    hidden: int
    per_layer_width: int  # all layers together; 0 without per-layer embeddings
    vocab_size: int
    output_bits: int
    layers: int
    matrices: tuple[Matrix, ...]
    tables: tuple[Matrix, ...]
    table_scales: int  # both tables together
    norm_values: int
    storing: tuple[KvLayer, ...]
    float_values: int = 0  # of an unquantised checkpoint, which is rounded here: all parameters; 0 of a packed one


class FamilyShape(msgspec.Struct, frozen=True):
    """The models that belong together; no head where a recipe makes an SLM alone."""

    verifier: VerifierShape
    head: HeadShape | None
    slm: SlmShape

    def require_head(self) -> HeadShape:
        """The head, for the stages that only a recipe with one has."""
        assert self.head is not None
        return self.head
