"""The measured coefficients behind the estimates of `--dry-run`: one table with units and conditions.

`hyco-export dev fit-estimates` measures created families and prints the values that fit this machine and these
libraries best.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

FULL = "created checkpoints at scale full, x86-64, two cores"
SMALL = "created checkpoints at scale small, x86-64, two cores"
GEMMA = "Gemma 3 270M from GGUF, unquantised, 8 bits, x86-64, two cores"
TINY = "the embedded family's run"


@dataclass(frozen=True)
class Measured:
    """What a coefficient is: its unit, what it counts, and the condition under which it was measured."""

    unit: str
    meaning: str
    condition: str


class Coefficients(msgspec.Struct, frozen=True, kw_only=True):
    """One field a coefficient; memory is resident memory as the kernel counts it."""

    base: Annotated[
        float, Measured("bytes of memory", "a process with torch and transformers, before it holds a model", SMALL)
    ] = 920e6
    training_base: Annotated[
        float, Measured("bytes of memory", "the same process with aimet-torch and onnx besides", SMALL)
    ] = 1e9
    file_header: Annotated[
        float, Measured("bytes of disk per file", "header of a safetensors file with a handful of tensors", FULL)
    ] = 700
    # capture
    answer_token: Annotated[
        float, Measured("bytes of disk per token", "a token in answers.jsonl: its id and its text", TINY)
    ] = 8
    golden_tree: Annotated[
        float, Measured("bytes of disk per tree", "JSON of 50 nodes and 24 draws under five samplings", TINY)
    ] = 70e3
    # qat-head
    curve_line: Annotated[float, Measured("bytes of disk per step", "one training step in curve.jsonl", TINY)] = 115
    reports: Annotated[float, Measured("bytes of disk", "the JSON files beside the head's tensors", FULL)] = 12e3
    training_logit: Annotated[
        float,
        Measured(
            "bytes of memory per logit", "one logit of a pass: teacher's, student's, log-softmaxes, gradients", FULL
        ),
    ] = 32
    trained_weight: Annotated[
        float,
        Measured(
            "bytes of memory per weight",
            "master, gradient, two moments, fake-quantised copy in float32; three variants in int8",
            FULL,
        ),
    ] = 23
    # build-keepset
    coverage_curve: Annotated[float, Measured("bytes of disk", "the coverage curve with its picture", FULL)] = 23e3
    conversation: Annotated[
        float, Measured("bytes of disk per conversation", "the line with a conversation's id", FULL)
    ] = 40
    vocabulary_entry: Annotated[
        float, Measured("bytes of memory per entry", "an entry of the tokenizer, and what is counted and ranked", FULL)
    ] = 530
    # convert-head
    head_layer_step: Annotated[
        float, Measured("bytes of disk per layer and step", "nodes, names and encodings in the head's graph", FULL)
    ] = 38e3
    graph_copies: Annotated[
        float,
        Measured("bytes of memory per byte", "the graph while it is made: initializers, serialised, linted", FULL),
    ] = 5
    # convert-slm
    slm_layer: Annotated[
        float, Measured("bytes of disk per layer", "nodes, names and encodings in an SLM graph", FULL)
    ] = 53e3
    slm_encodings: Annotated[
        float, Measured("bytes of disk per layer", "encodings and quality of a layer in the JSON files", FULL)
    ] = 7.5e3
    mapped_file: Annotated[
        float,
        Measured("bytes of memory per byte", "weights, tables and graphs, which are mapped and partly copied", FULL),
    ] = 1.2
    output_weight: Annotated[
        float, Measured("bytes of memory per weight", "the output layer: floats of the pass and their copies", FULL)
    ] = 10
    rounded_table: Annotated[
        float, Measured("bytes of memory per weight", "tables of an unquantised SLM while they are rounded", GEMMA)
    ] = 8
    # compile
    cpu_weight: Annotated[
        float, Measured("bytes of memory per weight", "an 8-bit weight on the CPU: its float, and that packed", GEMMA)
    ] = 8
    head_binary: Annotated[
        float, Measured("bytes of disk per byte", "a context binary beside the head's weights", FULL)
    ] = 1.04
    head_binary_step: Annotated[
        float, Measured("bytes of disk per layer and step", "the head's instructions in its context binary", FULL)
    ] = 56e3
    slm_binary: Annotated[
        float, Measured("bytes of disk per byte", "a context binary beside the SLM's weights", FULL)
    ] = 1.018
    slm_binary_layer: Annotated[
        float, Measured("bytes of disk per layer", "the SLM's instructions in its context binary", FULL)
    ] = 58e3
    compiler_base: Annotated[float, Measured("bytes of memory", "the compiling process before its graph", SMALL)] = (
        170e6
    )
    compiler: Annotated[
        float, Measured("bytes of memory per byte", "the compiler beside the binary that it makes", FULL)
    ] = 5.8
    compile_reports: Annotated[
        float, Measured("bytes of disk", "contexts.json, parity.json and the EPContext models", FULL)
    ] = 60e3


MEASURED = Coefficients()


def descriptions() -> dict[str, Measured]:
    """What each field is, by its name."""
    return {
        field.name: next(part for part in field.type.__metadata__ if isinstance(part, Measured))
        for field in msgspec.structs.fields(Coefficients)
    }
