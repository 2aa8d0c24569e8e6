"""Fused layers give transformers' hidden states, on the model's own storage."""

from copy import deepcopy

import pytest
import torch

from hyco_export.models.fused_layers import FusedStack, fits
from tests.support.gemma import STRUCTURES, VOCAB, WINDOW, tiny_verifier

ROWS = 3 * WINDOW
IDS = torch.randint(7, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(0))


class CausalAttention:
    """Attention of all rows of one text to those before, without a cache."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self._newest: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        distance = torch.arange(ROWS)[:, None] - torch.arange(ROWS)[None]
        full = distance >= 0
        self._visible = {"full_attention": full, "sliding_attention": full & (distance < WINDOW)}

    def store(self, layer: int, layer_type: str, keys: torch.Tensor, values: torch.Tensor, shared: bool) -> None:
        self.stored.append(layer)
        self._newest[layer_type] = keys, values

    def attend(self, layer_type: str, query: torch.Tensor, scale: float) -> torch.Tensor:
        keys, values = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in self._newest[layer_type])
        scores = torch.einsum("rhd,shd->hrs", query, keys) * scale
        weights = scores.masked_fill(~self._visible[layer_type], -torch.inf).softmax(-1)
        return torch.einsum("hrs,shd->rhd", weights, values).flatten(1)


def transformers_states(backbone: torch.nn.Module) -> torch.Tensor:
    """[R, D]; every position is kept in layers that share K/V where hidden states are asked for."""
    return backbone(input_ids=IDS[None], use_cache=False, output_hidden_states=[-1]).last_hidden_state[0]


@pytest.mark.parametrize("structure", STRUCTURES)
@torch.no_grad()
def test_hidden_states_are_transformers(structure: str) -> None:
    backbone = deepcopy(tiny_verifier(structure)).model
    assert fits(backbone)
    embedded = backbone.embed_tokens(IDS)  # [R, D]
    wanted = transformers_states(backbone)
    stack, attention = FusedStack(backbone), CausalAttention()
    normed, before = stack.run(
        embedded, stack.rotations(torch.arange(ROWS)), attention, stack.per_layer_inputs(IDS, embedded)
    )
    torch.testing.assert_close(normed, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(backbone.norm(before), wanted, atol=2e-5, rtol=1e-4)
    sharing = backbone.config.num_kv_shared_layers or 0
    assert attention.stored == list(range(backbone.config.num_hidden_layers - sharing))
    # the model itself computes on the fused storage as before
    torch.testing.assert_close(transformers_states(backbone), wanted)


@torch.no_grad()
def test_parameters_become_views_of_one_matrix_and_stay_so() -> None:
    backbone = deepcopy(tiny_verifier()).model
    FusedStack(backbone)
    mlp = backbone.layers[0].mlp
    storage = mlp.gate_proj.weight.untyped_storage().data_ptr()
    assert mlp.up_proj.weight.untyped_storage().data_ptr() == storage
    FusedStack(backbone)
    assert mlp.gate_proj.weight.untyped_storage().data_ptr() == storage


def test_other_products_do_not_fit() -> None:
    model = deepcopy(tiny_verifier())
    assert not fits(model)  # no backbone
    backbone = model.model
    plain = backbone.layers[0].mlp.up_proj
    backbone.layers[0].mlp.up_proj = torch.nn.Linear(plain.in_features, plain.out_features, bias=True)
    assert not fits(backbone)
