"""The recipe: one YAML file = one run.

Names, types and defaults of every field; `core.recipe_loading` reads the file and checks which values fit together.
Flags of the CLI say where things are; whatever changes the bytes of an artifact stands here. Defaults are the paper's
(HyCo, §3, Appendix A).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from hyco_export.core.handoff import HiddenNorm
from hyco_export.core.recipe_sections import (
    Count,
    DataSource,
    Decay,
    KeepSetChoice,
    NonNegative,
    Positive,
    Section,
    Seed,
    Share,
)
from hyco_export.errors import RecipeError

Dtype = Literal["float32", "bfloat16"]
WeightBits = Literal[4, 8]
PAPER_BUDGET = 32  # nodes, of which a device with budget "auto" sends a part (HyCo, §3.1)
NAME_LIMIT = 100  # of a folder's name of at most 255 bytes, the rest for what is added to it


class Checkpoint(Section, frozen=True):
    """Where a model comes from: a folder, a Hub id, or `embedded:NAME` of the tiny family.

    `gguf_file` names the GGUF file in it that holds model and tokenizer; it is dequantised to `dtype`.
    """

    model: str
    revision: str | None = None
    dtype: Dtype = "bfloat16"
    gguf_file: str | None = None


class Models(Section, frozen=True):
    """The three checkpoints that belong together.

    A recipe without a head makes an SLM's artifacts alone; the SLM may then stand as its own verifier, which gives the
    keep set its tokens and the calibration its text.
    """

    verifier: Checkpoint
    slm: Checkpoint
    head: Checkpoint | None = None
    hidden_norm: HiddenNorm = "post"  # side of the verifier's final norm from which h travels
    allow_quantised_capture: bool = False  # a quantised verifier may teach the head; the paper's is in bfloat16

    def require_head(self) -> Checkpoint:
        """The head.

        Raises:
            RecipeError: the recipe has none.
        """
        if self.head is None:
            raise RecipeError("$.models.head is missing: this recipe makes an SLM alone", "name the verifier's head")
        return self.head


class Data(Section, frozen=True):
    """Conversations: a path alone (relative to the recipe, then to the package), or a `DataSource`."""

    calibration: str | DataSource
    validation: str | DataSource
    conversations: str | DataSource  # counted for the keep set, without those of the other two


class Capture(Section, frozen=True):
    """Greedy answers and teacher-forced hand-offs (Table 4).

    `sampled_answers` > 0 adds that many sampled answers to each calibration prompt, for QAT, and for the keep set where
    `keepset.answers_weight` counts answers: the model's own text as training data, as in data-free QAT (Liu et al.
    2024b, which the paper's loss follows). The paper has none.
    """

    max_new_tokens: Count = 1024
    sampled_answers: NonNegative = 0
    validation_max_new_tokens: Count = 512
    sequence_limit: Count = 2048


class Qat(Section, frozen=True):
    """QAT of the head's linear weights (Table 4).

    Options that the paper does not have: `unrolled_steps` > 1 also trains the steps fed by the head's own state;
    `trained_grids` lets training move each channel's scale, which the clip search only starts (Esser et al. 2020, LSQ);
    `split_projection` gives the embedding half and the state half of the head's first matrix scales of their own;
    `grid: lpbq` gives every 64 inputs of a channel a 4-bit multiple of the channel's scale; `overrides` gives layers
    another width, by glob over their names (a later one wins); `evidence_sequences` > 0 measures on so many calibration
    sequences what each layer's width costs, and suggests overrides.
    """

    weight_bits: WeightBits = 4
    split_projection: bool = False
    grid: Literal["per-channel", "lpbq"] = "per-channel"
    overrides: dict[str, WeightBits] = msgspec.field(default_factory=dict)
    evidence_sequences: NonNegative = 0
    clip_ratio_low: Share = 0.6
    clip_ratio_high: Share = 1.0
    clip_ratio_count: Count = 41
    learning_rate: Positive = 1e-5
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0.0)] = 0.0
    gradient_norm_clip: Positive = 1.0
    warmup_steps: NonNegative = 50
    steps: Count = 100
    accumulation: Count = 2
    sequence_limit: Count = 2048
    autocast: Dtype = "bfloat16"
    unrolled_steps: Count = 1
    trained_grids: bool = False
    seed: Seed = 20261011


class HeadGraph(Section, frozen=True):
    """The head's graph: K steps, how many of them also give a runner-up, positions in its ring.

    `projected_table`: the graph looks up embeddings that went through their half of the pre-projection already; a
    smaller table and one product less a step (`core.network.weights.project_table`). The paper looks up embeddings.
    """

    steps: Count = 4
    runner_up_steps: NonNegative = 2
    window: Count = 1024
    projected_table: bool = False


class SlmWeights(Section, frozen=True):
    """How an unquantised SLM is rounded: widths of its linear layers; scales by the head's clip search (Table 4)."""

    bits: Literal[4, 8]
    output_bits: Literal[4, 8] = 8
    clip_ratio_low: Share = 0.6
    clip_ratio_high: Share = 1.0
    clip_ratio_count: Count = 41


