"""Names in a run folder: one artifact per stage, and the files that one part writes and another reads.

Knows names alone; what a file holds is said where it is written.
"""

CAPTURE = "capture"
QAT_HEAD = "qat-head"
KEEPSET = "build-keepset"
HEAD = "convert-head"
SLM = "convert-slm"
COMPILE = "compile"

FINAL_NORM_FILE = "final_norm.safetensors"  # in CAPTURE
HEAD_SAMPLES_FILE = "head_samples.safetensors"  # in HEAD
SLM_OPENING_FILE = "slm_opening.safetensors"  # in SLM, where the spec names an opening token
ENCODINGS_FILE = "encodings.json"  # in HEAD and SLM
SLM_SAMPLES_FILE = "slm_samples.safetensors"  # in SLM


def artifact_name(stage: str, target: str | None = None) -> str:
    """Folder of a stage's artifact; with the target's name where the target changes the bytes."""
    return stage if target is None else f"{stage}@{target}"
