"""Shapes of made-up families in which every term of an estimate differs from every other."""

from hyco_export.core.estimates.shapes import FamilyShape, HeadShape, KvLayer, Matrix, SlmShape, VerifierShape
from hyco_export.core.estimates.stages import Split, Work
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe

PAPER = load_recipe(embedded_recipe().parent / "gemma4-26b-a4b-sm8850.yaml")


def family_shape(scale: int) -> FamilyShape:
    """A family that grows with `scale`; 1 has about 50 million parameters."""
    vocab, kept_heads = 100_000 * scale, 2
    sliding, full = KvLayer("sliding", kept_heads, 64 * scale), KvLayer("full", 1, 128 * scale)
    matrices = (Matrix(512 * scale, 256 * scale, 4), Matrix(256 * scale, 512 * scale, 2, in_prefill=False))
    return FamilyShape(
        verifier=VerifierShape(50_000_000 * scale**2, 384 * scale, vocab, (sliding, full)),
        head=HeadShape(128 * scale, vocab, 2, (Matrix(256 * scale, 128 * scale, 16),), 640 * scale),
        slm=SlmShape(
            hidden=256 * scale,
            per_layer_width=64 * scale,
            vocab_size=vocab,
            output_bits=8,
            layers=3,
            matrices=matrices,
            tables=(Matrix(vocab, 256 * scale, 4), Matrix(vocab, 64 * scale, 8)),
            table_scales=2 * vocab,
            norm_values=1000 * scale,
            storing=(sliding, full),
        ),
    )


def work(sequences: int) -> Work:
    """Prompts of 20 tokens with answers of 30, and as many conversations as that makes tokens."""
    split = Split(sequences, 20 * sequences, 30)
    return Work(split, Split(0, 0, 30), split, conversations=50 * sequences)
