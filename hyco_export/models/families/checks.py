"""Whether a verifier, a head and an SLM belong together, judged by their configs only."""

from collections.abc import Iterator

from transformers import PreTrainedConfig

from hyco_export.core.handoff import LAYER_TYPES
from hyco_export.errors import CheckpointError
from hyco_export.models.families.config_fields import not_honoured, quantisation_method
from hyco_export.models.families.gemma4_assistant import HEAD_MODEL_TYPE
from hyco_export.models.families.slm_family import ATTENTION_NAMES, READS_KV
from hyco_export.models.verifier import kv_shapes, layer_kv_shape

HEAD_HINT = "use the head that was published for this verifier ($.models.head)"
SLM_HINT = "use an SLM with the verifier's tokenizer ($.models.slm), or join both vocabularies by $.slm.bridge"

Problem = tuple[str, str]  # what is wrong, and the next step


def check_family(
    verifier: PreTrainedConfig,
    head: PreTrainedConfig | None,
    slm: PreTrainedConfig | None = None,
    bridged: bool = False,
) -> None:
    """Refuse checkpoints that do not belong together or cannot be converted; everything is named at once.

    Either drafter may be missing.

    `bridged`: the SLM has a vocabulary of its own.

    Raises:
        CheckpointError: a checkpoint is not of its role's kind; widths, K/V shapes or vocabularies differ; or a drafter
            has a part the static graphs cannot hold.
    """
    _require_roles(verifier, head, slm)
    apart = [
        *(_head_mismatches(verifier, head) if head is not None else ()),
        *_vocabulary_mismatches(verifier, head, None if bridged else slm),
    ]
    if head is not None and (method := quantisation_method(head)):
        apart.append(
            (f"the head's weights are quantised ({method}), training starts from floats", "give its BF16 checkpoint")
        )
    drafters = {"head": head, "SLM": slm}
    in_vain = [
        (f"the {role} cannot run as a static graph: {problem}", hint)
        for role, config in drafters.items()
        if config is not None
        for problem, hint in not_honoured(config)
    ]
    if problems := [*apart, *in_vain]:
        beginning = "checkpoints do not belong together: " if apart else ""
        hints = dict.fromkeys(hint for _, hint in problems)
        raise CheckpointError(beginning + "; ".join(problem for problem, _ in problems), "; ".join(hints))


def family_remarks(verifier: PreTrainedConfig, head: PreTrainedConfig) -> Iterator[str]:
    """What can be as it is and rarely is meant: no weight tells how far a head was trained to look back."""
    own, given = head.get_text_config().sliding_window, verifier.get_text_config().sliding_window
    if own != given:
        yield f"sliding_window of $.models.head is {own}, that of the verifier whose keys it reads {given}"


def _require_roles(verifier: PreTrainedConfig, head: PreTrainedConfig | None, slm: PreTrainedConfig | None) -> None:
    """Only a head drafts steps, and only the others are language models of their own."""
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
