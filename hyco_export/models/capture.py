"""A verifier's answers, and captures of whole sequences, each in one forward pass (teacher forcing).

A capture holds the head's inputs for every position of one sequence (HyCo, Appendix A): to draft behind root position p
the head reads e[p], h[p - 1] and the K/V rows before p.

Legend: T tokens of a sequence, H the verifier's hidden size, N K/V heads, d head dimension.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hyco_export.core.handoff import LAYER_TYPES, HiddenNorm
from hyco_export.core.recipe import Sampling
from hyco_export.errors import ArtifactError, CheckpointError, first_line
from hyco_export.models.generation_rules import suppressed_ids
from hyco_export.models.tensor_files import all_finite
from hyco_export.models.verifier import ATTENTION_NAMES, handoff_values, stop_ids


@dataclass(frozen=True)
class Capture:
    """One teacher-forced sequence, in the verifier's own precision.

    Attributes:
        ids: int64 [T], prompt then answer.
        answer_start: index of the first answer token.
        e: [T, H] input embeddings with their factor.
        h: [T, H] last hidden states, from before or after the final norm.
        k, v: [T, N, d] by layer type; keys are normed and rotated.
    """

    ids: torch.Tensor
    answer_start: int
    e: torch.Tensor
    h: torch.Tensor
    k: Mapping[str, torch.Tensor]
    v: Mapping[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def roots(self) -> range:
        """Root positions whose first drafted token belongs to the answer; position 0 has no hand-off before it."""
        return range(max(self.answer_start - 1, 1), len(self) - 1)

    def cut(self, limit: int) -> "Capture":
        """The first `limit` tokens."""
        k = {layer_type: rows[:limit] for layer_type, rows in self.k.items()}
        v = {layer_type: rows[:limit] for layer_type, rows in self.v.items()}
        return Capture(self.ids[:limit], self.answer_start, self.e[:limit], self.h[:limit], k, v)

    def handoff_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by the names of the hand-off's encodings: e, h, k.<type>, v.<type>."""
        named = {"e": self.e, "h": self.h}
        for layer_type in LAYER_TYPES:
            named[f"k.{layer_type}"] = self.k[layer_type]
            named[f"v.{layer_type}"] = self.v[layer_type]
        return named


@torch.no_grad()
def greedy_answer(model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """Ids of the verifier's greedy answer, batch 1; a stop token that ends it is included.

    Each is the argmax of the model's logits, without the ids that its generation config suppresses.
    """
    stops, suppressed = stop_ids(model), list(suppressed_ids(model))
    cache = DynamicCache(config=model.config)
    fed = torch.tensor([list(prompt_ids)], device=model.device)  # [1, T], then [1, 1]
    answer: list[int] = []
    while len(answer) < max_new_tokens:
        logits = model(fed, cache=cache, use_cache=True, logits_to_keep=1).logits  # [1, 1, V]
        logits[..., suppressed] = -torch.inf
        fed = logits.argmax(dim=-1)
        answer.append(int(fed))
        if answer[-1] in stops:
            break
    return answer


@torch.no_grad()
def sampled_answers(
    model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, count: int, sampling: Sampling, seed: int
) -> list[list[int]]:
    """`count` answers drawn from the verifier's sampling distribution, stop token included; the same for one seed."""
    stops = stop_ids(model)
    rules = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        suppress_tokens=list(suppressed_ids(model)) or None,
        num_return_sequences=count,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stops) or None,
        pad_token_id=stops[0] if stops else 0,  # behind an answer's end, cut off below
    )
    prompt = torch.tensor([list(prompt_ids)], device=model.device)
    generator: Any = model  # generation is a mixin that PreTrainedModel does not declare
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drawn = generator.generate(
            prompt, generation_config=rules, attention_mask=torch.ones_like(prompt)
        )  # [count, T]
    return [until_stop(row, stops) for row in drawn[:, len(prompt_ids) :].tolist()]


def until_stop(ids: Sequence[int], stops: Collection[int]) -> list[int]:
    """The ids up to the first stop id, which is included; all of them where there is none."""
    end = next((index + 1 for index, token in enumerate(ids) if token in stops), len(ids))
    return list(ids[:end])


