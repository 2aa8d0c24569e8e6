"""How large the created checkpoints are. Knows shapes and the length of the runs they are for; writes nothing.

What the device sees of `full` is the paper's: the head, the hand-off, vocabulary and keep set are those of Gemma 4
26B-A4B and its assistant, the SLM is Gemma 4 E2B. The verifier's body is three dense layers instead of thirty with
experts: enough to give every kind of hand-off. Layer patterns: S sliding, F full attention.
"""

from dataclasses import dataclass

from hyco_export.errors import RecipeError


@dataclass(frozen=True)
class AttentionSize:
    """K/V of verifier and head: the head reads the verifier's, so their sizes are equal."""

    kv_heads: int
    global_kv_heads: int
    head_dim: int
    global_head_dim: int
    sliding_window: int


@dataclass(frozen=True)
class BodySize:
    """Width and layers of a verifier or head."""

    hidden: int
    intermediate: int
    heads: int
    pattern: str


@dataclass(frozen=True)
class SlmSize:
    """Gemma 4 E2B's structure with fewer layers, in its own widths or (`narrow`) in some of a tiny model."""

    layers: int
    shared: int
    narrow: bool


@dataclass(frozen=True)
class RunSize:
    """What the recipe beside the checkpoints asks for: enough to see every stage work, not to train."""

    keepset: int
    window: int  # of the head's ring and the SLM's full layers; sliding layers have half
    prefill_rows: int
    prompts: int  # of each of the two sets
    new_tokens: int
    qat_steps: int
    clip_ratios: int


@dataclass(frozen=True)
class Scale:
    """One size of the whole family."""

    name: str
    vocab_size: int
    attention: AttentionSize
    verifier: BodySize
    head: BodySize
    slm: SlmSize
    run: RunSize


FULL = Scale(
    name="full",
    vocab_size=262_144,
    attention=AttentionSize(kv_heads=8, global_kv_heads=2, head_dim=256, global_head_dim=512, sliding_window=1024),
    verifier=BodySize(hidden=2816, intermediate=2112, heads=16, pattern="SSF"),
    head=BodySize(hidden=1024, intermediate=8192, heads=16, pattern="SSSF"),
    slm=SlmSize(layers=35, shared=20, narrow=False),
    run=RunSize(keepset=86_089, window=1024, prefill_rows=128, prompts=3, new_tokens=32, qat_steps=2, clip_ratios=3),
)
MIDDLE = Scale(
    name="middle",
    vocab_size=32_768,
    attention=AttentionSize(kv_heads=4, global_kv_heads=1, head_dim=64, global_head_dim=128, sliding_window=256),
    verifier=BodySize(hidden=704, intermediate=528, heads=8, pattern="SSF"),
    head=BodySize(hidden=256, intermediate=2048, heads=8, pattern="SSSF"),
    slm=SlmSize(layers=10, shared=5, narrow=False),
    run=RunSize(keepset=8_192, window=256, prefill_rows=64, prompts=4, new_tokens=32, qat_steps=2, clip_ratios=3),
)
SMALL = Scale(
    name="small",
    vocab_size=4_096,
    attention=AttentionSize(kv_heads=2, global_kv_heads=1, head_dim=32, global_head_dim=64, sliding_window=64),
    verifier=BodySize(hidden=128, intermediate=96, heads=4, pattern="SSF"),
    head=BodySize(hidden=64, intermediate=512, heads=4, pattern="SSSF"),
    slm=SlmSize(layers=10, shared=5, narrow=True),
    run=RunSize(keepset=1_536, window=128, prefill_rows=32, prompts=3, new_tokens=24, qat_steps=2, clip_ratios=3),
)
SCALES = {scale.name: scale for scale in (FULL, MIDDLE, SMALL)}


def find_scale(name: str) -> Scale:
    """The scale called `name`.

    Raises:
        RecipeError: there is none.
    """
    if name not in SCALES:
        raise RecipeError(f"--scale is {name!r}", f"give one of: {', '.join(SCALES)}")
    return SCALES[name]
