"""A verifier in shards, one a process: what transformers' tensor parallelism divides, and who holds which K/V heads.

Experts and MLPs are always divided, attention where the heads of all layers can be. Embeddings are whole everywhere,
so that a pass and nothing else needs the other processes: logits, the head's drafts and hand-offs are made in one.
Every process is to run the same passes in the same order.

Legend: N K/V heads, R rows of a pass, d head dimension.
"""

from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from hyco_export.core.handoff import KvShape
from hyco_export.core.recipe import Dtype
from hyco_export.nn.crew import Crew
from hyco_export.nn.verifier import handoff_layers, layer_kv_shape, load_config, load_shard

ATTENTION, EXPERTS = ".self_attn.", ".experts"  # in the names of transformers' plan
WHOLE = "replicate"  # its word for what every process holds all of
TABLE, OUTPUT = "embed_tokens", "lm_head"


def load_sharded_verifier(folder: Path, dtype: Dtype, crew: Crew) -> tuple[PreTrainedModel, "HeadShares"]:
    """This process's shard on the process's device, as `nn.verifier.load_verifier` gives the whole, and its heads. All
    processes of the launch load at the same time.

    Raises:
        CheckpointError: as `load_verifier`.
    """
    config, distributed = _divided(load_config(folder), crew.size)
    model = load_shard(folder, dtype, config, distributed)
    return model, HeadShares(crew, model.config.get_text_config())


def _divided(config: PreTrainedConfig, size: int) -> tuple[PreTrainedConfig, DistributedConfig]:
    """The configuration with transformers' plan for this many processes, and what the model's class adds to it."""
    text = config.get_text_config()
    divided = {ATTENTION: divides_heads(text, size), EXPERTS: text.enable_moe_block}
    whole = [part for part, is_divided in divided.items() if not is_divided]
    rules = text.base_model_tp_plan or {}
    plan = {rule: style for rule, style in rules.items() if not any(part in rule for part in whole)}
    text.update({"base_model_tp_plan": plan | {TABLE: WHOLE}})
    return config, DistributedConfig(tp_size=size, tp_plan={OUTPUT: WHOLE})


def divides_heads(text: PreTrainedConfig, size: int) -> bool:
    """Can the attention heads of every layer be divided among so many processes?"""
    heads = {text.num_attention_heads} | {layer_kv_shape(text, index).heads for index in range(text.num_hidden_layers)}
    return all(count % size == 0 for count in heads)


class HeadShares:
    """Which K/V heads a process computes with, and which it keeps: of the two layers that something beside the verifier
    reads all of them, of the others its own.

    Args:
        text: configuration of the verifier's text model.
    """

    def __init__(self, crew: Crew, text: PreTrainedConfig) -> None:
        self._crew = crew
        self._parts = crew.size if divides_heads(text, crew.size) else 1
        self._read = frozenset(handoff_layers(text).values())

    def kept(self, layer: int, shape: KvShape) -> KvShape:
        """What is kept of a layer's K/V."""
        return shape if layer in self._read else KvShape(shape.heads // self._parts, shape.dim)

    def gathered(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V [1, N computed, R, d] of a pass -> those of the heads that are kept."""
        if self._parts == 1 or layer not in self._read:
            return keys, values
        both = torch.cat(self._crew.gather(torch.stack((keys, values))), dim=2)
        return both[0], both[1]

    def computed(self, layer: int, kept: torch.Tensor) -> torch.Tensor:
        """Of K or V [N kept, ...] of a layer those of the heads that this process computes with: a view."""
        if self._parts == 1 or layer not in self._read:
            return kept
        return kept.chunk(self._parts)[self._crew.rank]
