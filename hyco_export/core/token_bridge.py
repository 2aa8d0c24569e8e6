"""The token bridge: a byte-exact map between two vocabularies, for a drafter with a tokenizer of its own.

Stored beside the SLM and made by `models.text.vocabulary_map`. Legend: V the verifier's vocabulary, C columns of the
drafter's restricted output layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hyco_export.errors import ArtifactError

BRIDGE_FILE = "slm_bridge.safetensors"  # the fields of `TokenBridge`, all int32
BUILD_AGAIN = "build it again: hyco-export convert-slm"


@dataclass(frozen=True)
class TokenBridge:
    """Which verifier tokens the drafter may propose, and which of its own tokens stand for any verifier token.

    Column c of its output layer is its own token `drafter_ids[c]` (strictly increasing) and the verifier's
    `verifier_ids[c]`: both stand for the same bytes. Any verifier token v is read as the drafter's tokens
    `pieces[offsets[v]:offsets[v + 1]]`, which spell its bytes.
    """

    verifier_ids: np.ndarray  # [C]
    drafter_ids: np.ndarray  # [C]
    offsets: np.ndarray  # [V + 1]
    pieces: np.ndarray

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.offsets) - 1

    def read(self, token: int) -> np.ndarray:
        """The drafter's tokens for one of the verifier's; at least one."""
        return self.pieces[self.offsets[token] : self.offsets[token + 1]]

    def read_all(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """The drafter's tokens for a sequence of the verifier's."""
        return np.concatenate([self.read(int(token)) for token in tokens]) if len(tokens) else self.pieces[:0]


def write_bridge(path: Path, bridge: TokenBridge) -> None:
    """Store a bridge."""
    save_file({name: np.ascontiguousarray(array, dtype=np.int32) for name, array in vars(bridge).items()}, path)


def read_bridge(path: Path) -> TokenBridge:
    """The bridge stored at `path`.

    Raises:
        ArtifactError: missing, damaged, or not a map.
    """
    try:
        bridge = TokenBridge(**load_file(path))
    except (OSError, SafetensorError, TypeError) as error:
        raise ArtifactError(f"{path} is not a token bridge: {error}", BUILD_AGAIN) from error
    sound = (
        len(bridge.verifier_ids) == len(bridge.drafter_ids) > 0
        and bool(np.all(np.diff(bridge.drafter_ids) > 0))
        and bool(np.all(np.diff(bridge.offsets) > 0))
        and bridge.offsets[0] == 0
        and bridge.offsets[-1] == len(bridge.pieces)
    )
    if not sound:
        raise ArtifactError(f"{path} is not a token bridge: its lists do not fit", BUILD_AGAIN)
    return bridge
