"""Converts a GGUF file once into an ordinary checkpoint folder; the rest of the package never reads GGUF.

transformers reads tensors and tokenizer. The model's config is made here, because transformers' own mapping silently
drops some keys (the scaling of rotary positions, the scale of attention scores, the soft-cap). Every key of the
architecture, and every tensor, is mapped, compared with the rest of the file, or refused by name. The meaning of keys,
and of missing ones, is llama.cpp's. The folder is kept in the user's cache under the file's digest; weights are
dequantised to the recipe's dtype.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import filelock

from hyco_export.core.artifact import file_digest
from hyco_export.core.recipe import Dtype
from hyco_export.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hyco_export.models.families.gemma3 import Gemma3Config

CACHE_FOLDER = "hyco-export"
LOCK_SUFFIX = ".lock"
DIGEST_LETTERS = 16  # of the file's sha256 in the folder's name: 64 bits
IMPORT_REVISION = 2  # in the folder's name: raise it when the same file becomes another checkpoint
SAFETENSORS_HINT = "give the checkpoint in safetensors instead"

ARCHITECTURE = "gemma3"
NEEDED = {  # key of the architecture -> field of transformers' config; a file must have them all
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
}
ROPE_BASE, LOCAL_ROPE_BASE, LOCAL_BASE = "rope.freq_base", "rope.freq_base_swa", 10_000.0
ROPE_TYPE, ROPE_FACTOR = "rope.scaling.type", "rope.scaling.factor"
SCALE, PATTERN, SOFT_CAP = "attention.scale", "attention.sliding_window_pattern", "final_logit_softcapping"
COUNTS = frozenset(NEEDED) - {"attention.layer_norm_rms_epsilon"}  # whole numbers
POSITIVE = frozenset({"attention.layer_norm_rms_epsilon", ROPE_BASE, LOCAL_ROPE_BASE})
NOT_NEGATIVE = frozenset({ROPE_FACTOR, SCALE, SOFT_CAP})  # 0 means the same as a missing key
MAPPED = frozenset({*NEEDED, ROPE_BASE, LOCAL_ROPE_BASE, ROPE_TYPE, ROPE_FACTOR, SCALE, PATTERN, SOFT_CAP})
# of YaRN, or about images: without effect on a text model whose positions are scaled linearly
INERT = frozenset({"rope.scaling.original_context_length", "rope.scaling.finetuned", "mm.tokens_per_image"})
DIMENSIONS = (  # keys that repeat the head dimension
    *("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"),
    *("rope.dimension_count", "rope.dimension_count_swa"),
)
PERIOD = 6  # layers, the last of which has full attention
# its attention scale is the root of heads / hidden size, that of all others the root of 1 / head dimension
LAYERS_OF_27B = 62
TENSORS = frozenset({"token_embd.weight", "output_norm.weight", "output.weight"})
LAYER_TENSORS = frozenset(
    {
        *("attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "attn_norm", "ffn_norm"),
        *("post_attention_norm", "post_ffw_norm", "ffn_gate", "ffn_up", "ffn_down"),
    }
)


def imported_gguf(path: Path, dtype: Dtype) -> Path:
    """The checkpoint folder of a GGUF file, written at the first call; an interrupted call leaves none.

    Of several processes that call at the same time one writes it, and the others wait.

    Raises:
        CheckpointError: no such file, transformers cannot read it, or it says something that no config can hold.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", "correct gguf_file in $.models")
    folder = import_folder(path, dtype)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _import_lock(folder.parent):
        if not folder.is_dir():
            build = Path(tempfile.mkdtemp(prefix=".gguf-", dir=folder.parent))
            try:
                _convert(path, dtype, build)
                _publish(build, folder)
            finally:
                shutil.rmtree(build, ignore_errors=True)
    return folder


def _publish(build: Path, folder: Path) -> None:
    try:
        build.rename(folder)
    except OSError:  # another process was faster, on a file system without locks
        if not folder.is_dir():
            raise


