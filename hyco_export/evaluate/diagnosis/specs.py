"""Do specs, graphs, binaries and checkpoints agree on encodings, spans and rotary frequencies?

Server, host and graph read these figures from different files; where two differ, drafts go wrong silently.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import onnx
from transformers import PreTrainedTokenizerFast

from hyco_export.core.artifact import COMPILE, HEAD, QAT_HEAD, SLM, artifact_name
from hyco_export.core.device_spec import (
    HEAD_GRAPH,
    HEAD_SPEC_FILE,
    SLM_PREFILL_GRAPH,
    SLM_SPEC_FILE,
    SLM_TREE_GRAPH,
    GraphSpec,
    HeadSpec,
    SlmSpec,
)
from hyco_export.core.encodings import Encoding
from hyco_export.core.golden import Golden
from hyco_export.core.network.weight_files import WEIGHTS_FILE, read_head, read_slm
from hyco_export.core.targets import find_target
from hyco_export.errors import CompileError
from hyco_export.evaluate.diagnosis.finding import Finding
from hyco_export.graph.context_check import check_context
from hyco_export.graph.io_spec import read_io_spec
from hyco_export.models.families.checks import vocabulary_mismatch
from hyco_export.models.head.unroll import head_spans
from hyco_export.models.text.tokenizer import encode_prompt
from hyco_export.models.verifier import load_config, load_tokenizer

HEAD_HINT, SLM_HINT = (f"build it again: hyco-export {stage}, then hyco-export compile" for stage in (HEAD, SLM))


def read_graph(run: Path, stage: str, graph: str) -> GraphSpec:
    """Inputs and outputs of a QDQ graph as the file itself has them."""
    return read_io_spec(onnx.load(run / stage / f"{graph}.onnx"), graph)


def interface_findings(run: Path, head: HeadSpec, slm: SlmSpec, target: str) -> Iterator[Finding]:
    """Encodings of inputs and outputs: what the specs say, what the graphs say, what the binaries say."""
    cases = (
        (HEAD, HEAD_SPEC_FILE, HEAD_GRAPH, head.graph, HEAD_HINT),
        (SLM, SLM_SPEC_FILE, SLM_TREE_GRAPH, slm.tree, SLM_HINT),
        (SLM, SLM_SPEC_FILE, SLM_PREFILL_GRAPH, slm.prefill, SLM_HINT),
    )
    for stage, file, graph, told, hint in cases:
        real = read_graph(run, stage, graph)
        yield from _differences(f"{stage}/{file}", graph, told, real, hint)
        yield from _binary(run / artifact_name(COMPILE, target) / f"{graph}_ctx.onnx", real, target)
    in_graph = {tensor.name: tensor.encoding for tensor in read_graph(run, HEAD, HEAD_GRAPH).inputs}
    for name, encoding in head.handoff.encodings.items():
        if not _equal(encoding, in_graph.get(name)):
            seen = f"the hand-off of {name} has {_text(encoding)}, the graph reads it with {_text(in_graph.get(name))}"
            yield Finding("scale", f"{HEAD}/{HEAD_SPEC_FILE}, {name}", seen, HEAD_HINT)
    encodings = {tensor.name: tensor.encoding for tensor in (*slm.tree.inputs, *slm.tree.outputs)}
    for layer in slm.layers:
        for kind in ("k", "v"):
            read, written = encodings[f"{kind}.{layer.index}"], encodings[f"{kind}_new.{layer.index}"]
            if not _equal(read, written):
                seen = f"{kind} of layer {layer.index} is written with {_text(written)} and read with {_text(read)}"
                yield Finding("scale", f"{SLM}/{SLM_SPEC_FILE}, {kind}.{layer.index}", seen, SLM_HINT)


def _differences(where: str, graph: str, told: GraphSpec, real: GraphSpec, hint: str) -> Iterator[Finding]:
    right = {tensor.name: tensor for tensor in (*real.inputs, *real.outputs)}
    for tensor in (*told.inputs, *told.outputs):
        own = right.get(tensor.name)
        if own is None or own.shape != tensor.shape:
            yield Finding("weights", where, f"{graph} has no {tensor.name} of shape {list(tensor.shape)}", hint)
        elif not _equal(tensor.encoding, own.encoding):
            seen = f"it says {_text(tensor.encoding)}, {graph}.onnx has {_text(own.encoding)}"
            yield Finding("scale", f"{where}, {tensor.name}", seen, hint)


def _binary(context_model: Path, real: GraphSpec, target: str) -> Iterator[Finding]:
    """The compiled graph takes and gives what the QDQ graph does."""
    try:
        check_context([context_model], [real], find_target(target))
    except CompileError as error:
        yield Finding(
            "scale", f"{context_model.parent.name}/{context_model.name}", error.message, f"hyco-export {COMPILE}"
        )


def _equal(left: Encoding | None, right: Encoding | None) -> bool:
    if left is None or right is None:
        return left is right
    return (left.dtype, left.scale, left.zero_point) == (right.dtype, right.scale, right.zero_point)


def _text(encoding: Encoding | None) -> str:
    return "no grid" if encoding is None else f"scale {encoding.scale:.6g}, zero point {encoding.zero_point}"


def head_shape_findings(run: Path, spec: HeadSpec, head_checkpoint: Path) -> Iterator[Finding]:
    """Spans and rotary frequencies against the head's checkpoint, and the trained head's against it too."""
    right = head_spans(load_config(head_checkpoint))
    stored = read_head(run / QAT_HEAD).architecture
    told = (
        (f"{HEAD}/{HEAD_SPEC_FILE}", spec.spans, HEAD_HINT),
        (f"{QAT_HEAD}/head.safetensors", stored.spans, "build it again: hyco-export qat-head"),
    )
    for where, spans, hint in told:
        if spans != right:
            yield _span_finding(where, "the head", spans["sliding"], right["sliding"], hint)
    if spec.inv_freq != stored.inv_freq:
        yield _rotary_finding(f"{HEAD}/{HEAD_SPEC_FILE}", "the trained head", HEAD_HINT)


def slm_shape_findings(run: Path, spec: SlmSpec, slm_checkpoint: Path) -> Iterator[Finding]:
    """The SLM's span is its checkpoint's sliding window: a row sees itself and window - 1 positions before. Its rotary
    frequencies are those of the network that was converted."""
    window = load_config(slm_checkpoint).get_text_config().sliding_window
    if spec.spans["sliding"] != window:
        yield _span_finding(f"{SLM}/{SLM_SPEC_FILE}", "the SLM", spec.spans["sliding"], window, SLM_HINT)

    network, _ = read_slm(run / SLM / WEIGHTS_FILE)
    if spec.inv_freq != network.inv_freq:
        yield _rotary_finding(f"{SLM}/{SLM_SPEC_FILE}", "the converted SLM", SLM_HINT)


def _rotary_finding(where: str, model: str, hint: str) -> Finding:
    return Finding("positions", where, f"rotary frequencies are not those of {model}", hint)


def _span_finding(where: str, model: str, told: int | None, right: int | None, hint: str) -> Finding:
    seen = f"spans.sliding is {told}, {model}'s sliding_window makes it {right}"
    return Finding("sliding window", where, seen, hint)


# Does a text become the ids that the artifacts were built with? And do verifier and SLM mean the same by an id?


def tokenizer_findings(
    golden: Golden, tokenizer: "PreTrainedTokenizerFast", slm_checkpoint: Path | None
) -> Iterator[Finding]:
    """The golden prompts through this tokenizer and template, and the SLM's vocabulary beside the verifier's.

    `slm_checkpoint` is None where a token bridge lies between the two vocabularies.
    """
    wrong = [
        number
        for number, text in enumerate(golden.texts)
        if tuple(encode_prompt(tokenizer, [msgspec.to_builtins(message) for message in text.messages]))
        != text.prompt_ids
    ]
    if wrong:
        seen = f"{len(wrong)} of {len(golden.texts)} golden prompts become other ids than when the head was converted"
        hint = "use the tokenizer.json and chat template that the verifier's checkpoint had then, or capture again"
        yield Finding("tokenizer", "the device's tokenizer", seen, hint)
    if slm_checkpoint is not None:
        yield from _slm_vocabulary(tokenizer, slm_checkpoint)


def _slm_vocabulary(tokenizer: "PreTrainedTokenizerFast", slm_checkpoint: Path) -> Iterator[Finding]:
    """Equal sizes with other tokens raise no error anywhere: the SLM then drafts other words."""
    if not (slm_checkpoint / "tokenizer.json").is_file():
        return
    rows = load_config(slm_checkpoint).get_text_config().vocab_size
    if seen := vocabulary_mismatch(tokenizer.get_vocab(), load_tokenizer(slm_checkpoint).get_vocab(), rows):
        yield Finding("tokenizer", "verifier and SLM", seen, "use an SLM with the verifier's tokenizer ($.models.slm)")
