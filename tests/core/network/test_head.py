"""The head's static network by shapes: its inputs in the device's order, its outputs, and the weights it asks for.

Values are compared with transformers' head in tests/models/head/test_static_pass.py.
"""

import msgspec
import pytest

from hyco_export.core.handoff import KvShape
from hyco_export.core.network.head import HeadArchitecture, HeadLayer, HeadNetwork, build
from tests.support.shape_ops import Shape, ShapeOps

H, M, KEPT, WINDOW, MLP = 6, 4, 11, 8, 12
SLIDING, FULL = KvShape(2, 4), KvShape(1, 6)
NETWORK = HeadNetwork(
    HeadArchitecture(
        backbone=H,
        width=M,
        vocab_size=20,
        epsilon=1e-6,
        layers=(HeadLayer("sliding", 4, SLIDING, 1.0), HeadLayer("full", 2, FULL, 0.5)),
        spans={"sliding": 4, "full": None},
        inv_freq={"sliding": (1.0, 0.1), "full": (1.0, 0.1, 0.0)},
    ),
    steps=3,
    runner_up_steps=2,
    window=WINDOW,
    hidden_norm="post",
    final_epsilon=1e-6,
)


def weights(network: HeadNetwork) -> dict[str, Shape]:
    found: dict[str, Shape] = {
        "lm_head": (KEPT, M),
        "post_projection": (H, M),
        "norm": (M,),
        "final_norm": (H,),
        "kept_embeddings": (KEPT, H),
        "projected_embeddings": (KEPT, M),
        "pre_projection": (M, 2 * H),
        "pre_projection.embedding": (M, H),
        "pre_projection.state": (M, H),
    }
    for index, layer in enumerate(network.architecture.layers):
        at, inner = f"layers.{index}", layer.heads * layer.kv.dim
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        found |= {f"{at}.{norm}_layernorm": (M,) for norm in norms}
        found |= {f"{at}.self_attn.q_proj": (inner, M), f"{at}.self_attn.o_proj": (M, inner)}
        found |= {f"{at}.self_attn.q_norm": (layer.kv.dim,), f"{at}.mlp.down_proj": (M, MLP)}
        found |= {f"{at}.mlp.{name}_proj": (MLP, M) for name in ("gate", "up")}
    return found


def built(rows: int = 1, **changes: object) -> ShapeOps:
    network = msgspec.structs.replace(NETWORK, **changes)
    ops = ShapeOps(weights(network))
    build(ops, network, rows)
    return ops


@pytest.mark.parametrize("rows", [1, 5])
def test_inputs_stand_in_the_devices_order_and_outputs_hold_every_step(rows: int) -> None:
    ops = built(rows)
    assert list(ops.inputs.items()) == [
        ("e", (rows, H)),
        ("h", (rows, H)),
        ("cos.sliding", (rows, 4)),
        ("sin.sliding", (rows, 4)),
        ("k.sliding", (2, WINDOW, 4)),
        ("v.sliding", (2, WINDOW, 4)),
        ("mask.sliding", (rows, WINDOW)),
        ("cos.full", (rows, 6)),
        ("sin.full", (rows, 6)),
        ("k.full", (1, WINDOW, 6)),
        ("v.full", (1, WINDOW, 6)),
        ("mask.full", (rows, WINDOW)),
    ]
    assert ops.outputs == {"chain": (3 * rows,), "runner_up": (2 * rows,)}
    assert [ops.made[f"step{step}.logits"] for step in (1, 2, 3)] == [(rows, KEPT)] * 3


def test_without_runner_ups_there_is_no_such_output() -> None:
    ops = built(runner_up_steps=0)
    assert set(ops.outputs) == {"chain"}
    assert "exclude" not in ops.operations.values()


def test_the_last_step_needs_neither_embedding_nor_state() -> None:
    ops = built()
    assert {name for name, operation in ops.operations.items() if operation == "lookup"} == {
        "step1.embedding",
        "step2.embedding",
    }
    single = built(steps=1, runner_up_steps=1)
    assert single.used.isdisjoint({"post_projection", "kept_embeddings"})


@pytest.mark.parametrize(
    ("changes", "asked", "spared"),
    [
        ({}, {"pre_projection", "kept_embeddings"}, {"pre_projection.embedding", "projected_embeddings"}),
        (
            {"split_projection": True},
            {"pre_projection.embedding", "pre_projection.state", "kept_embeddings"},
            {"pre_projection", "projected_embeddings"},
        ),
        (
            {"projected_table": True},
            {"pre_projection.embedding", "pre_projection.state", "projected_embeddings"},
            {"pre_projection", "kept_embeddings"},
        ),
        ({"hidden_norm": "pre"}, {"final_norm"}, set()),
        ({"hidden_norm": "post"}, set(), {"final_norm"}),
    ],
)
def test_each_form_asks_for_its_own_weights(changes: dict[str, object], asked: set[str], spared: set[str]) -> None:
    used = built(**changes).used
    assert asked <= used and used.isdisjoint(spared)
    assert {f"layers.{index}.self_attn.q_norm" for index in (0, 1)} <= used


def test_a_layers_factor_is_an_operation_only_where_it_is_none_of_one() -> None:
    scaled = {name for name, operation in built(steps=1).operations.items() if operation == "scale"}
    assert "step1.layers.1.scaled" in scaled and "step1.layers.0.scaled" not in scaled


def test_another_window_changes_rings_and_masks_alone() -> None:
    wide = ShapeOps(weights(NETWORK))
    build(wide, NETWORK.with_window(32))
    assert (wide.inputs["k.full"], wide.inputs["mask.sliding"]) == ((1, 32, 6), (1, 32))
    assert wide.outputs == built().outputs
    assert NETWORK.architecture.kv_shape("full") == FULL
