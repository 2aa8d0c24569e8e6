"""Gemma 3 models of a few thousand parameters as GGUF files, in the form in which converters write them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType
from transformers import Gemma3ForCausalLM

HIDDEN, INNER, LAYERS, HEADS, HEAD_DIM = 32, 40, 3, 4, 8
SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>")
PIECES = ("▁", "a", "b", "c", "ab", "▁a", "▁ab", "▁c")
VOCAB = len(SPECIALS) + 256 + len(PIECES)


NAMES = {  # transformers' -> GGUF's, of a layer
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Keys = Mapping[str, Any]  # of the architecture; None leaves one out


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """Write one of random values, all tensors in float32; the tensors under GGUF's names."""
    tensors = _tensors(np.random.default_rng(0))
    shape = {"embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INNER}
    heads = {"head_count": HEADS, "head_count_kv": 1, "key_length": HEAD_DIM, "value_length": HEAD_DIM}
    attention = {f"attention.{key}": value for key, value in heads.items()}
    rest = {"context_length": 256, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6}
    _write(path, {**shape, **attention, **rest, "attention.sliding_window": 8}, tensors)
    return tensors


def write_gguf_of(model: Gemma3ForCausalLM, path: Path, keys: Keys | None = None) -> None:
    """Write a checkpoint that never was a GGUF, in float32, as llama.cpp's converter does; `keys` over its own."""
    config: Any = model.config
    rope = config.rope_parameters["full_attention"]
    stated: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": rope["rope_theta"],
    }
    if rope["rope_type"] == "linear":
        stated |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if config.final_logit_softcapping:
        stated["final_logit_softcapping"] = config.final_logit_softcapping
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            values = tensor.float().numpy()
            tensors[_gguf_name(name)] = values + 1 if "norm" in name else values
    _write(path, stated | dict(keys or {}), tensors)


def _gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.weight"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.weight"


def _write(path: Path, keys: Keys, tensors: Mapping[str, np.ndarray]) -> None:
    writer = GGUFWriter(path, "gemma3")
    for key, value in keys.items():
        if value is not None:
            _add_key(writer, key if key.startswith("tokenizer.") else f"gemma3.{key}", value)
    _add_tokenizer(writer)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def _add_tokenizer(writer: GGUFWriter) -> None:
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(PIECES)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def _tensors(generator: np.random.Generator) -> dict[str, np.ndarray]:
    def matrix(rows: int, columns: int) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def norm(width: int) -> np.ndarray:
        return (0.5 + generator.random(width)).astype(np.float32)  # 1 + weight, as GGUF stores Gemma's norms

    tensors = {"token_embd.weight": matrix(VOCAB, HIDDEN), "output_norm.weight": norm(HIDDEN)}
    for index in range(LAYERS):
        at = f"blk.{index}"
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            tensors[f"{at}.{name}.weight"] = norm(HIDDEN)
        for name in ("attn_q_norm", "attn_k_norm"):
            tensors[f"{at}.{name}.weight"] = norm(HEAD_DIM)
        tensors[f"{at}.attn_q.weight"] = matrix(HEADS * HEAD_DIM, HIDDEN)
        tensors[f"{at}.attn_k.weight"] = matrix(HEAD_DIM, HIDDEN)
        tensors[f"{at}.attn_v.weight"] = matrix(HEAD_DIM, HIDDEN)
        tensors[f"{at}.attn_output.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        tensors[f"{at}.ffn_gate.weight"] = matrix(INNER, HIDDEN)
        tensors[f"{at}.ffn_up.weight"] = matrix(INNER, HIDDEN)
        tensors[f"{at}.ffn_down.weight"] = matrix(HIDDEN, INNER)
    return tensors