class TokenBridge(Section, frozen=True):
    """For an SLM with a tokenizer of its own: its vocabulary is joined with the verifier's, byte by byte.

    `specials` names tokens that mean the same on both sides, the verifier's name first.
    """

    specials: dict[str, str] = msgspec.field(default_factory=dict)


class SlmGraph(Section, frozen=True):
    """The SLM's graphs: rows of a tree pass and of a prefill pass, ring capacities.

    `weights` is for an unquantised checkpoint; a packed one is used as it is, and its artifacts lack the field.
    `stored_opening` stores the K/V rows of the attention sink, the token that begins every text: Gemma 3 has
    activations there tens of times greater than elsewhere, which would widen the range of every tensor.
    `evidence_passes` > 0 measures on so many passes what quantising each layer's activations costs.
    `outlier_columns` splits channels that dwarf the others of the residual stream, which gets at most so many columns
    more, as a share of its width; 0: none. A stream without such channels stays as it is (`models.slm.outliers`).
    `wide_kv` names rings of 16 bits instead of 8, by glob over `k.<layer>` and `v.<layer>` (`[v.*]`): twice the memory.
    `bridge` is for an SLM with another tokenizer than the verifier's; without it the tokenizers must be the same.
    """

    rows: Count = 32
    prefill_rows: Count = 128
    ring: Count = 1024
    sliding_ring: Count = 512
    weights: SlmWeights | msgspec.UnsetType = msgspec.UNSET
    stored_opening: bool | msgspec.UnsetType = msgspec.UNSET
    evidence_passes: NonNegative = 0
    outlier_columns: Share = 0.1
    wide_kv: tuple[str, ...] = ()
    bridge: TokenBridge | msgspec.UnsetType = msgspec.UNSET


class Calibration(Section, frozen=True):
    """Activation and K/V ranges from the captures (Appendix A).

    The SLM's activations have 16 bits: resolution to spare, so that clipping costs more than a wide range.
    """

    activation_percentile: Annotated[float, Meta(gt=50.0, le=100.0)] = 99.99
    kv_percentile: Annotated[float, Meta(gt=50.0, le=100.0)] = 99.9
    kv_margin: Positive = 1.2
    slm_percentile: Annotated[float, Meta(gt=50.0, le=100.0)] = 100.0
    slm_margin: Annotated[float, Meta(ge=1.0)] = 1.2
    slm_passes: Count | None = None  # of `slm.rows` tokens that the ranges are read from; None = all of the captures
    slm_quality_passes: Count = 96  # compared after; 3,000 positions: top-1 agreement to within half a percent
    mask_value: Annotated[float, Meta(ge=-255.0, le=-50.0)] = -100.0


class CompileGates(Section, frozen=True):
    """Limits of the compiled graph against the QDQ graph (`graph.parity.ParityLimits`), and how binaries store weights.

    `two_bit_weights`: the checkpoint's 2-bit weights take 2 bits in the binary instead of 4; needs a C compiler, and
    without one they take 4 (`graph.smaller_binaries`). `shared_binary`: also one binary of both SLM graphs with their
    common weights stored once; x86 cannot load it, so the separate ones are what is validated.
    """

    output_range_share: Positive = 0.004  # onnxruntime-qnn's own rule
    max_outside_share: Share = 0.01  # elements of an output that may break it
    min_id_agreement: Share = 0.97  # equal ids: a near-tie may fall either way
    emulated_feeds: NonNegative = 16  # of each graph, fewer for a large one; 0: no comparison
    two_bit_weights: bool = False
    shared_binary: bool = False


class Sampling(Section, frozen=True):
    """The verifier's sampling distribution (§4.1)."""

    temperature: Annotated[float, Meta(ge=0.0)] = 1.0
    top_k: NonNegative = 64
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.95


