"""A checkpoint's tokenizer as the `tokenizers` library reads it: a third of the memory of transformers' own loading.

Knows files and which entries the checkpoint calls special; not what an entry means (`nn.vocabulary`), no chat template.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from hyco_export.errors import CheckpointError

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
TOKEN_KEY_END = "_token"  # bos_token, eos_token, image_token, ...
TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class TokenizerFile:
    """The tokenizer, and the names that the checkpoint's configuration calls special, besides the marks in the file."""

    backend: Tokenizer
    special_names: frozenset[str] = frozenset()


def open_tokenizer(folder: Path) -> TokenizerFile:
    """The tokenizer of a checkpoint folder.

    Raises:
        CheckpointError: no tokenizer.json there, or not one.
    """
    path, config = folder / TOKENIZER_NAME, folder / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {TOKENIZER_NAME}", "save its fast tokenizer there: save_pretrained")
    try:
        backend = Tokenizer.from_file(str(path))
        stated = msgspec.json.decode(config.read_bytes(), type=dict[str, Any]) if config.is_file() else {}
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"tokenizer of {folder} cannot be read: {error}", "fetch or save it again") from error
    return TokenizerFile(backend, frozenset(_special_names(stated)))


def _special_names(config: dict[str, Any]) -> Iterator[str]:
    """Texts of the tokens that a tokenizer_config.json names; each is a string, or a mapping with `content`."""
    tokens = [value for key, value in config.items() if key.endswith(TOKEN_KEY_END)]
    for key in TOKEN_LISTS:
        listed = config.get(key) or []
        tokens += listed.values() if isinstance(listed, dict) else listed
    for token in tokens:
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            yield content
