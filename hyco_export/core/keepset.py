"""The keep set: the token ids both drafters may propose (HyCo, §3.3 and Appendix A).

Row r of every restricted output layer and of the 8-bit embedding table belongs to token ids[r]. Knows ids and rows; not
how the ids were chosen (`stages.build_keepset`).
"""

import hashlib
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from hyco_export.errors import ArtifactError

MISSING = -1  # row of a token outside the keep set
KEEPSET_FILE = "keepset.safetensors"  # ids int32 [n]; table int8 [n, H], table_scale float32 [n]; metadata vocab_size


class KeepSet:
    """Sorted, unique token ids with their inverse map.

    Args:
        ids: [n] token ids, strictly increasing.
        vocab_size: size of the verifier's vocabulary.

    Raises:
        ArtifactError: ids are not strictly increasing or leave the vocabulary.
    """

    def __init__(self, ids: np.ndarray, vocab_size: int) -> None:
        self.ids = np.asarray(ids, dtype=np.int32)
        if len(self.ids) == 0 or np.any(np.diff(self.ids) <= 0) or self.ids[0] < 0 or self.ids[-1] >= vocab_size:
            permuted = len(self.ids) > 0 and len(np.unique(self.ids)) == len(self.ids)
            raise ArtifactError(
                f"keep set of {len(self.ids)} ids is {'permuted: ' if permuted else ''}not strictly increasing inside "
                f"[0, {vocab_size})",
                "build it again: hyco-export build-keepset",
            )
        self.vocab_size = vocab_size
        self._rows = np.full(vocab_size, MISSING, dtype=np.int32)
        self._rows[self.ids] = np.arange(len(self.ids), dtype=np.int32)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, token_ids: np.ndarray) -> np.ndarray:
        """Rows [...] of token_ids [...]; MISSING where a token is not kept."""
        return self._rows[token_ids]

    @property
    def digest(self) -> str:
        """sha256 over the vocabulary size and the little-endian int32 ids: both sides compare it."""
        return hashlib.sha256(f"{self.vocab_size}:".encode() + self.ids.astype("<i4").tobytes()).hexdigest()


def read_keepset(folder: Path) -> KeepSet:
    """The keep set of a `build-keepset` artifact.

    Raises:
        ArtifactError: the file is missing, damaged or not a keep set.
    """
    path = folder / KEEPSET_FILE
    try:
        with safe_open(path, framework="numpy") as stored:
            return KeepSet(stored.get_tensor("ids"), int(stored.metadata()["vocab_size"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{path} is not a keep set: {error}", "build it again: hyco-export build-keepset"
        ) from error
