"""The MTP head in float: one drafting step, and the K steps, for many root positions at once.

The module is transformers' own head; this file prepares its inputs, once per sequence instead of once per step. A row
computes what assisted generation computes for its root (`SinglePositionMultiTokenCandidateGenerator`): the input is
[embedding, state] in this order; every step has the root's position; K/V are those of positions before the root, all of
the window in full layers and the newest `sliding_window + 1` in sliding layers; step k + 1 reads the projected state of
step k. Rows do not see each other.

Legend: T tokens of a sequence, R root positions, S key positions, H the verifier's hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from hyco_export.core.handoff import LAYER_TYPES
from hyco_export.core.ring import ring_span, visible
from hyco_export.errors import ArtifactError, first_line
from hyco_export.models.capture import Capture
from hyco_export.models.families.gemma4_assistant import HeadModel, output_logits
from hyco_export.models.verifier import ATTENTION_NAMES

# ---- the verifier's final norm, for a hand-off with h from before it


@dataclass(frozen=True)
class FinalNorm:
    """RMS norm over the last axis.

    Attributes:
        weight: float32 [H].
        epsilon: added to the mean square.
    """

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """norm(x), x [..., H]; computed in float32, returned in x's precision (transformers: Gemma4RMSNorm)."""
        wide = x.float()
        return (wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + self.epsilon, -0.5) * self.weight).to(x.dtype)


def final_norm(model: PreTrainedModel) -> FinalNorm:
    """The norm at the end of the verifier's backbone."""
    norm = model.get_decoder().norm
    return FinalNorm(norm.weight.detach().float().cpu(), norm.eps)


def save_norm(path: Path, norm: FinalNorm) -> None:
    """Write it as safetensors."""
    save_file({"weight": norm.weight.contiguous()}, path, metadata={"epsilon": repr(norm.epsilon)})


def load_norm(path: Path) -> FinalNorm:
    """Read it back.

    Raises:
        ArtifactError: missing or unreadable.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return FinalNorm(file.get_tensor("weight"), float((file.metadata() or {})["epsilon"]))
    except (OSError, SafetensorError, KeyError) as error:
        raise ArtifactError(
            f"{path} cannot be read: {first_line(error)}", "build it again: hyco-export capture"
        ) from error


ROOT_AND_INCLUSIVE_END = 2  # the head's mask shows window + 1 keys, and the root before them is not among the keys


def head_spans(config: PreTrainedConfig) -> dict[str, int | None]:
    """By layer type, the `span` of `core.ring.visible` for a query at the root's position.

    transformers' assistant shows a sliding layer the newest `sliding_window + 1` keys, whose positions are
    root - 1 ... root - sliding_window - 1; counted from the root that is a span of `sliding_window + 2`.
    """
    return {"sliding": config.get_text_config().sliding_window + ROOT_AND_INCLUSIVE_END, "full": None}


class StepOutput(NamedTuple):
    """logits [R, V] over the full vocabulary; state [R, H], the head's own projection for the next step."""

    logits: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True)
class RootRows:
    """The module's inputs at R root positions: consecutive roots of one sequence, or of several.

    Attributes:
        positions: int64 [1, R].
        masks: by transformers' attention name, [1, 1, R, S], 0 = visible, the type's minimum = hidden.
        keys_values: by attention name, (K, V) [1, N, S, d].
        embeddings: [R, H]; row i is e(token at root i), which at depth k is read by root i - k.
        states: [R, H]; h before each root.
        answers: int64 [R]; row i is the token after root i, which depth k predicts for root i - k + 1.
        following: int64 [R]; roots of the same sequence after each.
        sequences: int64 [R]; number of the sequence each root belongs to.
    """

    positions: torch.Tensor
    masks: Mapping[str, torch.Tensor]
    keys_values: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    embeddings: torch.Tensor
    states: torch.Tensor
    answers: torch.Tensor
    following: torch.Tensor
    sequences: torch.Tensor

    def __len__(self) -> int:
        return self.positions.shape[1]

    def reaching(self, depth: int) -> torch.Tensor:
        """int64: the rows whose sequence has at least `depth` more roots."""
        return (self.following >= depth).nonzero()[:, 0]

    def select(self, rows: torch.Tensor) -> "RootRows":
        """The rows of these indices."""
        return replace(
            self,
            positions=self.positions[:, rows],
            masks={name: mask[:, :, rows] for name, mask in self.masks.items()},
            embeddings=self.embeddings[rows],
            states=self.states[rows],
            answers=self.answers[rows],
            following=self.following[rows],
            sequences=self.sequences[rows],
        )

    def to(self, dtype: torch.dtype, device: torch.device) -> "RootRows":
        """The same rows in another precision, on another device."""
        lowest = torch.finfo(dtype).min  # a wider type's lowest arrives as -inf
        return RootRows(
            positions=self.positions.to(device),
            masks={name: mask.to(device, dtype).clamp_min(lowest) for name, mask in self.masks.items()},
            keys_values={name: (k.to(device, dtype), v.to(device, dtype)) for name, (k, v) in self.keys_values.items()},
            embeddings=self.embeddings.to(device, dtype),
            states=self.states.to(device, dtype),
            answers=self.answers.to(device),
            following=self.following.to(device),
            sequences=self.sequences.to(device),
        )


