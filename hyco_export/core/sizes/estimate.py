"""What an estimate says of a stage, the work it is made from, and the constants that were measured.

Memory is resident memory as the kernel counts it (files that are mapped and read included), of the stage's process and
its child processes at one moment; manifests record the peak of each.
"""

import msgspec

BASE_BYTES = 920_000_000  # of a process with torch and transformers, before it holds a model
TRAINING_BASE_BYTES = 1_000_000_000  # with aimet-torch and onnx besides
FLOAT_BYTES = 4
HEADER_BYTES = 700  # of a safetensors file with a handful of tensors
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Estimate(msgspec.Struct, frozen=True):
    """One stage. Tokens are those that pass through a model and are stored; 0 where that says nothing."""

    disk_bytes: int
    ram_bytes: int
    tokens: int = 0
    binary_bytes: int = 0


class Split(msgspec.Struct, frozen=True):
    """Sequences of one kind: `prompt_tokens` of all prompts together, `answer_tokens` of one answer."""

    sequences: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sequences * self.answer_tokens


class Work(msgspec.Struct, frozen=True):
    """What the recipe's data amount to."""

    calibration: Split
    sampled: Split
    validation: Split
    conversations: int  # those of the keep set, counted or not

    @property
    def splits(self) -> tuple[Split, ...]:
        return (self.calibration, self.sampled, self.validation)

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits)

    @property
    def sequences(self) -> int:
        return sum(split.sequences for split in self.splits)
