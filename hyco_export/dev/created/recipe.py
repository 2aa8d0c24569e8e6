"""The recipe that is written beside created checkpoints: the paper's settings, with fewer prompts and steps."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyco_export.errors import CheckpointError
from hyco_export.models.families.released_configs import Scale

RECIPE_FILE = "recipe.yaml"
TEMPLATE = """\
# Created checkpoints at scale `{scale}`: random weights in real shapes. Sizes, times and memory are those to expect of
# real ones; answers and agreements mean nothing. Fields that are not here have the paper's values.
name: created-{scale}
target: sm8850

models:
  verifier: {{model: verifier, dtype: bfloat16}}
  head: {{model: head, dtype: bfloat16}}
  slm: {{model: slm, dtype: float32}}

data:
  calibration: calibration.jsonl  # {prompts} prompts; the paper has 60
  validation: validation.jsonl
  conversations: "embedded:conversations.jsonl"

capture:
  max_new_tokens: {new_tokens}  # paper: 1,024
  validation_max_new_tokens: {new_tokens}  # paper: 512

qat:
  clip_ratio_count: {clip_ratios}
  warmup_steps: 1
  steps: {qat_steps}  # paper: 100
  accumulation: 1

keepset:
  size: {keepset}

head:
  window: {window}

slm:
  prefill_rows: {prefill_rows}
  ring: {window}
  sliding_ring: {sliding_ring}

compile:  # random logits are near-ties: rounding alone decides between them
  max_outside_share: 1.0
  min_id_agreement: 0.0

validation:
  prompts: {prompts}
  emulator_prompts: 1
  gates: {{min_head_agreement: 0.0, min_slm_agreement: 0.0, min_head_tokens: 0.0}}
"""


def recipe_text(scale: Scale) -> str:
    """YAML that runs the checkpoints in the recipe's own folder."""
    run = scale.run
    return TEMPLATE.format(
        scale=scale.name,
        prompts=run.prompts,
        new_tokens=run.new_tokens,
        qat_steps=run.qat_steps,
        clip_ratios=run.clip_ratios,
        keepset=run.keepset,
        window=run.window,
        sliding_ring=run.window // 2,
        prefill_rows=run.prefill_rows,
    )


# ---- a new folder, written beside its place and renamed: it exists whole or not at all

PARTIAL_SUFFIX = ".partial"


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """The folder to write into: it becomes `out` at the end of the block, and is removed if the block raises.

    Raises:
        CheckpointError: `out` exists.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already", "give a new folder")
    partial = out.with_name(f".{out.name}{PARTIAL_SUFFIX}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