def pack(parts: Sequence[RootRows]) -> RootRows:
    """Rows of several sequences in one; each sees the keys of its own sequence only."""
    if len(parts) == 1:
        return parts[0]
    masks, keys_values = {}, {}
    for name, first in parts[0].masks.items():
        hidden = torch.finfo(first.dtype).min
        # blocks on the diagonal; values outside them are 0 and must be hidden
        seen = torch.block_diag(*(torch.ones_like(part.masks[name][0, 0]) for part in parts))
        values = torch.block_diag(*(part.masks[name][0, 0] for part in parts))
        masks[name] = torch.where(seen > 0, values, hidden)[None, None]
        k, v = (torch.cat([part.keys_values[name][i] for part in parts], dim=2) for i in (0, 1))
        keys_values[name] = (k, v)
    numbers = [torch.full_like(part.sequences, number) for number, part in enumerate(parts)]
    return RootRows(
        positions=torch.cat([part.positions for part in parts], dim=1),
        masks=masks,
        keys_values=keys_values,
        embeddings=torch.cat([part.embeddings for part in parts]),
        states=torch.cat([part.states for part in parts]),
        answers=torch.cat([part.answers for part in parts]),
        following=torch.cat([part.following for part in parts]),
        sequences=torch.cat(numbers),
    )


def response_rows(
    capture: Capture, spans: Mapping[str, int | None], window: int, norm: FinalNorm | None = None
) -> RootRows:
    """Rows of every root whose first drafted token belongs to the response (`Capture.roots`, at least one).

    Args:
        capture: one sequence.
        spans: `head_spans`.
        window: positions of K/V that the device keeps.
        norm: the verifier's final norm where h was captured before it.
    """
    first, last = capture.roots[0], capture.roots[-1]
    roots, keys = np.arange(first, last + 1), np.arange(last)
    dtype = capture.e.dtype
    masks, keys_values = {}, {}
    for layer_type in LAYER_TYPES:
        seen = visible(roots, keys, ring_span(spans[layer_type], window)) & (keys[None] < roots[:, None])
        hidden = torch.zeros(seen.shape, dtype=dtype).masked_fill(~torch.from_numpy(seen), torch.finfo(dtype).min)
        masks[ATTENTION_NAMES[layer_type]] = hidden[None, None]
        k, v = (rows[: len(keys)].transpose(0, 1)[None] for rows in (capture.k[layer_type], capture.v[layer_type]))
        keys_values[ATTENTION_NAMES[layer_type]] = (k, v)
    states = capture.h[first - 1 : last]
    return RootRows(
        positions=torch.from_numpy(roots)[None],
        masks=masks,
        keys_values=keys_values,
        embeddings=capture.e[first : last + 1],
        states=states if norm is None else norm(states),
        answers=capture.ids[first + 1 : last + 2],
        following=torch.arange(last - first, -1, -1),
        sequences=torch.zeros(last - first + 1, dtype=torch.int64),
    )


def head_step(head: HeadModel, e: torch.Tensor, state: torch.Tensor, rows: RootRows) -> StepOutput:
    """One drafting step for all rows: e [R, H], state [R, H].

    The operations of transformers' forward in their order, without its masks, which allow one row only.
    """
    mixed = head.pre_projection(torch.cat([e, state], dim=-1))[None]  # [1, R, head hidden]
    output = head.model(
        inputs_embeds=mixed,
        attention_mask=dict(rows.masks),
        position_ids=rows.positions,
        shared_kv_states=dict(rows.keys_values),
        use_cache=False,
        output_hidden_states=[-1],  # more than one row fails in transformers 5.24 without it
    )
    last = output.last_hidden_state[0]
    return StepOutput(output_logits(head, last), head.post_projection(last))


def unroll(head: HeadModel, rows: RootRows, steps: int) -> list[torch.Tensor]:
    """Logits of depths 1 .. steps, teacher-forced tokens, own states; at depth k + 1 those of `rows.reaching(k)`.

    Step k of root p reads the embedding of the sequence's token at p + k and the head's own state of step k - 1, and
    predicts the token at p + k + 1. Roots whose prediction would lie beyond the sequence are left out from that depth
    on. The rows are moved to the head's precision and device first.
    """
    norm = head.model.norm.weight  # never quantised
    rows = rows.to(norm.dtype, norm.device)
    logits = []
    going, state = rows, rows.states
    for depth in range(steps):
        kept = rows.reaching(depth)
        if not len(kept):
            break
        state = state[going.reaching(depth)]
        going = rows.select(kept)
        output = head_step(head, rows.embeddings[kept + depth], state, going)
        logits.append(output.logits)
        state = output.state
    return logits
