"""The keep set: the token ids both drafters may propose (HyCo, §3.3 and Appendix A).

Row r of every restricted output layer and of the 8-bit embedding table belongs to token ids[r]. Besides the stored set:
the order in which ids are taken and the share of text each size covers (`rank`, `curve`), and which tokens belong to a
writing system (`in_scripts`); `stages.build_keepset` chooses with them.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from hyco_export.errors import ArtifactError, RecipeError

if TYPE_CHECKING:
    import regex

MISSING = -1  # row of a token outside the keep set
KEEPSET_FILE = "keepset.safetensors"  # ids int32 [n]; table int8 [n, H], table_scale float32 [n]; metadata vocab_size
CURVE_POINTS = 96  # sizes of a drawn coverage curve, evenly spaced in the logarithm


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
        found: np.ndarray = self._rows[token_ids]
        return found

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


def require_keepset(stage: str, digest: str, keepset: KeepSet) -> None:
    """Check that an artifact of `stage` was built with this keep set: its output rows mean nothing under another.

    Raises:
        ArtifactError: the artifact of `stage` was built with another one.
    """
    if digest != keepset.digest:
        raise ArtifactError(
            f"{stage} was built with keep set {digest[:12]}, the run folder holds {keepset.digest[:12]}",
            f"build it again: hyco-export {stage}",
        )


@dataclass(frozen=True)
class Ranking:
    """Ids in the order in which a growing keep set takes them.

    order: int32, V at most; the first `fixed` are always kept, those up to `known` are fixed or were seen in the text.
    """

    order: np.ndarray
    fixed: int
    known: int


def rank(counts: np.ndarray, fixed: np.ndarray, placeholders: np.ndarray, never: np.ndarray | None = None) -> Ranking:
    """Fixed ids (bool [V]), then by falling counts [V]; equal counts by the smaller id.

    Small ids are the earlier merges of a tokenizer, so also the likelier ones where nothing was counted. Placeholders
    (bool [V], entries without a text) come last whatever their id; `never` (bool [V]) marks ids that are left out.
    """
    ids = np.arange(len(counts))
    unseen = counts == 0
    never = np.zeros(len(counts), dtype=bool) if never is None else never
    order = np.lexsort((ids, -counts, placeholders & unseen, ~fixed))  # the last key counts most
    order = order[~never[order]]
    size = int(fixed.sum())
    return Ranking(order.astype(np.int32), size, size + int((~fixed & ~unseen & ~never).sum()))


def kept_share(ranking: Ranking, counts: np.ndarray) -> np.ndarray:
    """float64 [len(order) + 1]: share of counted tokens [V] inside the first n ids; zeros where nothing was counted."""
    inside = np.concatenate([[0], np.cumsum(counts[ranking.order])])
    return inside / max(int(counts.sum()), 1)


def smallest_size(ranking: Ranking, shares: np.ndarray, wanted: float) -> int | None:
    """The smallest size, fixed part included, whose share [V + 1] reaches `wanted`; None where no known ids do.

    Ids that were never counted have no meaningful order, so the set does not grow into them.
    """
    reached = np.flatnonzero(shares[ranking.fixed : ranking.known + 1] >= wanted)
    return ranking.fixed + int(reached[0]) if len(reached) else None


def curve(ranking: Ranking, held_out: np.ndarray, counted: np.ndarray, chosen: int) -> list[dict[str, Any]]:
    """Rows `size, held_out_share, counted_share` from the fixed part to the whole vocabulary, `chosen` among them."""
    sizes = np.geomspace(max(ranking.fixed, 1), len(ranking.order), CURVE_POINTS).round().astype(np.int64)
    sizes = np.unique(np.concatenate([sizes, [ranking.known, chosen]]))
    held_out_share, counted_share = kept_share(ranking, held_out), kept_share(ranking, counted)
    return [
        {"size": int(n), "held_out_share": float(held_out_share[n]), "counted_share": float(counted_share[n])}
        for n in sizes
    ]


def script_pattern(script: str) -> "regex.Pattern[str]":
    """A pattern for one letter of `script`, a value of Unicode's Script property (`Hangul`, `Latin`, `Han`).

    Marks, digits and punctuation of a script do not count: texts that hold them also hold letters.

    Raises:
        RecipeError: Unicode has no script of that name.
    """
    import regex  # a device reads keep sets and chooses none

    unknown = RecipeError(
        f"$.keepset.scripts names {script!r}, which is not a script of Unicode",
        "use a value of the Script property, such as Hangul, Latin, Han or Arabic",
    )
    if not script.isidentifier():
        raise unknown
    try:
        return regex.compile(rf"(?V1)[\p{{Script={script}}}&&\p{{Letter}}]")
    except regex.error as error:
        raise unknown from error


def in_scripts(texts: Iterable[str], scripts: Iterable[str]) -> np.ndarray:
    """bool [n]: whether text i contains a letter of one of `scripts`.

    Raises:
        RecipeError: a script that Unicode does not have.
    """
    patterns = [script_pattern(script) for script in scripts]
    return np.array([any(pattern.search(text) for pattern in patterns) for text in texts], dtype=bool)
