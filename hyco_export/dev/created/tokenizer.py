"""Tokenizers of created models: a real one filled up to the model's rows with tokens that no text contains, and the
embedded family's SLM with another vocabulary, which tries the token bridge on a trained model.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file, save_file

from hyco_export.core.files import CHECKPOINTS
from hyco_export.core.recipe_loading import embedded_recipe
from hyco_export.dev.created.recipe import RECIPE_FILE, new_folder
from hyco_export.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def write_tokenizer(source: Path, folder: Path, vocab_size: int) -> None:
    """Copy the tokenizer of `source` into `folder`, with filler entries up to `vocab_size`.

    No merge leads to a filler: encoding never gives one, decoding gives its name.

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


# ---- the embedded SLM with another vocabulary

SPECIALS = {"<bos>": "<|begin|>", "<eos>": "<|end|>", "<|turn>": "<|im_start|>", "<turn|>": "<|im_end|>"}
DROPPED_SHARE = 0.3  # of the merges
SEED = 20261011
ROW_TENSORS = ("embed_tokens", "lm_head")  # parts of the names of tensors with a row for each token
IDS_IN_CONFIG = ("bos_token_id", "eos_token_id", "pad_token_id")


def create_respelled(out: Path) -> Path:
    """Write the SLM and a recipe for it beside the embedded verifier and head into the new folder `out`.

    Returns:
        The recipe's path.

    Raises:
        CheckpointError: the folder exists.
    """
    with new_folder(out) as partial:
        _write_slm(CHECKPOINTS / "slm", partial / "slm")
        (partial / RECIPE_FILE).write_text(_recipe(), encoding="utf-8")
    return out / RECIPE_FILE


def _write_slm(source: Path, folder: Path) -> None:
    folder.mkdir()
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    kept = _respell(tokenizer)
    _write_json(folder / "tokenizer.json", tokenizer)
    named = (source / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(_renamed(named))
    for name in ("config.json", "generation_config.json"):
        _write_json(folder / name, _respelled_config(json.loads((source / name).read_text()), kept))
    tensors = {
        name: np.ascontiguousarray(array[kept]) if _has_rows(name, array) else array
        for name, array in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _respell(tokenizer: dict[str, Any]) -> np.ndarray:
    """Drop merges, rename the specials and renumber all entries of a tokenizer.json in place.

    Returns:
        The old ids [V] of the entries that are left, in the order of their new ids.
    """
    model, vocab = tokenizer["model"], tokenizer["model"]["vocab"]
    last = round(len(model["merges"]) * (1 - DROPPED_SHARE))
    dropped = {"".join(pair) for pair in model["merges"][last:]} - {"".join(pair) for pair in model["merges"][:last]}
    model["merges"] = model["merges"][:last]
    names = np.array([name for name in vocab if name not in dropped], dtype=object)
    names = names[np.random.default_rng(SEED).permutation(len(names))]
    kept = np.array([vocab[name] for name in names])
    ids = {SPECIALS.get(name, name): new for new, name in enumerate(names)}
    model["vocab"], model["unk_token"] = ids, SPECIALS.get(model["unk_token"], model["unk_token"])
    for token in tokenizer["added_tokens"]:
        token["content"] = SPECIALS.get(token["content"], token["content"])
        token["id"] = ids[token["content"]]
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    tokenizer["post_processor"] = None
    return kept


def _renamed(text: str) -> str:
    for name, other in SPECIALS.items():
        text = text.replace(json.dumps(name), json.dumps(other))
    return text


def _respelled_config(config: dict[str, Any], kept: np.ndarray) -> dict[str, Any]:
    new_ids = {int(old): new for new, old in enumerate(kept)}
    for key in IDS_IN_CONFIG:
        held = config[key]
        config[key] = [new_ids[one] for one in held] if isinstance(held, list) else new_ids[held]
    sizes = {key: len(kept) for key in config if key.startswith("vocab_size")}
    return config | sizes


def _has_rows(name: str, array: np.ndarray) -> bool:
    return array.ndim > 1 and any(part in name for part in ROW_TENSORS)


def _recipe() -> str:
    content = yaml.safe_load(embedded_recipe().read_text(encoding="utf-8"))
    content["name"] = "tiny-respelled"
    content["models"]["slm"]["model"] = "slm"
    content["slm"]["bridge"] = {"specials": SPECIALS}
    return yaml.safe_dump(content, sort_keys=False)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
