"""What `convert-slm` makes of a checkpoint before calibration: network, weights and host tables, and their files.

Legend: V kept tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from hyco_export.core.artifact import PartialBuild
from hyco_export.core.encodings import Encoding, encoding_from_range
from hyco_export.core.keepset import KeepSet
from hyco_export.core.network.host import AttentionSink
from hyco_export.core.network.slm import SlmNetwork, split_weights
from hyco_export.core.network.weight_files import WEIGHTS_FILE, read_slm, write_slm
from hyco_export.core.network.weights import Weights
from hyco_export.core.recipe import SlmWeights
from hyco_export.core.recipe import TokenBridge as BridgeChoice
from hyco_export.core.tables import TABLES_FILE, HostTables, save_tables
from hyco_export.core.token_bridge import BRIDGE_FILE, TokenBridge, write_bridge
from hyco_export.errors import ArtifactError, CheckpointError, GateError
from hyco_export.models.slm.float import FloatCheckpoint, Rounding, open_checkpoint
from hyco_export.models.slm.outliers import bits_won, channel_peaks, choose_copies, largest_difference
from hyco_export.models.slm.packed import PackedCheckpoint
from hyco_export.models.slm.static_pass import FloatSlm, find_attention_sink
from hyco_export.models.slm.surgery import host_tables, slm_network, slm_weights
from hyco_export.models.text.tokenizer import open_tokenizer
from hyco_export.models.text.vocabulary_map import Vocabulary, map_vocabularies
from hyco_export.models.torch_ops import TorchWeights
from hyco_export.stages.declarations import Metrics

UNIT = "surgery"
MAX_RELATIVE_DIFFERENCE = 1e-3  # of logits, in their standard deviations: float32 sums in another order stay far below
COMPARED_PASSES = 4  # of a network with split channels and the whole one; one of E2B takes seconds


@dataclass(frozen=True)
class Surgery:
    """What becomes of a checkpoint before calibration. `kept`: token ids [V] of the output layer's rows."""

    network: SlmNetwork
    weights: Weights
    float_slm: FloatSlm
    tables: HostTables
    kept: np.ndarray
    sink: AttentionSink | None = None
    unsplit: "Unsplit | None" = None


@dataclass(frozen=True)
class Unsplit:
    """The network before channels of its residual stream were split.

    Attributes:
        peaks: greatest magnitude of every channel by tensor of the stream, float32 [H].
        difference: of the logits of both networks, in standard deviations.
    """

    float_slm: FloatSlm
    peaks: Mapping[str, np.ndarray]
    difference: float

    def grids(self, margin: float) -> dict[str, Encoding]:
        """Those that the stream's tensors would have, but for the graph's input; `margin` times what was seen."""
        tops = {name: margin * float(peak.max()) for name, peak in self.peaks.items() if name != "embeds"}
        return {name: encoding_from_range(-top, top, "uint16") for name, top in tops.items()}


def rounding_of(weights: SlmWeights | None) -> Rounding | None:
    """How the recipe has an unquantised checkpoint rounded; None where it says nothing."""
    if weights is None:
        return None
    ratios = np.linspace(weights.clip_ratio_high, weights.clip_ratio_low, weights.clip_ratio_count)
    return Rounding(weights.bits, weights.output_bits, ratios)


def open_for(
    keepset: KeepSet, folder: Path, weights: SlmWeights | None, bridged: bool = False
) -> PackedCheckpoint | FloatCheckpoint:
    """The checkpoint.

    Raises:
        CheckpointError: unreadable, of another kind than the recipe says, or of another vocabulary than the keep set
            and not bridged.
    """
    checkpoint = open_checkpoint(folder, rounding_of(weights))
    if not bridged and checkpoint.config.vocab_size != keepset.vocab_size:
        raise CheckpointError(
            f"the SLM's vocabulary has {checkpoint.config.vocab_size} tokens, the keep set's {keepset.vocab_size}",
            "give an SLM with the verifier's tokenizer ($.models.slm), or join both with $.slm.bridge",
        )
    return checkpoint


def operate(
    checkpoint: PackedCheckpoint | FloatCheckpoint, rings: dict[str, int], keepset: KeepSet, out_dir: Path
) -> Surgery:
    """Write tables and float weights, or find those that a killed build has written whole.

    Raises:
        CheckpointError: the model has a part that the static network does not.
    """
    network = slm_network(checkpoint, rings)
    partial = PartialBuild(out_dir)
    if partial.finished(UNIT) is None:
        with partial.place(WEIGHTS_FILE) as draft:
            write_slm(draft, network, slm_weights(checkpoint, keepset.ids))
        with partial.place(TABLES_FILE) as draft:
            save_tables(draft, host_tables(checkpoint))
        partial.finish(UNIT, [WEIGHTS_FILE, TABLES_FILE])
    _, weights = read_slm(out_dir / WEIGHTS_FILE)  # from here on the checkpoint is not needed
    tables = HostTables(out_dir / TABLES_FILE)
    return Surgery(network, weights, FloatSlm(network, TorchWeights(weights)), tables, keepset.ids)


