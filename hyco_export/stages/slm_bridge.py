"""What `convert-slm` does for an SLM with another tokenizer: finds the token bridge, and reads the captures through it.

Knows checkpoint folders and the recipe's wish; the map itself is `nn.vocabulary_map`'s. Legend: V vocabulary sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyco_export.core.keepset import KeepSet
from hyco_export.core.recipe import TokenBridge as BridgeChoice
from hyco_export.core.token_bridge import BRIDGE_FILE, TokenBridge, write_bridge
from hyco_export.stages.stage import Metrics

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

    from hyco_export.nn.tokenizer_file import open_tokenizer
    from hyco_export.nn.vocabulary_map import Vocabulary, map_vocabularies

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
