"""Stage `build-keepset`: the tokens both drafters may propose, and their 8-bit embedding table (HyCo, Appendix A).

Always kept are the special tokens, the 256 byte tokens and every token of the recipe's scripts; the most frequent
tokens of the assistant turns, and of the verifier's captured answers to the calibration prompts where the recipe gives
them a weight, fill the rest, up to the recipe's size, or until the held-out part of the conversations is covered as the
recipe asks. Conversations that calibrate or validate anything are not counted.

Files:
    keepset.safetensors   see `core.keepset`
    coverage.json         what the keep set consists of and covers; also the stage's metrics
    curve.json, .svg      share of the held-out and of the counted tokens kept, by size
    conversations.json    ids of the conversations that were counted, held out and excluded

Legend: V vocabulary size, n kept tokens.
"""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from hyco_export.core.artifact import CAPTURE, WORK_FOLDER
from hyco_export.core.data.conversations import identities
from hyco_export.core.data.readers import conversation_count, list_files, read_conversations
from hyco_export.core.files import Declared, TensorWriter, write_json
from hyco_export.core.keepset import KEEPSET_FILE, MISSING, KeepSet, Ranking, curve, kept_share, rank, smallest_size
from hyco_export.core.memory import release_freed
from hyco_export.core.recipe import Dtype
from hyco_export.errors import RecipeError
from hyco_export.evaluate.charts import coverage_picture, write_picture
from hyco_export.models.embedding_table import EmbeddingSource, find_embedding, quantized_blocks
from hyco_export.models.generation_rules import checkpoint_suppressed_ids
from hyco_export.models.text.token_counts import TokenCounts, count_tokens
from hyco_export.models.text.tokenizer import TokenizerFile, open_tokenizer
from hyco_export.models.text.vocabulary import FixedPart, find_fixed_part, require_room
from hyco_export.stages.captured import read_answers
from hyco_export.stages.declarations import Metrics, Progress
from hyco_export.stages.table import KeepSetConfig

COVERAGE_FILE = "coverage.json"
CURVE_FILE = "curve.json"
PICTURE_FILE = "curve.svg"
CONVERSATIONS_FILE = "conversations.json"
COUNTING_FILE = f"{WORK_FOLDER}/counting.msgpack"  # a count in progress, for the next try after a kill
PROMPT_SETS = ("calibration", "validation")  # not counted
COUNTED_ANSWERS = frozenset({"calibration", "sampled"})  # splits of a capture whose prompts calibrate
SHOWN_SHARES = (0.9, 0.95, 0.98, 0.99, 0.999)  # the size that each of them takes stands in coverage.json


def check(config: KeepSetConfig, inputs: Mapping[str, Path]) -> None:
    """Refuse an impossible size or script in about a second, so that it can be asked before a chain starts.

    Raises:
        RecipeError: unknown script; a size below the fixed part or above the vocabulary.
    """
    vocab_size = find_embedding(inputs["verifier"]).vocab_size
    fixed = _fixed_part(inputs["verifier"], open_tokenizer(inputs["verifier"]), vocab_size, config.scripts)
    release_freed()
    if config.size is not None:
        require_room(config.size, fixed, vocab_size)


