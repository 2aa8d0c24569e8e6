"""A Gemma 3 of a few thousand parameters as a GGUF file, in the form in which converters write them."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

HIDDEN, INNER, LAYERS, HEADS, HEAD_DIM = 32, 40, 3, 4, 8
SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>")
PIECES = ("▁", "a", "b", "c", "ab", "▁a", "▁ab", "▁c")
VOCAB = len(SPECIALS) + 256 + len(PIECES)


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """Write it, all tensors in float32; the tensors under GGUF's names."""
    writer = GGUFWriter(path, "gemma3")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(8)
    _add_tokenizer(writer)
    tensors = _tensors(np.random.default_rng(0))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


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
