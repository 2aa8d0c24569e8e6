"""Checkpoint folders: found on disk or fetched from the Hub, and identified by digests of their contents."""

import hashlib
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread

from huggingface_hub import constants, get_session, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hyco_export.core.artifact import file_digest
from hyco_export.core.files import EMBEDDED_PREFIX, locate
from hyco_export.core.recipe import Checkpoint
from hyco_export.errors import CheckpointError
from hyco_export.models.gguf import import_folder, imported_gguf
from hyco_export.models.tensor_files import CONFIG_NAME, weight_files

HASHED_PATTERNS = ("*.json", "*.jinja", "*.model")  # configs, templates, vocabularies, beside the weights
FETCHED_PATTERNS = ["*.safetensors", *HASHED_PATTERNS, "*.txt"]
SNAPSHOTS_FOLDER = "snapshots"  # in the Hub's cache: a folder for each commit, with links into BLOBS_FOLDER
BLOBS_FOLDER = "blobs"  # in the Hub's cache: the files; the name of a large one is the sha256 of its contents
HUB_PATIENCE_S = 1.5  # for the Hub's first answer, where a plan can do without
SHA256 = re.compile("[0-9a-f]{64}")


def checkpoint_folder(checkpoint: Checkpoint, recipe_folder: Path | None = None) -> Path:
    """The folder with the checkpoint's files; a Hub id is fetched into the Hub's cache first, a GGUF file imported.

    Raises:
        CheckpointError: no such folder, or the Hub refuses it; the hint is the command that helps.
    """
    found = locate(checkpoint.model, recipe_folder)
    if checkpoint.gguf_file is not None:
        folder = found or fetch(checkpoint.model, checkpoint.revision, [checkpoint.gguf_file])
        return imported_gguf(folder / checkpoint.gguf_file, checkpoint.dtype)
    if found is None:
        return fetch(checkpoint.model, checkpoint.revision, FETCHED_PATTERNS)
    return require_checkpoint(found)


def require_checkpoint(folder: Path) -> Path:
    """`folder`, if it holds a checkpoint.

    Raises:
        CheckpointError: it does not exist or has no config.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(
            f"checkpoint folder {folder} has no {CONFIG_NAME}", "give a folder written by save_pretrained, or a Hub id"
        )
    return folder


def require_hub_id(model: str) -> None:
    """Raises CheckpointError: the reference is the path of a folder, and cannot be fetched."""
    if model.startswith((EMBEDDED_PREFIX, "/", ".")):
        raise CheckpointError(f"checkpoint {model!r} does not exist", "correct $.models in the recipe")


def download_command(hub_id: str, revision: str | None) -> str:
    """The command that fetches a Hub repository."""
    return f"hf download {hub_id}" + (f" --revision {revision}" if revision else "")


def fetch(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    """The snapshot folder of a Hub repository with its files of these patterns, from the cache or downloaded.

    Raises:
        CheckpointError: gated, unknown, or the Hub cannot be reached.
    """
    require_hub_id(hub_id)
    download = download_command(hub_id, revision)
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{hub_id} is gated and this machine has no access",
            f"accept its terms at https://huggingface.co/{hub_id}, then run: hf auth login",
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"{hub_id!r} is neither a folder here nor a Hub repository (revision {revision or 'main'})",
            f"correct $.models in the recipe; if the repository is private, run: hf auth login, then: {download}",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{hub_id} is not on this machine and the Hub cannot be reached",
            f"with a network, run: {download}",
        ) from error


def local_checkpoint(checkpoint: Checkpoint, recipe_folder: Path | None) -> Path | None:
    """The folder of a checkpoint on this machine, in the Hub's cache or elsewhere.

    None: it must be fetched, or imported, first (`next_step`).

    Raises:
        CheckpointError: a local path without a checkpoint.
    """
    found = locate(checkpoint.model, recipe_folder)
    if checkpoint.gguf_file is not None:
        file = _gguf_file(checkpoint, found)
        folder = None if file is None else import_folder(file, checkpoint.dtype)
        return folder if folder and folder.is_dir() else None
    if found is not None:
        return require_checkpoint(found)
    require_hub_id(checkpoint.model)
    try:
        cached = snapshot_download(checkpoint.model, revision=checkpoint.revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    try:
        weight_files(require_checkpoint(Path(cached)))
    except CheckpointError:
        return None  # a snapshot of which a part was fetched
    return Path(cached)


def next_step(checkpoint: Checkpoint, recipe_folder: Path | None) -> str:
    """How to get a checkpoint for which `local_checkpoint` gives None."""
    found = locate(checkpoint.model, recipe_folder)
    if checkpoint.gguf_file is not None and _gguf_file(checkpoint, found) is not None:
        return f"{checkpoint.gguf_file} is here: the first build imports it"
    if found is not None:
        return f"put {checkpoint.gguf_file} there"
    return f"run: {download_command(checkpoint.model, checkpoint.revision)}"


def _gguf_file(checkpoint: Checkpoint, found: Path | None) -> Path | None:
    """The GGUF file in the folder that was found or in the Hub's cache; None: it is in neither."""
    assert checkpoint.gguf_file is not None
    if found is not None:
        path = found / checkpoint.gguf_file
        return path if path.is_file() else None
    require_hub_id(checkpoint.model)
    cached = try_to_load_from_cache(checkpoint.model, checkpoint.gguf_file, revision=checkpoint.revision)
    return Path(cached) if isinstance(cached, str) else None


