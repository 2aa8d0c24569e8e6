"""The fields of a checkpoint's generation config by which transformers' `generate` changes logits: each is honoured,
replaced by the caller's settings, or refused.

A server checks every row of a tree independently. A rule that holds at every position (`suppress_tokens`) is applied to
every row; one that depends on the tokens before, or on their number, is refused. Only the verifier's config is checked:
an SLM or a head only proposes tokens.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hyco_export.core.recipe import Sampling
from hyco_export.errors import CheckpointError, first_line
from hyco_export.models.text.tokenizer import stated_ids, token_ids

GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "config.json"  # holds such fields where there is no GENERATION_FILE
SUPPRESSED = "suppress_tokens"
HONOURED = {"eos_token_id", SUPPRESSED}
CALLERS = {"temperature", "top_k", "top_p"}  # every request has its own, a recipe has `$.sampling`
WITHOUT_EFFECT = {  # on the choice of tokens here: decoding, its lengths, caches and outputs are this package's own
    *("_from_model_config", "transformers_version", "bos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("do_sample", "num_return_sequences", "max_length", "max_new_tokens", "early_stopping", "length_penalty"),
    *("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory", "renormalize_logits"),
    *("remove_invalid_values", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "compile_config", "disable_compile", "continuous_batching_config"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
    *("target_lookbehind", "speculation_type", "use_mtp"),
}
NEUTRAL: Mapping[str, Any] = {  # values, beside none and empty ones, by which transformers changes nothing
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale"), 1),
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
}
SINGLE_TOKENS = "; where single tokens are meant, list them under suppress_tokens, which is honoured at every place"
INSTEAD = {
    "begin_suppress_tokens": SINGLE_TOKENS,
    "bad_words_ids": SINGLE_TOKENS,
    "stop_strings": "; give the ids that end an answer as eos_token_id",
}


def read_generation_config(folder: Path) -> GenerationConfig:
    """The generation config that transformers gives a model of this checkpoint.

    Raises:
        CheckpointError: it cannot be read, which transformers would ignore; or a field of token ids holds other values.
    """
    name = GENERATION_FILE if (folder / GENERATION_FILE).exists() else CONFIG_FILE
    stated_ids(folder / name)
    try:
        _require_id_list(json.loads((folder / name).read_bytes()).get(SUPPRESSED), folder)
        return GenerationConfig.from_pretrained(folder, name, _from_model_config=name == CONFIG_FILE)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / name} cannot be read: {first_line(error)}", "fetch or save the checkpoint again"
        ) from error


def require_generation_rules(folder: Path) -> None:
    """Refuse a checkpoint with which transformers would generate other texts than this package.

    Raises:
        CheckpointError: a field changes or ends texts and cannot be honoured, by name; or the config cannot be read.
    """
    config = read_generation_config(folder)
    known = vars(GenerationConfig())
    for field, value in vars(config).items():
        if field in known and field not in HONOURED | CALLERS | WITHOUT_EFFECT and not _is_neutral(field, value):
            raise CheckpointError(
                f"the generation config of {folder} sets {field} to {value!r}: transformers would generate other "
                "texts, and rows of a tree cannot be judged by it",
                f"remove {field} from {GENERATION_FILE} if texts without it are wanted{INSTEAD.get(field, '')}",
            )


def _require_id_list(listed: object, folder: Path) -> None:
    """Raises CheckpointError: `suppress_tokens` holds something else than a list of whole numbers."""
    if listed is None:
        return
    if not isinstance(listed, list) or not all(isinstance(token, int | float) and token % 1 == 0 for token in listed):
        raise CheckpointError(
            f"the generation config of {folder} sets {SUPPRESSED} to {listed!r}, it must be a list of token ids",
            f"correct {GENERATION_FILE}",
        )


def generation_notes(folder: Path, sampling: Sampling) -> Iterator[str]:
    """Notes on the fields of a checkpoint's generation config that are not used.

    Raises:
        CheckpointError: it cannot be read.
    """
    config, where = read_generation_config(folder), f"the verifier's {GENERATION_FILE}"
    ours = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    for field in sorted(CALLERS):
        value = getattr(config, field)
        if config.do_sample and value is not None and value != ours[field]:
            yield f"{where} says {field} {value}; $.sampling.{field}, {ours[field]}, is used"
    stops = set(token_ids(config.eos_token_id))
    if stops and stops <= set(config.suppress_tokens or ()):
        yield f"{where} suppresses every id that ends an answer: answers end at their limit alone"
    if (folder / GENERATION_FILE).exists():
        unknown = sorted(set(json.loads((folder / GENERATION_FILE).read_bytes())) - set(vars(GenerationConfig())))
        if unknown:
            yield f"{where} sets {', '.join(unknown)}: this transformers knows no such field, nothing is done about it"


def suppressed_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Sorted ids that the model never generates: `suppress_tokens`, without those it has no row for."""
    return _inside(model.generation_config, model.config.get_text_config().vocab_size)


def checkpoint_suppressed_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The same of a checkpoint's folder.

    Raises:
        CheckpointError: its generation config cannot be read.
    """
    return _inside(read_generation_config(folder), vocab_size)


def _inside(config: GenerationConfig | None, vocab_size: int) -> tuple[int, ...]:
    listed = (config.suppress_tokens if config is not None else None) or ()
    return tuple(sorted({int(token) for token in listed if 0 <= token < vocab_size}))


def _is_neutral(field: str, value: Any) -> bool:
    """Is it a value by which transformers changes nothing?"""
    if value is None or value == NEUTRAL.get(field):
        return True
    if not value and field not in NEUTRAL and not field.startswith("forced_"):  # token 0 can be forced
        return True
    return field == "cache_implementation" and value != "quantized"
