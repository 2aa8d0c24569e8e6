"""Writes a created family into a new folder: three checkpoints, prompts, and the recipe that runs them.

Everything is written into a folder beside the wanted one, which is renamed at the end: a family exists whole or not at
all. Shapes are those of a `Scale`.
"""

from collections.abc import Callable
from pathlib import Path

from hyco_export.core.files import CHECKPOINTS, resource_path
from hyco_export.dev.created.models import write_head, write_verifier
from hyco_export.dev.created.packed_slm import write_packed_slm
from hyco_export.dev.created.recipe import RECIPE_FILE, new_folder, recipe_text
from hyco_export.dev.created.tokenizer import write_tokenizer
from hyco_export.models.families.released_configs import Scale, e2b_config, small_config

DEFAULT_SEED = 20261011
PROMPTS = {"calibration": "calibration_data/train.jsonl", "validation": "calibration_data/validation.jsonl"}

Progress = Callable[[str, float], None]
"""Called with the name of the part and the share of it that is done."""


def create_family(out: Path, scale: Scale, tokenizer: Path | None, seed: int, on_progress: Progress) -> None:
    """Write verifier, head, SLM, prompts and recipe into the new folder `out`.

    Args:
        tokenizer: folder with a fast tokenizer and chat template, filled up to the vocabulary; None takes the embedded
            family's.
        seed: equal seeds give equal bytes.

    Raises:
        CheckpointError: the folder exists, or the tokenizer cannot be used.
    """
    with new_folder(out) as partial:
        _write_parts(partial, scale, tokenizer or CHECKPOINTS / "verifier", seed, on_progress)


def _write_parts(folder: Path, scale: Scale, tokenizer: Path, seed: int, on_progress: Progress) -> None:
    verifier, head, slm = (folder / name for name in ("verifier", "head", "slm"))
    slm.mkdir()
    write_tokenizer(tokenizer, slm, scale.vocab_size)  # first: a wrong one is refused before gigabytes are written
    write_verifier(verifier, scale, seed, lambda share: on_progress("verifier", share))
    write_tokenizer(tokenizer, verifier, scale.vocab_size)
    write_head(head, scale, seed + 1, lambda share: on_progress("head", share))
    size = scale.slm
    if size.narrow:
        config = small_config(scale.vocab_size, size.layers, size.shared, size.head_dims)
    else:
        config = e2b_config(size.layers, size.shared, scale.vocab_size)
    write_packed_slm(slm, config, None, seed + 2, lambda share: on_progress("SLM", share))
    for name, source in PROMPTS.items():
        lines = resource_path(source).read_bytes().splitlines(keepends=True)[: scale.run.prompts]
        (folder / f"{name}.jsonl").write_bytes(b"".join(lines))
    (folder / RECIPE_FILE).write_text(recipe_text(scale), encoding="utf-8")
