"""A GGUF file as an ordinary checkpoint folder: transformers reads it once, the rest of the package never sees GGUF.

The folder is kept in the user's cache under the file's digest; weights are dequantised to the recipe's dtype. Knows
files; what the model is, transformers says.
"""

import os
import shutil
import tempfile
from pathlib import Path

from hyco_export.core.artifact import file_digest
from hyco_export.core.recipe import Dtype
from hyco_export.errors import CheckpointError, first_line

CACHE_FOLDER = "hyco-export"
DIGEST_LETTERS = 16  # of the file's sha256 in the folder's name: 64 bits


def imported_gguf(path: Path, dtype: Dtype) -> Path:
    """The checkpoint folder of a GGUF file, written at the first call; a kill leaves none.

    Raises:
        CheckpointError: no such file, or transformers cannot read it.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", "correct gguf_file in $.models")
    folder = import_folder(path, dtype)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        build = Path(tempfile.mkdtemp(prefix=".gguf-", dir=folder.parent))
        try:
            _convert(path, dtype, build)
            build.rename(folder)
        finally:
            shutil.rmtree(build, ignore_errors=True)
    return folder


def import_folder(path: Path, dtype: Dtype) -> Path:
    """Where the checkpoint folder of a GGUF file is, or will be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / CACHE_FOLDER
    return cache / f"{path.stem}-{file_digest(path)[:DIGEST_LETTERS]}-{dtype}"


def _convert(path: Path, dtype: Dtype, out_dir: Path) -> None:
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from hyco_export.nn.dtypes import TORCH_DTYPES

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=TORCH_DTYPES[dtype])
    except (OSError, ValueError, KeyError, TypeError, ImportError, NotImplementedError) as error:
        raise CheckpointError(
            f"GGUF file {path} cannot be read: {first_line(error)}", "give the checkpoint in safetensors instead"
        ) from error
    tokenizer.save_pretrained(out_dir)
    config.architectures, config.dtype = [type(model).__name__], dtype
    config.save_pretrained(out_dir)
    tied = {name for name in model.all_tied_weights_keys if config.tie_word_embeddings}
    stored = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    save_torch_state_dict(stored, out_dir)  # the model's own saving refuses what came from GGUF, dequantised or not