class SpecEdge(Section, frozen=True):
    """The tree that the SLM drafts alone (§4.2): passes, children of a node, and what an edge costs beside log q."""

    passes: Count = 4
    children_per_row: Count = 16
    edge_factor: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.9
    passes_ahead: Literal["added", "counted"] = "added"  # to, or among, the next round's after a right guess (PD)


class SlmChain(Section, frozen=True):
    """A chain that the SLM drafts alone: it ends with the first token of less confidence, or the longest."""

    confidence: Annotated[float, Meta(gt=0.0, lt=1.0)]
    longest: Count = 8


class Synera(SlmChain, frozen=True):
    """Selective offload: tokens of at least that confidence stay unverified, `unverified` of them in a row at most."""

    unverified: Count = 16


class Price(Section, frozen=True):
    """What a round costs: so much for a millisecond of the server, and of the whole round on the device's clock."""

    server_ms: Annotated[float, Meta(ge=0.0)] = 0.0  # as `server_ms` of its replies
    wall_ms: Annotated[float, Meta(ge=0.0)] = 0.0  # drafting, link and server


class Drafting(Section, frozen=True):
    """The hybrid tree (§3.1), and the other systems' drafters. `budget` holds for all of them.

    With "auto" a device drafts trees of 32 nodes and sends as many of the best as are expected to give the most tokens
    per unit of `objective`, by what the server says its passes take (docs/serving.md); chains are not cut.
    """

    budget: Count | Literal["auto"] = 32
    objective: Literal["server-time", "delivery"] | Price = "server-time"  # of budget "auto"; delivery: of whole rounds
    chain_acceptance: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.66
    candidates_per_row: Count = 32
    slm_temperature: Positive = 1.0  # of q, the SLM's distribution over the keep set
    second_pass_nodes: Count | None = None  # of HyCo-2P, best first; None = all without children
    stop_needs_draw: bool = False  # no stop token by a threshold alone
    specedge: SpecEdge = SpecEdge()
    sled: SlmChain = SlmChain(confidence=0.4)
    synera: Synera = Synera(confidence=0.8)

    @property
    def largest_tree(self) -> int:
        """Nodes that are sent at most."""
        return PAPER_BUDGET if self.budget == "auto" else self.budget


class Gates(Section, frozen=True):
    """What `validate` demands of a run."""

    min_mat: dict[str, float] = msgspec.field(default_factory=dict)  # by system
    min_head_agreement: Share = 0.97  # K-step graph against the step-by-step W4 head
    min_slm_agreement: Share = 0.9  # best token of a row, integer graph against the float network
    min_head_tokens: Annotated[float, Meta(ge=0.0)] = 0.1  # chain tokens a round of the published head; 0: not asked
    max_bytes_up: Count = 300
    max_bytes_down_overhead: Count = 100


class Validation(Section, frozen=True):
    """Systems, prompts and lengths of `validate`; the emulator is slow, so it gets fewer.

    The first of `systems` (names in `device.systems`) is the baseline that the others are compared with; the
    greedy texts of `greedy_systems` must be plain decoding's, on every back end.
    """

    systems: Annotated[tuple[str, ...], Meta(min_length=1)] = ("cloud-mtp", "hyco-exact", "hyco")
    greedy_systems: Annotated[tuple[str, ...], Meta(min_length=1)] = ("hyco-exact",)
    prompts: Count = 30
    emulator_prompts: Count = 4
    max_new_tokens: Count = 64
    emulator_max_new_tokens: Count = 24
    seed: Seed = 20261011
    epsilon: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.005
    first_reply_rows: NonNegative = 0  # newest K/V rows of the first reply; 0: the whole window (paper)
    gates: Gates = Gates()


class Recipe(Section, frozen=True):
    """One run."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]*\Z", max_length=NAME_LIMIT)]
    models: Models
    data: Data
    keepset: KeepSetChoice
    target: str = "sm8850"
    threads: Count | None = None  # of torch on the CPU: another number sums in another order; None = torch's choice
    capture: Capture = Capture()
    qat: Qat = Qat()
    head: HeadGraph = HeadGraph()
    slm: SlmGraph = SlmGraph()
    calibration: Calibration = Calibration()
    compile: CompileGates = CompileGates()
    sampling: Sampling = Sampling()
    drafting: Drafting = Drafting()
    validation: Validation = Validation()