@contextmanager
def _import_lock(folder: Path) -> Iterator[None]:
    """Wait for other imports into a folder, then keep them waiting; the lock ends with the process.

    Its file is beside the folder, in which there are checkpoints alone.
    """
    # without the fallback: a soft lock would outlive a killed process
    lock = filelock.FileLock(folder.with_name(f"{folder.name}{LOCK_SUFFIX}"), fallback_to_soft=False)
    with suppress(OSError):  # a file system without locks: `_publish` keeps the faster import
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def import_folder(path: Path, dtype: Dtype) -> Path:
    """Where the checkpoint folder of a GGUF file is, or will be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / CACHE_FOLDER
    return cache / f"{path.stem}-{file_digest(path)[:DIGEST_LETTERS]}-{dtype}-{IMPORT_REVISION}"


def _convert(path: Path, dtype: Dtype, out_dir: Path) -> None:
    from gguf import GGUFReader
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoTokenizer

    from hyco_export.models.families.gemma3 import Gemma3Model
    from hyco_export.models.verifier import TORCH_DTYPES

    try:
        reader = GGUFReader(path)
        config = _config(reader, path)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        options: dict[str, Any] = {"config": config, "dtype": TORCH_DTYPES[dtype], "output_loading_info": True}
        model, report = cast(Any, Gemma3Model).from_pretrained(path.parent, gguf_file=path.name, **options)
    except CheckpointError:
        raise
    except Exception as error:  # gguf and transformers raise anything for a damaged file
        raise CheckpointError(f"GGUF file {path} cannot be read: {first_line(error)}", SAFETENSORS_HINT) from error
    _require_whole(model, report, path)
    _require_flags(tokenizer, _fields(reader, "tokenizer.ggml."), path)
    tokenizer.save_pretrained(out_dir)
    config.architectures, config.dtype = [type(model).__name__], dtype
    config.save_pretrained(out_dir)
    tied = {name for name in model.all_tied_weights_keys if config.tie_word_embeddings}
    stored = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    save_torch_state_dict(stored, out_dir)  # the model's own saving refuses what came from GGUF, dequantised or not


def _config(reader: "GGUFReader", path: Path) -> "Gemma3Config":
    """The model's config, from the file's keys and tensors.

    Raises:
        CheckpointError: another architecture, a key that is missing, one that nothing here maps, or a value that no
            model can have.
    """
    from hyco_export.models.families.gemma3 import Gemma3Config

    general = _fields(reader, "general.")
    if general.get("architecture") != ARCHITECTURE:
        found = f"GGUF file {path}: general.architecture is {general.get('architecture')!r}"
        raise CheckpointError(f"{found}, only {ARCHITECTURE!r} is mapped key by key", SAFETENSORS_HINT)
    keys = _fields(reader, f"{ARCHITECTURE}.")
    shapes = {tensor.name: tuple(int(size) for size in tensor.shape) for tensor in reader.tensors}
    missing = [key for key in (*NEEDED, ROPE_BASE) if key not in keys]
    if missing:
        raise CheckpointError(f"GGUF file {path} has no {ARCHITECTURE}.{missing[0]}", SAFETENSORS_HINT)
    _require_values(keys, path)
    mapped = {field: keys[key] for key, field in NEEDED.items()}
    _require_mapped(keys, mapped["head_dim"], shapes, path)
    vocabulary = shapes["token_embd.weight"][-1]
    tokens = _fields(reader, "tokenizer.ggml.")
    stops = dict.fromkeys(tokens[key] for key in ("eos_token_id", "eot_token_id") if key in tokens)
    return Gemma3Config(
        **mapped,
        vocab_size=vocabulary,
        layer_types=_layer_types(keys.get(PATTERN, PERIOD), mapped["num_hidden_layers"]),
        rope_parameters={
            "full_attention": {**_scaling(keys, path), "rope_theta": keys[ROPE_BASE]},
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.get(LOCAL_ROPE_BASE, LOCAL_BASE)},
        },
        query_pre_attn_scalar=_score_divisor(keys, mapped, path),
        final_logit_softcapping=keys.get(SOFT_CAP) or None,
        tie_word_embeddings="output.weight" not in shapes,
        bos_token_id=tokens.get("bos_token_id"),
        eos_token_id=list(stops) if len(stops) > 1 else next(iter(stops), None),
        pad_token_id=tokens.get("padding_token_id"),
    )


def _fields(reader: "GGUFReader", prefix: str) -> dict[str, Any]:
    """Values of the keys with this prefix, by the rest of the key."""
    found = {key: field.contents() for key, field in reader.fields.items() if key.startswith(prefix)}
    return {key.removeprefix(prefix): value for key, value in found.items()}


def _require_values(keys: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError: a mapped key holds what no model can have; names it."""
    for key, value in keys.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if key in COUNTS and not (number and isinstance(value, int) and value > 0):
            rule = "a whole number greater than 0"
        elif key in POSITIVE and not (number and value > 0):
            rule = "finite and greater than 0"
        elif key in NOT_NEGATIVE and not (number and value >= 0):
            rule = "finite and not negative"
        elif key == PATTERN and not _is_pattern(value, keys["block_count"]):
            rule = "a period greater than 0, or a list of whether each layer slides"
        else:
            continue
        raise CheckpointError(
            f"GGUF file {path}: {ARCHITECTURE}.{key} is {value!r}, it must be {rule}", SAFETENSORS_HINT
        )


