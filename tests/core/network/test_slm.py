"""The SLM's static network by shapes: inputs, new K/V rows, logits, and the weights that each option asks for.

Values are compared with transformers' models in tests/models/slm/.
"""

from typing import Any

import msgspec
import pytest

from hyco_export.core.network.slm import SlmLayer, SlmNetwork, build, build_prefill, layer_results
from tests.support.shape_ops import Shape, ShapeOps

H, P, KEPT, ROWS, MLP = 8, 2, 9, 5, 12
RINGS = {"sliding": 6, "full": 16}


def layer(index: int, kind: str, source: int, **fields: Any) -> SlmLayer:
    size = {"heads": 4, "kv_heads": 2, "dim": 4} if kind == "sliding" else {"heads": 2, "kv_heads": 1, "dim": 6}
    return SlmLayer(index, kind, **size, source=source, **({"values_from_keys": False, "scalar": 1.0} | fields))


NETWORK = SlmNetwork(
    hidden=H,
    per_layer=P,
    epsilon=1e-6,
    soft_cap=30.0,
    rings=RINGS,
    spans={"sliding": 4, "full": None},
    inv_freq={"sliding": (1.0, 0.1), "full": (1.0, 0.1, 0.0)},
    layers=(layer(0, "sliding", 0), layer(1, "full", 1, scalar=0.5), layer(2, "sliding", 0), layer(3, "full", 1)),
)


def weights(network: SlmNetwork) -> dict[str, Shape]:
    count = len(network.layers)
    found: dict[str, Shape] = {
        "lm_head": (KEPT, H),
        "norm": (H,),
        "per_layer_model_projection": (count * P, H),
        "per_layer_projection_norm": (P,),
    }
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for each in network.layers:
        at, inner, kv = f"layers.{each.index}", each.heads * each.dim, each.kv_heads * each.dim
        found |= {f"{at}.{norm}_layernorm": (H,) for norm in norms}
        found |= {f"{at}.self_attn.q_proj": (inner, H), f"{at}.self_attn.o_proj": (H, inner)}
        found |= {f"{at}.self_attn.{name}_proj": (kv, H) for name in ("k", "v")}
        found |= {f"{at}.self_attn.{name}_norm": (each.dim,) for name in ("q", "k")}
        found |= {f"{at}.mlp.{name}_proj": (MLP, H) for name in ("gate", "up")}
        found |= {f"{at}.mlp.down_proj": (H, MLP), f"{at}.per_layer_input_gate": (P, H)}
        found |= {f"{at}.per_layer_projection": (H, P), f"{at}.post_per_layer_input_norm": (H,)}
    return found


def built(make: Any = build, **changes: Any) -> ShapeOps:
    network = msgspec.structs.replace(NETWORK, **changes)
    ops = ShapeOps(weights(network))
    make(ops, network, ROWS)
    return ops


def test_a_tree_pass_gives_logits_and_the_rows_of_storing_layers() -> None:
    ops = built()
    assert ops.outputs == {
        "k_new.0": (2, ROWS, 4),
        "v_new.0": (2, ROWS, 4),
        "k_new.1": (1, ROWS, 6),
        "v_new.1": (1, ROWS, 6),
        "logits": (ROWS, KEPT),
    }
    assert ops.inputs == {
        "embeds": (ROWS, H),
        "per_layer": (ROWS, 4 * P),
        "k.0": (2, 6, 4),
        "v.0": (2, 6, 4),
        "k.1": (1, 16, 6),
        "v.1": (1, 16, 6),
        "mask.sliding": (ROWS, 6 + ROWS),
        "mask.full": (ROWS, 16 + ROWS),
        **{f"{kind}.sliding": (ROWS, 4) for kind in ("cos", "sin")},
        **{f"{kind}.full": (ROWS, 6) for kind in ("cos", "sin")},
    }
    assert set(ops.used) == set(weights(NETWORK)) - {
        f"layers.{index}.self_attn.{name}" for index in (2, 3) for name in ("k_proj", "v_proj", "k_norm")
    }


def test_a_prefill_pass_ends_at_the_last_storing_layer() -> None:
    ops = built(build_prefill)
    assert set(ops.outputs) == {"k_new.0", "v_new.0", "k_new.1", "v_new.1"}
    assert not any(name.startswith(("layers.2.", "layers.3.", "lm_head")) for name in ops.used)
    assert "layers.1.self_attn.q_proj" not in ops.used  # only its K/V are needed
    assert "mask.full" not in ops.inputs and "k.1" not in ops.inputs


def test_a_prefill_of_a_first_layer_alone_needs_no_per_layer_input() -> None:
    ops = built(build_prefill, layers=(layer(0, "full", 0), layer(1, "full", 0)))
    assert set(ops.inputs) == {"embeds", "cos.full", "sin.full"}


@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({"per_layer": 0}, "per_layer"),
        ({"query_key_norms": False}, "_norm"),
        ({"post_norms": False}, "post_attention_layernorm"),
        ({"post_norms": False}, "post_feedforward_layernorm"),
    ],
)
def test_what_a_family_lacks_is_not_asked_for(changes: dict[str, Any], gone: str) -> None:
    def named(used: set[str]) -> set[str]:
        return {name for name in used if name.endswith(gone) or (gone == "per_layer" and gone in name)}

    if gone == "_norm":
        changes = changes | {"per_layer": 0}
    assert named(built().used)
    assert not named(built(**changes).used)


def test_values_from_keys_take_one_projection_for_both() -> None:
    shared = (layer(0, "full", 0, values_from_keys=True), layer(1, "full", 0))
    used = built(layers=shared).used
    assert "layers.0.self_attn.k_proj" in used and "layers.0.self_attn.v_proj" not in used


def test_soft_cap_and_query_scale_are_operations_of_their_own() -> None:
    assert built().operations["logits"] != "linear"
    assert built(soft_cap=None).operations["logits"] == "linear"
    scaled = built(query_scale=0.5)
    assert scaled.operations["layers.0.attention.q.scaled"] == "scale"
    assert "layers.0.attention.q.scaled" not in built().operations


@pytest.mark.parametrize("per_layer", [0, P])
def test_results_of_layers_are_made_under_the_names_that_are_told(per_layer: int) -> None:
    network = msgspec.structs.replace(NETWORK, per_layer=per_layer)
    ops = built(per_layer=per_layer)
    names = layer_results(network)
    assert len(names) == len(network.layers) + 1
    assert [ops.made[name] for name in names] == [(ROWS, H)] * len(names)


def test_the_layers_with_a_ring_are_those_that_store() -> None:
    assert [each.index for each in NETWORK.storing] == [0, 1]
