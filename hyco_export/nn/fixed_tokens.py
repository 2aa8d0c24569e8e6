"""The part of a keep set that no text decides: specials, byte tokens and whole scripts (HyCo, Appendix A).

Knows tokenizers through `nn.vocabulary`; counts nothing. Legend: V vocabulary size.
"""

from dataclasses import dataclass

import numpy as np

from hyco_export.core.scripts import in_scripts
from hyco_export.errors import RecipeError
from hyco_export.nn.tokenizer_file import TokenizerFile
from hyco_export.nn.vocabulary import byte_ids, placeholder_ids, special_ids, token_texts


@dataclass(frozen=True)
class FixedPart:
    """Tokens that are always kept, as bool [V]; a token counts for the first part that names it."""

    specials: np.ndarray
    bytes: np.ndarray
    scripts: np.ndarray
    placeholders: np.ndarray  # entries without a text: not kept, and the last to be taken

    @property
    def union(self) -> np.ndarray:
        return self.specials | self.bytes | self.scripts

    @property
    def sizes(self) -> dict[str, int]:
        return {name: int(getattr(self, name).sum()) for name in ("specials", "bytes", "scripts")}


def find_fixed_part(tokenizer: TokenizerFile, vocab_size: int, scripts: tuple[str, ...]) -> FixedPart:
    """The fixed part as the verifier's own tokenizer gives it.

    Raises:
        CheckpointError: the tokenizer has no byte tokens.
        RecipeError: a script that Unicode does not have.
    """
    specials = _mask(special_ids(tokenizer, vocab_size), vocab_size)
    bytes_ = _mask(byte_ids(tokenizer.backend), vocab_size) & ~specials
    in_script = in_scripts(token_texts(tokenizer.backend, vocab_size), scripts)
    placeholders = _mask(placeholder_ids(tokenizer.backend, vocab_size), vocab_size) & ~specials & ~bytes_
    return FixedPart(specials, bytes_, in_script & ~specials & ~bytes_, placeholders)


def require_room(size: int, fixed: FixedPart, vocab_size: int) -> None:
    """The size must hold the fixed part and fit the vocabulary.

    Raises:
        RecipeError: it does not; names the field and every number.
    """
    parts = ", ".join(f"{count:,} {name}" for name, count in fixed.sizes.items())
    smallest = int(fixed.union.sum())
    if size < smallest:
        raise RecipeError(
            f"$.keepset.size is {size:,}, smaller than its fixed part of {smallest:,} tokens ({parts})",
            f"set it to at least {smallest:,}, or drop a script from $.keepset.scripts",
        )
    if size > vocab_size:
        raise RecipeError(
            f"$.keepset.size is {size:,}, larger than the verifier's vocabulary of {vocab_size:,}",
            f"set it to at most {vocab_size:,}",
        )


def _mask(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """bool [V], True at ids."""
    mask = np.zeros(vocab_size, dtype=bool)
    mask[ids] = True
    return mask
