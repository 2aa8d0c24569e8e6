"""A tokenizer with as many entries as a created model has rows: a real one, filled up with tokens no text contains."""

import json
import shutil
from pathlib import Path

from hyco_export.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def write_tokenizer(source: Path, folder: Path, vocab_size: int) -> None:
    """Copy the tokenizer of `source` into `folder`, with filler entries up to `vocab_size`.

    A filler has no merges that lead to it: encoding never gives one, decoding gives its name.

    Raises:
        CheckpointError: no fast BPE tokenizer there, or one with more entries than the model has rows.
    """
    content = _read(source)
    vocabulary: dict[str, int] = content["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in content.get("added_tokens", ()))}
    if max(taken) >= vocab_size:
        raise CheckpointError(
            f"the tokenizer of {source} has ids up to {max(taken):,}, the model {vocab_size:,} rows",
            "give a smaller tokenizer or a larger --scale",
        )
    vocabulary |= {filler(token_id): token_id for token_id in range(vocab_size) if token_id not in taken}
    (folder / TOKENIZER_FILE).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def filler(token_id: int) -> str:
    """The name of a filler entry."""
    return f"⟨{token_id}⟩"


def _read(source: Path) -> dict:
    try:
        content = json.loads((source / TOKENIZER_FILE).read_text(encoding="utf-8"))
        if content["model"]["type"] != "BPE":
            raise KeyError("model.type BPE")
        return content
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{source / TOKENIZER_FILE} is not a fast BPE tokenizer: {error}", "give a folder with a tokenizer.json"
        ) from error