def fetch_config(hub_id: str, revision: str | None) -> Path | None:
    """A folder with the config of a Hub repository, without its weights; None: the Hub does not give it."""
    try:
        path = hf_hub_download(hub_id, CONFIG_NAME, revision=revision, local_files_only=not hub_answers())
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        return None
    return Path(path).parent


@cache
def hub_answers() -> bool:
    """Does the Hub answer within HUB_PATIENCE_S? Its own client tries a call for half a minute before it gives up."""
    if constants.HF_HUB_OFFLINE:
        return False
    answered: list[bool] = []

    def ask() -> None:
        with suppress(Exception):  # no network has as many kinds of errors as there are proxies
            get_session().head(constants.ENDPOINT, timeout=HUB_PATIENCE_S)
            answered.append(True)

    asking = Thread(target=ask, daemon=True)  # a name server that is silent obeys no time limit
    asking.start()
    asking.join(HUB_PATIENCE_S)
    return bool(answered)


def checkpoint_digest(folder: Path) -> str:
    """sha256 over names and contents of a checkpoint's weights, configs and vocabularies, in the order of their names.

    Raises:
        CheckpointError: the folder is not a checkpoint, or lacks a file with weights.
    """
    weights = {path.name for path in weight_files(require_checkpoint(folder))}
    others = {path.name for pattern in HASHED_PATTERNS for path in folder.glob(pattern)}
    return _digest(folder, sorted(weights | others))


def tokenizer_digest(folder: Path) -> str:
    """sha256 of `tokenizer.json`: equal digests give equal ids for every text.

    Raises:
        CheckpointError: the folder has no fast tokenizer.
    """
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json", "save its fast tokenizer there: save_pretrained")
    return _digest(folder, ["tokenizer.json"])


def checkpoint_origin(checkpoint: Checkpoint, folder: Path) -> str:
    """Where a checkpoint came from: `<Hub id>@<commit>` of a snapshot, else the recipe's reference."""
    if folder.parent.name != SNAPSHOTS_FOLDER:
        return checkpoint.model
    return f"{checkpoint.model}@{folder.name}"


def _digest(folder: Path, names: list[str]) -> str:
    total = hashlib.sha256()
    for name in names:
        total.update(f"{name}:{_content_digest(folder / name)}\n".encode())
    return total.hexdigest()


def _content_digest(path: Path) -> str:
    """sha256 of a file, hex; that of a large file in the Hub's cache is its name, so that 50 GB are not read."""
    stored = path.resolve()
    if path.is_symlink() and stored.parent.name == BLOBS_FOLDER and SHA256.fullmatch(stored.name):
        return stored.name
    return file_digest(path)
