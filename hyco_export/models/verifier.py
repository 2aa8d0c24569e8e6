"""Loads a verifier, its head and their tokenizer from checkpoint folders, through transformers.

Also: which two layers of the verifier hand K/V to the head (the last sliding and the last full one that store K/V), and
the shapes of these K/V. `checkpoints` finds the folders.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    logging,
)
from transformers.distributed import DistributedConfig
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from hyco_export.core.handoff import LAYER_TYPES, KvShape, LayerType
from hyco_export.core.recipe import Dtype
from hyco_export.errors import CheckpointError, first_line
from hyco_export.models.checkpoints import require_checkpoint
from hyco_export.models.families.config_fields import require_sizes, require_verifier_type
from hyco_export.models.families.gemma4_assistant import HeadModel, require_ordering
from hyco_export.models.families.slm_family import ATTENTION_NAMES, ROPE, STORES_KV
from hyco_export.models.generation_rules import require_generation_rules
from hyco_export.models.tensor_files import CONFIG_NAME, FETCH_HINT, TensorFiles, all_finite, text_names, weight_files
from hyco_export.models.text.tokenizer import cleaned, require_named_files, token_ids

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


logging.disable_progress_bar()  # transformers' bar for loading weights would mix with the stages' own

Attention = Literal["sdpa", "eager"]
Model = TypeVar("Model")
TEMPLATE_HINT = "use an instruction-tuned checkpoint"
IN_JSON = "chat_template.json"  # transformers reads it for processors alone


def load_config(folder: Path) -> PreTrainedConfig:
    """The checkpoint's configuration.

    Raises:
        CheckpointError: no config, one that transformers does not know, or a value that no model can have.
    """
    path = require_checkpoint(folder) / CONFIG_NAME
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))  # as transformers reads it: Infinity is a number
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not JSON: {first_line(error)}", FETCH_HINT) from error
    if not isinstance(stated, dict):
        raise CheckpointError(f"{path} holds a {type(stated).__name__}, a config is a mapping", FETCH_HINT)
    try:
        config = AutoConfig.from_pretrained(folder)
    except StrictDataclassError as error:  # transformers' own rules for a config; the cause says which is broken
        raise CheckpointError(
            f"config of {folder} contradicts itself: {first_line(error.__cause__ or error)}", "fetch or save it again"
        ) from error
    except Exception as error:  # transformers raises anything for a field of another type
        unknown = "does not recognize this architecture" in str(error)  # transformers' words for a model type it lacks
        raise CheckpointError(
            f"config of {folder} cannot be read: {first_line(error)}",
            "pip install --upgrade transformers, or correct $.models" if unknown else "save the checkpoint again",
        ) from error
    require_sizes(config, path)
    return config


def empty_model(build: Callable[[Any], Model], config: PreTrainedConfig) -> Model:
    """A config's model on the meta device, by its class or an auto class's `from_config`.

    Raises:
        CheckpointError: no model can be made of the config; gives the reason.
    """
    try:
        with torch.device("meta"):
            return build(config)
    except Exception as error:  # transformers raises anything for sizes that contradict each other
        raise CheckpointError(
            f"no model can be made of the config of {config.name_or_path or config.model_type}: {first_line(error)}",
            FETCH_HINT,
        ) from error


def load_verifier(
    folder: Path, dtype: Dtype = "bfloat16", device: str = "cpu", attention: Attention = "sdpa"
) -> PreTrainedModel:
    """The verifier in evaluation mode, without gradients.

    Raises:
        CheckpointError: unreadable, a tensor missing or misshaped, or a model that shares no K/V with a head.
    """
    model = load_language_model(folder, dtype, device, attention)
    handoff_layers(model.config)
    return model


def load_language_model(
    folder: Path, dtype: Dtype = "bfloat16", device: str = "cpu", attention: Attention = "sdpa"
) -> PreTrainedModel:
    """Any causal language model in evaluation mode, without gradients.

    Raises:
        CheckpointError: unreadable, a tensor missing or misshaped, or its generation config has a rule that cannot be
            honoured.
    """
    require_checkpoint(folder)
    require_generation_rules(folder)
    return _load(AutoModelForCausalLM, folder, dtype, {"device_map": device}, attention)


def load_shard(folder: Path, dtype: Dtype, config: PreTrainedConfig, distributed: DistributedConfig) -> PreTrainedModel:
    """This process's shard of a verifier, on its device, in evaluation mode, without gradients.

    All processes of the launch load at the same time.

    Args:
        config, distributed: the configuration with transformers' plan of the shards, and the rest of that plan.

    Raises:
        CheckpointError: as `load_verifier`.
    """
    require_generation_rules(folder)
    options = {"config": config, "distributed_config": distributed}
    model = _load(AutoModelForCausalLM, folder, dtype, options, "sdpa")
    handoff_layers(model.config)
    return model


def load_head(folder: Path, dtype: Dtype = "bfloat16", device: str = "cpu", attention: Attention = "sdpa") -> HeadModel:
    """The verifier's multi-token-prediction head in evaluation mode, without gradients.

    Raises:
        CheckpointError: unreadable, incomplete, not a Gemma 4 assistant, or its clusters of tokens are damaged.
    """
    model_type = load_config(folder).model_type
    if model_type != "gemma4_assistant":
        raise CheckpointError(
            f"{folder} holds a {model_type!r} model, the head must be a gemma4_assistant", "correct $.models.head"
        )
    head = cast(HeadModel, _load(HeadModel, folder, dtype, {"device_map": device}, attention))
    require_ordering(head, folder)
    return head


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template.

    Raises:
        CheckpointError: missing or unreadable, or without a chat template.
    """
    tokenizer = read_tokenizer(folder)
    if tokenizer.chat_template is None:
        elsewhere = (folder / IN_JSON).is_file()
        raise CheckpointError(
            f"tokenizer of {folder} has no chat template" + (f", {IN_JSON} is not read" if elsewhere else ""),
            f"write the template of {IN_JSON} to chat_template.jinja" if elsewhere else TEMPLATE_HINT,
        )
    return tokenizer


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, cleaned (`text.tokenizer.cleaned`), with a chat template or, of a base model, without.

    Raises:
        CheckpointError: missing or unreadable.
    """
    require_checkpoint(folder)
    require_named_files(folder)
    try:
        tokenizer = cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(folder))
        backend = tokenizer.backend_tokenizer
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(
            f"tokenizer of {folder} cannot be read: {first_line(error)}", "save the tokenizer into the same folder"
        ) from error
    cleaned(backend, folder)
    tokenizer.split_special_tokens = False  # transformers sets it anew at every call
    tokenizer.model_max_length = VERY_LARGE_INTEGER
    tokenizer.clean_up_tokenization_spaces = False  # it would change decoded texts
    return tokenizer


def _load(
    kind: type, folder: Path, dtype: Dtype, placement: Mapping[str, Any], attention: Attention
) -> PreTrainedModel:
    """A model of `kind`; `placement`: transformers' options for devices and shards."""
    weight_files(require_checkpoint(folder))
    try:
        model, report = kind.from_pretrained(  # type: ignore[attr-defined]  # auto classes share no base with models
            folder,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=attention,
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are in the report, which names them
            **placement,
        )
    except ImportError as error:  # of a quantised checkpoint: transformers names the library that reads it
        raise CheckpointError(
            f"{folder} cannot be loaded: {first_line(error)}",
            "install what it names, or use the BF16 checkpoint",
        ) from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CheckpointError(
            f"{folder} does not fit into memory: {first_line(error)}", "use a machine or device with more"
        ) from error
    except Exception as error:  # transformers raises anything for a config and tensors that do not fit
        raise CheckpointError(f"{folder} cannot be loaded: {first_line(error)}", FETCH_HINT) from error
    stored = TensorFiles(folder)
    text_names(stored)
    # transformers gives missing tensors random values without an error
    absent = sorted(report["missing_keys"])
    if absent:
        raise CheckpointError(f"{folder} lacks {len(absent)} tensors, first {absent[0]}", FETCH_HINT)
    for name, found, wanted in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"{folder} cannot be loaded: {name} is stored as {list(found)}, the config asks for {list(wanted)}",
            "the config and the weights are of different models: fetch the checkpoint again",
        )
    if kind is HeadModel and (unread := sorted(report["unexpected_keys"])):
        raise CheckpointError(
            f"{folder} holds {len(unread)} tensors that the model of its config does not have, first {unread[0]}",
            "merge adapters into the weights, or correct config.json: the head would run without these tensors",
        )
    _require_finite(model, stored)
    return model.eval().requires_grad_(False)