def with_sink(surgery: Surgery, token: int, rows: int, mask_value: float) -> Surgery:
    """The same with the kept K/V rows of the token that begins every text."""
    return replace(surgery, sink=find_attention_sink(surgery.float_slm, surgery.tables, token, rows, mask_value))


def with_split_outliers(
    surgery: Surgery, share: float, sequences: Sequence[Sequence[int]], rows: int, mask_value: float, out_dir: Path
) -> Surgery:
    """The same with outlier channels of the residual stream split; as it is where there are none.

    Args:
        share: of the stream's width, columns that it may get.
        sequences: calibration text.
        out_dir: the float weights in it are written again, for the network that is split.

    Raises:
        GateError: the network that is split is another one.
    """
    if not share:
        return surgery
    network, whole = surgery.network, surgery.float_slm
    peaks = channel_peaks(whole, surgery.tables, sequences, rows, mask_value, surgery.sink)
    copies = choose_copies(peaks, int(share * network.hidden))
    if not copies:
        return surgery
    network = msgspec.structs.replace(network, copies=copies)
    weights = split_weights(network, surgery.weights)
    slm = FloatSlm(network, TorchWeights(weights))
    text = (surgery.tables, sequences, rows, mask_value)
    difference = largest_difference(whole, slm, *text, max_passes=COMPARED_PASSES, sink=surgery.sink)
    if not difference < MAX_RELATIVE_DIFFERENCE:
        raise GateError(
            f"splitting outlier channels changes the SLM's logits by {difference:.1e} standard deviations, "
            f"the limit is {MAX_RELATIVE_DIFFERENCE:.0e}",
            "set $.slm.outlier_columns to 0 to leave them whole, and report it with the checkpoint's config.json",
        )
    with PartialBuild(out_dir).place(WEIGHTS_FILE) as draft:
        write_slm(draft, network, weights)
    return replace(surgery, network=network, weights=weights, float_slm=slm, unsplit=Unsplit(whole, peaks, difference))


def split_metrics(surgery: Surgery) -> Metrics:
    """Which channels were split, and what that wins."""
    if surgery.unsplit is None:
        return {}
    network = surgery.network
    return {
        "split_channels": {str(channel): count for channel, count in sorted(network.copies.items())},
        "stream_width": [network.hidden, network.stream_width],
        "stream_bits_won": round(bits_won(surgery.unsplit.peaks, network), 2),
        "split_difference_in_std": surgery.unsplit.difference,
    }


def without_sink(sequences: Sequence[Sequence[int]], surgery: Surgery, rows: int) -> list[list[int]]:
    """The rest of the sequences that begin with the sink and fill a pass after it.

    Raises:
        ArtifactError: there is none.
    """
    assert surgery.sink is not None
    rest = [list(ids[1:]) for ids in sequences if ids[0] == surgery.sink.token and len(ids) > rows]
    if not rest:
        raise ArtifactError(
            f"no captured sequence begins with token {surgery.sink.token} and has {rows} more tokens",
            "raise $.capture.max_new_tokens, or remove $.slm.stored_opening",
        )
    return rest


# What `convert-slm` does for an SLM with another tokenizer: finds the token bridge, and reads the captures through
# it.


Texts = list[list[int]]


@dataclass(frozen=True)
class Columns:
    """The SLM's own tokens that it proposes, and how it reads the verifier's; the same ids where there is no bridge."""

    kept: KeepSet  # in the SLM's vocabulary
    bridge: TokenBridge | None = None

    def read(self, texts: Sequence[Sequence[int]]) -> Texts:
        """Texts of verifier ids as the SLM reads them."""
        if self.bridge is None:
            return [list(ids) for ids in texts]
        return [self.bridge.read_all(ids).tolist() for ids in texts]

    def write(self, out_dir: Path) -> None:
        """Store the bridge, where there is one."""
        if self.bridge is not None:
            write_bridge(out_dir / BRIDGE_FILE, self.bridge)


def find_columns(
    choice: BridgeChoice | None, keepset: KeepSet, verifier: Path | None, slm: Path, slm_vocab_size: int
) -> Columns:
    """The keep set as the SLM has it.

    Raises:
        CheckpointError: a tokenizer cannot be read, or the vocabularies have nothing in common.
        RecipeError: a special that is not in its vocabulary.
    """
    if choice is None or verifier is None:
        return Columns(keepset)

    ours = Vocabulary(open_tokenizer(verifier), keepset.vocab_size)
    theirs = Vocabulary(open_tokenizer(slm), slm_vocab_size)
    bridge = map_vocabularies(ours, theirs, keepset.ids.tolist(), choice.specials)
    return Columns(KeepSet(bridge.drafter_ids, slm_vocab_size), bridge)


def bridge_metrics(columns: Columns, keepset: KeepSet, texts: Sequence[Sequence[int]]) -> Metrics:
    """Which part of the keep set can be drafted, and how many of the SLM's tokens one of the verifier's takes."""
    if columns.bridge is None:
        return {}
    tokens = sum(map(len, texts))
    return {
        "bridged_tokens": len(columns.kept),
        "bridged_share": round(len(columns.kept) / len(keepset), 4),
        "tokens_per_verifier_token": round(sum(map(len, columns.read(texts))) / tokens, 3),
    }
