"""Checks that a verifier, a head and an SLM belong together, from their configs and vocabularies."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import PreTrainedConfig

from hyco_export.core.handoff import LAYER_TYPES
from hyco_export.errors import CheckpointError
from hyco_export.models.families.config_fields import not_honoured, quantisation_method
from hyco_export.models.families.gemma4_assistant import HEAD_MODEL_TYPE
from hyco_export.models.families.slm_family import ATTENTION_NAMES, READS_KV
from hyco_export.models.text.tokenizer import TOKENIZER_NAME, open_tokenizer
from hyco_export.models.verifier import kv_shapes, layer_kv_shape

HEAD_HINT = "use the head that was published for this verifier ($.models.head)"
SLM_HINT = "use an SLM with the verifier's tokenizer ($.models.slm), or join both vocabularies by $.slm.bridge"
SHOWN_TOKENS = 3  # of those with other ids
RESERVED = re.compile(r"[<\[]unused_?\d+[>\]]")
LEAST_COMMON = 0.5  # of the ids that both vocabularies name: control tokens may have other names

Problem = tuple[str, str]  # what is wrong, and the next step


def check_family(
    verifier: PreTrainedConfig,
    head: PreTrainedConfig | None,
    slm: PreTrainedConfig | None = None,
    bridged: bool = False,
) -> None:
    """Refuse checkpoints that do not belong together or cannot be converted; one error names all reasons.

    Args:
        head, slm: either drafter may be missing.
        bridged: the SLM has a vocabulary of its own.

    Raises:
        CheckpointError: a checkpoint is not of its role's kind; widths, K/V shapes or vocabularies differ; or a drafter
            has a part that the static graphs do not implement.
    """
    _require_roles(verifier, head, slm)
    mismatches = [
        *(_head_mismatches(verifier, head) if head is not None else ()),
        *_vocabulary_mismatches(verifier, head, None if bridged else slm),
    ]
    if head is not None and (method := quantisation_method(head)):
        mismatches.append(
            (f"the head's weights are quantised ({method}), training starts from floats", "give its BF16 checkpoint")
        )
    drafters = {"head": head, "SLM": slm}
    unsupported = [
        (f"the {role} cannot run as a static graph: {problem}", hint)
        for role, config in drafters.items()
        if config is not None
        for problem, hint in not_honoured(config)
    ]
    if problems := [*mismatches, *unsupported]:
        beginning = "checkpoints do not belong together: " if mismatches else ""
        hints = dict.fromkeys(hint for _, hint in problems)
        raise CheckpointError(beginning + "; ".join(problem for problem, _ in problems), "; ".join(hints))


def family_remarks(verifier: PreTrainedConfig, head: PreTrainedConfig) -> Iterator[str]:
    """Warnings about what is rarely meant; the weights do not show with which window a head was trained."""
    own, given = head.get_text_config().sliding_window, verifier.get_text_config().sliding_window
    if own != given:
        yield f"sliding_window of $.models.head is {own}, that of the verifier whose keys it reads {given}"


def _require_roles(verifier: PreTrainedConfig, head: PreTrainedConfig | None, slm: PreTrainedConfig | None) -> None:
    """Raises CheckpointError: the head is another kind of model, or another role's model is a head."""
    for role, config in (("verifier", verifier), ("head", head), ("slm", slm)):
        if config is None or (config.model_type == HEAD_MODEL_TYPE) == (role == "head"):
            continue
        wanted = f"a {HEAD_MODEL_TYPE}" if role == "head" else "a language model"
        raise CheckpointError(
            f"$.models.{role} is a {config.model_type!r} model, the {role} must be {wanted}",
            f"correct $.models.{role}",
        )


def _head_mismatches(verifier: PreTrainedConfig, head: PreTrainedConfig) -> Iterator[Problem]:
    hidden = verifier.get_text_config().hidden_size
    if head.backbone_hidden_size != hidden:
        widths = f"the head's backbone width is {head.backbone_hidden_size}, the verifier's hidden size is {hidden}"
        yield widths, HEAD_HINT
    text = head.get_text_config()
    shapes = kv_shapes(verifier)
    for index, mode in enumerate(text.kv_sharing_modes):
        if mode != READS_KV:
            yield f"the head's layer {index} computes K/V of its own", HEAD_HINT
    for layer_type in LAYER_TYPES:
        layers = [i for i, kind in enumerate(text.layer_types) if kind == ATTENTION_NAMES[layer_type]]
        for own in dict.fromkeys(layer_kv_shape(text, index) for index in layers):
            given = shapes[layer_type]
            if own != given:
                yield (
                    f"the head reads {layer_type} K/V of {own.heads} heads x {own.dim}, "
                    f"the verifier gives {given.heads} x {given.dim}",
                    HEAD_HINT,
                )


def _vocabulary_mismatches(
    verifier: PreTrainedConfig, head: PreTrainedConfig | None, slm: PreTrainedConfig | None
) -> Iterator[Problem]:
    size = verifier.get_text_config().vocab_size
    for name, config, hint in (("head", head, HEAD_HINT), ("SLM", slm, SLM_HINT)):
        if config is not None and (own := config.get_text_config().vocab_size) != size:
            yield f"the {name}'s vocabulary has {own} tokens, the verifier's {size}", hint


def vocabulary_mismatch(ours: Mapping[str, int], theirs: Mapping[str, int], rows: int) -> str:
    """How the ids below `rows` differ between the verifier's tokenizer (`ours`) and the SLM's (`theirs`); "" if not.

    Every token that both know must have the same id in both. Reserved ids stand for no token, and an id may be missing
    in one tokenizer or belong to a control token that the other does not have.
    """
    known = {token: number for token, number in ours.items() if number < rows and not RESERVED.fullmatch(token)}
    shared = [token for token in known if theirs.get(token, rows) < rows]
    moved = [token for token in shared if theirs[token] != ours[token]]
    if moved:
        examples = ", ".join(repr(token) for token in moved[:SHOWN_TOKENS])
        return f"{len(moved)} of {len(shared)} tokens have other ids in the SLM's tokenizer, among them {examples}"
    named = set(known.values()) & set(theirs.values())
    if len(shared) < LEAST_COMMON * len(named):
        return f"only {len(shared)} of {len(named)} ids stand for the same token in the SLM's tokenizer"
    return ""


def check_vocabularies(verifier: Path, slm: Path, rows: int) -> None:
    """Refuse an SLM whose ids stand for other tokens than the verifier's; sizes alone do not show that.

    Args:
        verifier, slm: checkpoint folders; nothing is compared where one of them has no tokenizer.
        rows: ids that the models have rows for.

    Raises:
        CheckpointError: they do, or a tokenizer cannot be read.
    """
    files = [folder / TOKENIZER_NAME for folder in (verifier, slm)]
    if not all(path.is_file() for path in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    ours, theirs = (open_tokenizer(path.parent).backend.get_vocab() for path in files)
    if mismatch := vocabulary_mismatch(ours, theirs, rows):
        raise CheckpointError(f"checkpoints do not belong together: {mismatch}", SLM_HINT)
