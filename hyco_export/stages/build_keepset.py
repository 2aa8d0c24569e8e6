"""Stage `build-keepset`: the tokens both drafters may propose, and their 8-bit embedding table (HyCo, Appendix A).

Always kept are the special tokens, the 256 byte tokens and every token of the recipe's scripts; the most frequent
tokens of the assistant turns fill the rest. Conversations that calibrate or validate anything are not counted.
Legend: V vocabulary size, n kept tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hyco_export.core.conversations import conversation_ids, read_conversations
from hyco_export.core.json_file import write_json
from hyco_export.core.keepset import KEEPSET_FILE, MISSING, KeepSet
from hyco_export.core.layout import CAPTURE, KEEPSET
from hyco_export.core.recipe import Dtype, Recipe
from hyco_export.core.scripts import in_scripts
from hyco_export.errors import RecipeError
from hyco_export.stages.capture import read_answers
from hyco_export.stages.stage import Metrics, Progress, Source, Stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from hyco_export.nn.token_counts import TokenCounts

COVERAGE_FILE = "coverage.json"


class KeepSetConfig(msgspec.Struct, frozen=True):
    """What changes the artifact's bytes."""

    size: int
    scripts: tuple[str, ...]
    held_out_share: float
    verifier_dtype: Dtype  # the embedding factor is rounded to it


@dataclass(frozen=True)
class FixedPart:
    """Tokens that are always kept, as bool [V]; a token counts for the first part that names it."""

    specials: np.ndarray
    bytes: np.ndarray
    scripts: np.ndarray

    @property
    def union(self) -> np.ndarray:
        return self.specials | self.bytes | self.scripts

    @property
    def sizes(self) -> dict[str, int]:
        return {name: int(getattr(self, name).sum()) for name in ("specials", "bytes", "scripts")}


def keepset_config(recipe: Recipe) -> KeepSetConfig:
    """The recipe's part of this stage."""
    choice = recipe.keepset
    return KeepSetConfig(choice.size, choice.scripts, choice.held_out_share, recipe.models.verifier.dtype)


def keepset_sources(recipe: Recipe) -> Mapping[str, Source]:
    """Checkpoint and data files read here."""
    return {
        "verifier": recipe.models.verifier,
        "conversations": recipe.data.conversations,
        "calibration": recipe.data.calibration,
        "validation": recipe.data.validation,
    }


def check_keepset(config: KeepSetConfig, inputs: Mapping[str, Path]) -> None:
    """Refuse an impossible size or script in about a second, so that it can be asked before a chain starts.

    Raises:
        RecipeError: unknown script; a size below the fixed part or above the vocabulary.
    """
    from hyco_export.nn.embedding_table import find_embedding
    from hyco_export.nn.verifier import load_tokenizer

    vocab_size = find_embedding(inputs["verifier"]).vocab_size
    fixed = find_fixed_part(load_tokenizer(inputs["verifier"]), vocab_size, config.scripts)
    require_room(config.size, fixed, vocab_size)