def _require_finite(model: PreTrainedModel, stored: TensorFiles) -> None:
    """Refuse weights that are not finite: with one of them every answer would be the same token.

    Raises:
        CheckpointError: a weight is infinite or NaN, in the file or in the precision it is loaded in; or a buffer that
            is computed from the config; names it and its file.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):  # a tied weight once
        if not all_finite(tensor.to_local() if isinstance(tensor, DTensor) else tensor):
            stored.require_finite()
            if name in dict(model.named_buffers()) and name not in model.state_dict():
                raise CheckpointError(
                    f"{stored.folder / CONFIG_NAME}: {name}, computed from it, is not finite",
                    f"correct {ROPE}, or fetch the checkpoint again",
                )
            exact = tensor.dtype == torch.float32
            raise CheckpointError(
                f"{stored.folder}: {name} is finite in the file and not in {tensor.dtype}",
                "no precision of ours holds it: fetch or save the checkpoint again"
                if exact
                else "set its dtype in $.models to float32",
            )


def handoff_layers(config: PreTrainedConfig) -> dict[LayerType, int]:
    """Index of the verifier layer whose K/V the head reads, by layer type (Gemma 4: `kv_sharing_modes`).

    Raises:
        CheckpointError: the model names no such layers.
    """
    require_verifier_type(config)
    text = config.get_text_config()
    layers: dict[LayerType, int] = {}
    for layer_type in LAYER_TYPES:
        name = ATTENTION_NAMES[layer_type]
        stored = [
            i for i, mode in enumerate(text.kv_sharing_modes) if mode == STORES_KV and text.layer_types[i] == name
        ]
        if not stored:
            raise CheckpointError(f"the verifier has no {name} layer that stores K/V", "use a Gemma 4 verifier")
        layers[layer_type] = stored[-1]
    return layers


def kv_shapes(config: PreTrainedConfig) -> dict[str, KvShape]:
    """K/V heads and head dimension of the two hand-off layers, by layer type.

    Raises:
        CheckpointError: as `handoff_layers`.
    """
    text = config.get_text_config()
    return {layer_type: layer_kv_shape(text, index) for layer_type, index in handoff_layers(config).items()}


def handoff_values(config: PreTrainedConfig) -> tuple[int, int]:
    """Values of a hand-off: of e and h a round, of K and V a committed token (Gemma 4 26B-A4B: 5,632 and 6,144).

    Raises:
        CheckpointError: as `handoff_layers`.
    """
    return 2 * config.get_text_config().hidden_size, sum(2 * shape.values for shape in kv_shapes(config).values())


def layer_kv_shape(text_config: PreTrainedConfig, index: int) -> KvShape:
    """K/V heads and head dimension of one layer."""
    layer = text_config.per_layer_config[index]
    return KvShape(heads=layer.num_key_value_heads, dim=layer.head_dim)


def stop_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Token ids that end an answer, from the generation config, else from the model's."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    return token_ids(model.config.get_text_config().eos_token_id if ids is None else ids)