def build(config: KeepSetConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Write the files of the module's list; the coverage is also the stage's metrics."""
    tokenizer = open_tokenizer(inputs["verifier"])
    embedding = find_embedding(inputs["verifier"])
    fixed = _fixed_part(inputs["verifier"], tokenizer, embedding.vocab_size, config.scripts)
    if config.size is not None:
        require_room(config.size, fixed, embedding.vocab_size)
    counts = _count_conversations(
        config, inputs, tokenizer.backend, embedding.vocab_size, out_dir / COUNTING_FILE, progress
    )
    del tokenizer
    release_freed()
    answers = count_answers(inputs[CAPTURE], embedding.vocab_size)
    weighted = counts.counted + weighted_answers(answers, config.answers_weight or 0.0)
    ranking = rank(weighted, fixed.union, fixed.placeholders, fixed.suppressed)
    size = config.size or size_for(config.coverage, ranking, counts)
    require_counted_tokens(size, ranking, counts)
    keepset = KeepSet(np.sort(ranking.order[:size]), embedding.vocab_size)
    save_keepset(out_dir / KEEPSET_FILE, keepset, embedding, config.verifier_dtype)
    coverage = describe(keepset, fixed, counts, answers, weighted)
    if config.answers_weight:
        coverage["counted_answers"] = {
            "tokens": sum(int(answers[split].sum()) for split in answers.keys() & COUNTED_ANSWERS),
            "weight": config.answers_weight,
        }
    coverage["sizes_for_held_out_share"] = sizes_by_share(ranking, counts)
    coverage["data_files"] = {name: list_files(inputs[name]).counts for name in ("conversations", *PROMPT_SETS)}
    for remark in remarks(config, coverage):
        progress.note(remark)
    _write_reports(out_dir, coverage, ranking, counts)
    return coverage


def require_counted_tokens(size: int, ranking: Ranking, counts: TokenCounts) -> None:
    """What fills a keep set beyond its fixed part is chosen by counts: there must be some.

    Raises:
        RecipeError: no counted text, or none with a token outside the fixed part.
    """
    if size <= ranking.fixed or ranking.known > ranking.fixed:
        return
    tokens = int(counts.counted.sum())
    raise RecipeError(
        f"$.data.conversations: {len(counts.counted_ids):,} conversations were counted ({len(counts.held_out_ids):,} "
        f"held out, {len(counts.excluded_ids):,} that calibrate or validate), and none of their {tokens:,} tokens is "
        f"outside the {ranking.fixed:,} that are always kept: nothing says which {size - ranking.fixed:,} to take",
        "give more conversations, in languages that the tokenizer knows, with the assistant's answers in them",
    )


def remarks(config: KeepSetConfig, coverage: Mapping[str, Any]) -> list[str]:
    """What the figures of a keep set do not say by themselves."""
    found, counted = [], coverage["conversations"]["counted"]
    if unseen := coverage["parts"]["of_them_unseen"]:
        found.append(
            f"{unseen:,} kept tokens never occur in the {counted:,} counted conversations"
            f"{' or the counted answers' if config.answers_weight else ''}: these need no more than "
            f"{coverage['size'] - unseen:,}; count more conversations or lower $.keepset.size"
        )
    if config.held_out_share and not coverage["held_out"]["tokens"]:
        found.append(
            f"the {coverage['conversations']['held_out']:,} held-out conversations hold no text: what the keep set "
            "covers is not known; count more conversations or raise $.keepset.held_out_share"
        )
    return found


def _fixed_part(verifier: Path, tokenizer: TokenizerFile, vocab_size: int, scripts: tuple[str, ...]) -> FixedPart:
    """What is always kept; nothing that the checkpoint never generates."""
    return find_fixed_part(tokenizer, vocab_size, scripts, checkpoint_suppressed_ids(verifier, vocab_size))


def size_for(coverage: float | None, ranking: Ranking, counts: TokenCounts) -> int:
    """The smallest size that keeps the share `coverage` of the held-out tokens.

    Raises:
        RecipeError: nothing was held out, or no size of known tokens reaches it.
    """
    assert coverage is not None  # `core.recipe_sections.check_keepset_choice`: where there is no size
    held_out = len(counts.held_out_ids)
    if not counts.held_out.any():
        raise RecipeError(
            f"$.keepset.coverage is {coverage}, but the {held_out} held-out conversations hold no assistant's text",
            "count more conversations, raise $.keepset.held_out_share, or give $.keepset.size",
        )
    shares = kept_share(ranking, counts.held_out)
    size = smallest_size(ranking, shares, coverage)
    if size is None:
        raise RecipeError(
            f"$.keepset.coverage is {coverage}, but all {ranking.known:,} tokens that are always kept or occur in the "
            f"{len(counts.counted_ids):,} counted conversations cover {shares[ranking.known]:.5f} of the held-out text",
            f"set it to at most {np.floor(1e4 * shares[ranking.known]) / 1e4:.4f}, count more conversations, "
            "or give $.keepset.size",
        )
    return size


def sizes_by_share(ranking: Ranking, counts: TokenCounts) -> dict[str, int | None]:
    """By share of the held-out tokens: the smallest size that keeps it; None where no known tokens do."""
    if not counts.held_out.any():
        return {}
    shares = kept_share(ranking, counts.held_out)
    return {str(share): smallest_size(ranking, shares, share) for share in SHOWN_SHARES}


def save_keepset(path: Path, keepset: KeepSet, embedding: EmbeddingSource, dtype: Dtype) -> None:
    """Write the ids with their rows of the 8-bit table (`core.keepset.KEEPSET_FILE`) as a stream: 242 MB."""
    n = len(keepset)
    declared = {
        "ids": Declared("int32", (n,)),
        "table": Declared("int8", (n, embedding.hidden)),
        "table_scale": Declared("float32", (n,)),
    }
    with TensorWriter(path, declared, {"vocab_size": str(keepset.vocab_size)}) as writer:
        writer.put("ids", keepset.ids)
        for first, block in quantized_blocks(embedding, keepset.ids, dtype):
            writer.put("table", block.integers, first)
            writer.put("table_scale", block.scale, first)


def _write_reports(out_dir: Path, coverage: dict[str, Any], ranking: Ranking, counts: TokenCounts) -> None:

    rows = curve(ranking, counts.held_out, counts.counted, coverage["size"])
    ids = {
        "counted": counts.counted_ids,
        "held_out": counts.held_out_ids,
        "excluded": counts.excluded_ids,
    }
    for name, content in ((COVERAGE_FILE, coverage), (CURVE_FILE, rows), (CONVERSATIONS_FILE, ids)):
        write_json(out_dir / name, content)
    write_picture(out_dir / PICTURE_FILE, coverage_picture(rows, coverage["size"]))


def describe(
    keepset: KeepSet,
    fixed: FixedPart,
    counts: TokenCounts,
    answers: Mapping[str, np.ndarray],
    weighted: np.ndarray,
) -> dict[str, Any]:
    """What the keep set consists of, and how much text it covers: held-out conversations, and answers [V] by split.

    weighted: what it was chosen by [V].
    """
    kept = keepset.rows(np.arange(keepset.vocab_size)) != MISSING
    frequent = kept & ~fixed.union
    return {
        "size": len(keepset),
        "vocab_size": keepset.vocab_size,
        "digest": keepset.digest,
        "parts": {
            **fixed.sizes,
            "frequent": int(frequent.sum()),
            "of_them_unseen": int((frequent & (weighted == 0)).sum()),
        },
        "conversations": {
            "counted": len(counts.counted_ids),
            "held_out": len(counts.held_out_ids),
            "excluded": len(counts.excluded_ids),
        },
        "held_out": share_outside(counts.held_out, kept),
        "answers": {split: share_outside(total, kept) for split, total in answers.items()},
    }


def share_outside(counts: np.ndarray, kept: np.ndarray) -> dict[str, float | int | None]:
    """Tokens counted [V], and the share of them inside and outside kept [V]; None where nothing was counted."""
    tokens = int(counts.sum())
    if not tokens:
        return {"tokens": 0, "kept_share": None, "outside_share": None}
    inside = int(counts[kept].sum())
    return {"tokens": tokens, "kept_share": inside / tokens, "outside_share": (tokens - inside) / tokens}


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


def weighted_answers(answers: Mapping[str, np.ndarray], weight: float) -> np.ndarray:
    """[V]: occurrences in the answers to the calibration prompts, `weight` for each."""
    total: np.ndarray = np.sum([answers[split] for split in answers.keys() & COUNTED_ANSWERS], axis=0)
    return weight * total


def _count_conversations(
    config: KeepSetConfig,
    inputs: Mapping[str, Path],
    tokenizer: Tokenizer,
    vocab_size: int,
    state: Path,
    progress: Progress,
) -> TokenCounts:
    """Count the recipe's conversations without those of the calibration and validation sets."""
    state.parent.mkdir(exist_ok=True)
    path = inputs["conversations"]
    total = conversation_count(path)
    excluded = identities(chain(*(read_conversations(inputs[name]) for name in PROMPT_SETS)))
    return count_tokens(
        read_conversations(path),
        tokenizer,
        vocab_size,
        excluded,
        config.held_out_share,
        lambda done: progress.step("conversations counted", done, total),
        state,
    )