def build_keepset(config: KeepSetConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Write the keep set with its table and `coverage.json`; the coverage is also the stage's metrics."""
    from safetensors.numpy import save_file

    from hyco_export.nn.embedding_table import find_embedding, quantized_embedding
    from hyco_export.nn.verifier import load_tokenizer

    tokenizer = load_tokenizer(inputs["verifier"])
    embedding = find_embedding(inputs["verifier"])
    fixed = find_fixed_part(tokenizer, embedding.vocab_size, config.scripts)
    require_room(config.size, fixed, embedding.vocab_size)
    counts = _count_conversations(config, inputs, tokenizer, embedding.vocab_size, progress)
    keepset = KeepSet(choose_ids(counts.counted, fixed.union, config.size), embedding.vocab_size)
    table = quantized_embedding(embedding, keepset.ids, config.verifier_dtype)
    save_file(
        {"ids": keepset.ids, "table": table.integers, "table_scale": table.scale},
        out_dir / KEEPSET_FILE,
        metadata={"vocab_size": str(keepset.vocab_size)},
    )
    coverage = describe(keepset, fixed, counts, count_answers(inputs[CAPTURE], keepset.vocab_size))
    if unseen := coverage["parts"]["of_them_unseen"]:
        progress.note(f"{unseen} kept tokens never occur in the conversations: the size is larger than the data needs")
    write_json(out_dir / COVERAGE_FILE, coverage)
    return coverage


def describe(
    keepset: KeepSet, fixed: FixedPart, counts: "TokenCounts", answers: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """What the keep set consists of, and how much text it covers: held-out conversations, and answers [V] by split."""
    kept = keepset.rows(np.arange(keepset.vocab_size)) != MISSING
    frequent = kept & ~fixed.union
    return {
        "size": len(keepset),
        "vocab_size": keepset.vocab_size,
        "digest": keepset.digest,
        "parts": {
            **fixed.sizes,
            "frequent": int(frequent.sum()),
            "of_them_unseen": int((frequent & (counts.counted == 0)).sum()),
        },
        "conversations": {
            "counted": counts.counted_conversations,
            "held_out": counts.held_out_conversations,
            "excluded": counts.excluded_conversations,
        },
        "held_out": share_outside(counts.held_out, kept),
        "answers": {split: share_outside(total, kept) for split, total in answers.items()},
    }


def find_fixed_part(tokenizer: "PreTrainedTokenizerFast", vocab_size: int, scripts: tuple[str, ...]) -> FixedPart:
    """Special tokens, byte tokens and the tokens of `scripts`, from the verifier's own tokenizer."""
    from hyco_export.nn.vocabulary import byte_ids, special_ids, token_texts

    specials = _mask(special_ids(tokenizer, vocab_size), vocab_size)
    bytes_ = _mask(byte_ids(tokenizer), vocab_size) & ~specials
    in_script = in_scripts(token_texts(tokenizer, vocab_size), scripts)
    return FixedPart(specials, bytes_, in_script & ~specials & ~bytes_)


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


def choose_ids(counts: np.ndarray, fixed: np.ndarray, size: int) -> np.ndarray:
    """Sorted ids [size]: all of fixed [V], then the highest counts [V]; equal counts give way to the smaller id."""
    ranked = np.argsort(-counts, kind="stable")  # stable: smaller ids first among equals
    frequent = ranked[~fixed[ranked]][: size - int(fixed.sum())]
    return np.sort(np.concatenate([np.flatnonzero(fixed), frequent])).astype(np.int32)


def share_outside(counts: np.ndarray, kept: np.ndarray) -> dict[str, float | int]:
    """Tokens counted [V], and the share of them inside and outside kept [V]; shares are 0 where nothing was counted."""
    tokens = int(counts.sum())
    inside = int(counts[kept].sum())
    return {
        "tokens": tokens,
        "kept_share": inside / max(tokens, 1),
        "outside_share": (tokens - inside) / max(tokens, 1),
    }


def count_answers(capture: Path, vocab_size: int) -> dict[str, np.ndarray]:
    """By split: occurrences [V] in the verifier's own greedy answers.

    Raises:
        ArtifactError: the capture cannot be read.
    """
    totals: dict[str, np.ndarray] = {}
    for answer in read_answers(capture):
        total = totals.setdefault(answer.split, np.zeros(vocab_size, dtype=np.int64))
        total += np.bincount(np.asarray(answer.answer_ids, dtype=np.int64), minlength=vocab_size)
    return totals


def _count_conversations(
    config: KeepSetConfig,
    inputs: Mapping[str, Path],
    tokenizer: "PreTrainedTokenizerFast",
    vocab_size: int,
    progress: Progress,
) -> "TokenCounts":
    """Count the recipe's conversations without those of the calibration and validation sets."""
    from hyco_export.nn.token_counts import count_tokens

    path = inputs["conversations"]
    with path.open("rb") as stream:
        total = sum(1 for line in stream if line.strip())
    excluded = conversation_ids(inputs["calibration"]) | conversation_ids(inputs["validation"])
    return count_tokens(
        read_conversations(path),
        tokenizer,
        vocab_size,
        excluded,
        config.held_out_share,
        lambda done: progress.step("conversations counted", done, total),
    )


def _mask(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """bool [V], True at ids."""
    mask = np.zeros(vocab_size, dtype=bool)
    mask[ids] = True
    return mask


STAGE = Stage(
    name=KEEPSET,
    revision=1,
    needs=(CAPTURE,),
    config=keepset_config,
    sources=keepset_sources,
    build=build_keepset,
    check=check_keepset,
)