def _is_pattern(value: Any, layers: int) -> bool:
    if isinstance(value, list):
        return len(value) == layers and all(isinstance(slides, bool) for slides in value)
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _require_mapped(keys: Mapping[str, Any], head_dim: int, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Refuse keys that contradict others, and keys and tensors that are not mapped.

    Raises:
        CheckpointError: names the first that is not.
    """
    layers = range(int(keys["block_count"]))
    wanted = {f"blk.{layer}.{name}.weight" for layer in layers for name in LAYER_TENSORS}
    absent, foreign = sorted((wanted | {"token_embd.weight"}) - set(shapes)), sorted(set(shapes) - wanted - TENSORS)
    if absent or foreign:
        problem = f"has no tensor {absent[0]}" if absent else f"has a tensor {foreign[0]}, which {ARCHITECTURE} has not"
        raise CheckpointError(f"GGUF file {path} {problem}", SAFETENSORS_HINT)
    repeated: dict[str, Any] = dict.fromkeys(DIMENSIONS, head_dim) | {"vocab_size": shapes["token_embd.weight"][-1]}
    repeated |= {"attention.causal": True, "expert_count": 0, "expert_used_count": 0}
    repeated |= {"attn_logit_softcapping": 0.0, "rope.scaling.attn_factor": 1.0}
    for key, value in keys.items():
        if key in MAPPED | INERT or (key in repeated and value == repeated[key]):
            continue
        rule = f"only {repeated[key]!r} fits the rest of the file" if key in repeated else "which is not mapped"
        raise CheckpointError(f"GGUF file {path}: {ARCHITECTURE}.{key} is {value!r}, {rule}", SAFETENSORS_HINT)


def _layer_types(pattern: Any, layers: int) -> list[str]:
    """Type of each layer; `pattern`: the period of layers with full attention, or whether each layer slides."""
    slides = pattern if isinstance(pattern, list) else [bool((layer + 1) % pattern) for layer in range(layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _scaling(keys: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Rotary parameters of the layers with full attention; a factor without a kind is linear."""
    factor = float(keys.get(ROPE_FACTOR, 1.0)) or 1.0
    kind = keys.get(ROPE_TYPE, "linear")
    if kind not in ("none", "linear"):
        raise CheckpointError(
            f"GGUF file {path}: {ARCHITECTURE}.{ROPE_TYPE} is {kind!r}, only 'none' and 'linear' are mapped",
            SAFETENSORS_HINT,
        )
    linear = kind == "linear" and factor != 1.0
    return {"rope_type": "linear", "factor": factor} if linear else {"rope_type": "default"}


def _score_divisor(keys: Mapping[str, Any], mapped: Mapping[str, Any], path: Path) -> int:
    """The number by whose root attention scores are divided: from the file's scale, else from the model's sizes."""
    if not keys.get(SCALE):
        wide = mapped["num_hidden_layers"] == LAYERS_OF_27B
        return int(mapped["hidden_size"] // mapped["num_attention_heads"] if wide else mapped["head_dim"])
    divisor = float(keys[SCALE]) ** -2
    if not math.isclose(divisor, round(divisor), rel_tol=1e-6):  # float32 in the file
        raise CheckpointError(
            f"GGUF file {path}: {ARCHITECTURE}.{SCALE} is {keys[SCALE]}, not 1 over the root of a whole number",
            SAFETENSORS_HINT,
        )
    return round(divisor)


def _require_whole(model: "PreTrainedModel", report: Mapping[str, Collection[Any]], path: Path) -> None:
    """Raises CheckpointError: a parameter came from no tensor of the file, or from one of another shape."""
    absent = sorted(set(report["missing_keys"]) - set(model.all_tied_weights_keys))
    absent += sorted(str(key[0]) for key in report["mismatched_keys"])
    if absent:
        raise CheckpointError(
            f"GGUF file {path} gives no values of the model's shape for {absent[0]}", SAFETENSORS_HINT
        )


def _require_flags(tokenizer: "PreTrainedTokenizerBase", flags: Mapping[str, Any], path: Path) -> None:
    """The imported tokenizer begins and ends texts as the file's flags say; a missing flag allows both.

    Raises:
        CheckpointError: it does not; names the flag.
    """
    ids = tokenizer("a").input_ids
    done = {
        "add_bos_token": ids[0] == tokenizer.bos_token_id,
        "add_eos_token": ids[-1] == tokenizer.eos_token_id,
        "add_space_prefix": tokenizer.tokenize("a")[0].startswith("\u2581"),
    }
    for flag, does in done.items():
        if flag in flags and bool(flags[flag]) != does:
            raise CheckpointError(
                f"GGUF file {path}: tokenizer.ggml.{flag} is {flags[flag]}, which transformers' reader does not follow",
                SAFETENSORS_HINT,
            )