@torch.no_grad()
def teacher_forced(
    model: PreTrainedModel, ids: Sequence[int], answer_start: int, hidden_norm: HiddenNorm = "post"
) -> Capture:
    """Run the verifier once over a known sequence and keep the tensors that hand-offs consist of.

    No cache is used: with one, sliding layers would give only the K/V rows that the cache keeps.

    Raises:
        CheckpointError: the model does not give K/V of every position, or values that are not finite or all 0.
    """
    backbone: Any = model.get_decoder()
    tokens = torch.tensor([list(ids)], device=model.device)  # [1, T]
    with _norm_input(backbone) as before_norm:
        output = backbone(
            tokens,
            use_cache=False,
            return_shared_kv_states=True,
            output_hidden_states=[-1],  # keeps every position in layers that share K/V
        )
    hidden = output.last_hidden_state if hidden_norm == "post" else before_norm[0]  # [1, T, H]
    k: dict[str, torch.Tensor] = {}
    v: dict[str, torch.Tensor] = {}
    for layer_type in LAYER_TYPES:
        keys, values = output.shared_kv_states[ATTENTION_NAMES[layer_type]]  # [1, N, T, d]
        if keys.shape[2] != len(ids):
            raise CheckpointError(
                f"{layer_type} K/V have {keys.shape[2]} rows for {len(ids)} tokens", "use an unpatched Gemma 4 verifier"
            )
        k[layer_type], v[layer_type] = _rows(keys), _rows(values)
    e = model.get_input_embeddings()(tokens)[0]
    capture = Capture(tokens[0].cpu(), answer_start, e.cpu(), hidden[0].cpu(), k, v)
    _require_sizes(capture, model)
    _require_usable(capture, model)
    return capture


def _require_usable(capture: Capture, model: PreTrainedModel) -> None:
    """Refuse a capture that a head cannot be trained on.

    Raises:
        CheckpointError: a tensor is not finite, or all hidden states are 0; names the tensor.
    """
    for name, tensor in capture.handoff_tensors().items():
        if not all_finite(tensor):
            position = int(torch.nonzero(~torch.isfinite(tensor.float()))[0][0])
            raise CheckpointError(
                f"the verifier's {name} is not finite at position {position} of a captured text, its weights are: "
                f"activations leave the range of {tensor.dtype}",
                "set $.models.verifier.dtype: float32, or use another checkpoint",
            )
    if not capture.h.any():
        raise CheckpointError(
            "the verifier's hidden states are 0 at every position of a captured text",
            "its embedding or its final norm is all zeros: fetch the checkpoint again",
        )


def _require_sizes(capture: Capture, model: PreTrainedModel) -> None:
    """Raises CheckpointError: the model gives other sizes than its config, by which hand-offs are laid out."""
    sizes = [tensor[0].numel() for tensor in capture.handoff_tensors().values()]
    found, wanted = (sum(sizes[:2]), sum(sizes[2:])), handoff_values(model.config)  # e and h, then K and V
    if found != wanted:
        raise CheckpointError(
            f"the verifier hands out {found[0]} values a round and {found[1]} a token, its config says "
            f"{wanted[0]} and {wanted[1]}",
            "use an unpatched Gemma 4 verifier",
        )


def _rows(states: torch.Tensor) -> torch.Tensor:
    """[1, N, T, d] -> [T, N, d]."""
    return states[0].transpose(0, 1).contiguous().cpu()


@contextmanager
def _norm_input(backbone: Any) -> Iterator[list[torch.Tensor]]:
    """The inputs of the final norm while the block runs."""
    seen: list[torch.Tensor] = []
    handle = backbone.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    try:
        yield seen
    finally:
        handle.remove()


def save_capture(path: Path, capture: Capture) -> int:
    """Write a capture as safetensors.

    Returns:
        The size of the file in bytes.
    """
    tensors = {"ids": capture.ids, **capture.handoff_tensors()}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"answer_start": json.dumps(capture.answer_start)})
    return path.stat().st_size


def load_capture(path: Path, dtype: torch.dtype | None = None) -> Capture:
    """Read a capture back, in its own precision or converted to `dtype`.

    Raises:
        ArtifactError: the file is missing, cut or lacks a tensor.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # a handle, not a dict
            answer_start = json.loads((file.metadata() or {})["answer_start"])
        ids = tensors.pop("ids")
        real = tensors if dtype is None else {name: tensor.to(dtype) for name, tensor in tensors.items()}
        k: dict[str, torch.Tensor] = {layer_type: real[f"k.{layer_type}"] for layer_type in LAYER_TYPES}
        v: dict[str, torch.Tensor] = {layer_type: real[f"v.{layer_type}"] for layer_type in LAYER_TYPES}
        return Capture(ids, answer_start, real["e"], real["h"], k, v)
    except (OSError, SafetensorError, KeyError) as error:
        raise ArtifactError(
            f"capture {path} cannot be read: {first_line(error)}", "build it again: hyco-export capture"
        ) from error
