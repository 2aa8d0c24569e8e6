"""Training follows the plan, is deterministic, and makes the 4-bit head draft more like the original."""

import math

import numpy as np
import pytest
import torch

from hyco_export.core.artifact import PartialBuild
from hyco_export.errors import RecipeError
from hyco_export.models.capture import teacher_forced
from hyco_export.models.head import quantisers
from hyco_export.models.head.agreement import compare_heads, match_verifier, share_won_back
from hyco_export.models.head.qat import (
    Checkpoints,
    TrainingPlan,
    divergences,
    groups,
    packed_loss,
    rate_factor,
    shuffled_forever,
    train,
)
from hyco_export.models.head.quantisers import LayerGrid, searched_on
from hyco_export.models.head.unroll import head_spans, pack, response_rows, unroll
from tests.support import builders

VOCAB = 60
PLAN = TrainingPlan(
    learning_rate=3e-3,
    betas=(0.9, 0.95),
    weight_decay=0.0,
    gradient_norm_clip=1.0,
    warmup_steps=4,
    steps=16,
    accumulation=2,
    unrolled_steps=3,
    autocast=torch.float32,
    seed=5,
)


@pytest.fixture(scope="module")
def teacher():
    return builders.small_head(VOCAB)


@pytest.fixture(scope="module")
def sequences(teacher):
    verifier = builders.small_verifier(VOCAB)
    captures = [teacher_forced(verifier, builders.random_ids(24, VOCAB, seed), 8) for seed in range(4)]
    return [response_rows(capture, head_spans(teacher.config), 1000) for capture in captures]


PER_CHANNEL = LayerGrid(4)


def fake_quantised(grid=PER_CHANNEL):
    student = builders.small_head(VOCAB)
    quantisers.untie_output_layer(student)
    ratios = np.linspace(1.0, 0.6, 9)
    weights = quantisers.linear_weights(student)
    quantisers.attach(student, searched_on(weights, dict.fromkeys(weights, grid), ratios))
    return student


def test_training_lowers_the_divergence_at_every_depth(teacher, sequences):
    student = fake_quantised()
    norms = {name: p.clone() for name, p in student.named_parameters() if name.endswith("norm.weight")}
    before = compare_heads(teacher, student, sequences, 3)
    curve = train(student, teacher, sequences, PLAN, lambda point: None)
    after = compare_heads(teacher, student, sequences, 3)

    assert [point.step for point in curve] == list(range(PLAN.steps))
    for worse, better in zip(before, after, strict=True):
        assert better.kl < 0.8 * worse.kl
    for name, parameter in student.named_parameters():
        if name in norms:
            assert torch.equal(parameter, norms[name])
    assert len(norms) > 3


def test_the_same_seed_gives_the_same_integers(teacher, sequences):
    found = []
    for _ in range(2):
        student = fake_quantised()
        curve = train(student, teacher, sequences, PLAN, lambda point: None)
        found.append((curve, quantisers.trained_matrices(student)))
    assert found[0][0] == found[1][0]
    for name, matrix in found[0][1].items():
        np.testing.assert_array_equal(matrix.integers, found[1][1][name].integers)


@pytest.mark.parametrize("grid", [LayerGrid(4), LayerGrid(4, block=8)], ids=["per channel", "blocks"])
def test_free_grids_move_and_what_is_stored_is_what_was_trained(teacher, sequences, grid):
    student = fake_quantised(grid)
    before = {name: matrix.scales for name, matrix in quantisers.trained_matrices(student).items()}
    quantisers.free_grids(student)
    train(student, teacher, sequences, PLAN, lambda point: None)
    x = torch.randn(3, student.pre_projection.in_features, generator=torch.Generator().manual_seed(0))
    while_training = student.pre_projection(x).detach()
    after = quantisers.trained_matrices(student)
    assert all(not np.array_equal(matrix.scales, before[name]) for name, matrix in after.items())
    stored = torch.from_numpy(after["pre_projection"].real()).float()
    torch.testing.assert_close(torch.nn.functional.linear(x, stored), while_training, atol=1e-5, rtol=1e-5)


# before the first checkpoint, between two, and right after one
@pytest.mark.parametrize(("stop", "free"), [(3, False), (9, True), (12, False)])
def test_an_interrupted_training_ends_with_the_same_bytes(teacher, sequences, tmp_path, stop, free):
    def run(report, checkpoints):
        student = fake_quantised()
        if free:
            quantisers.free_grids(student)
        curve = train(student, teacher, sequences, PLAN, report, checkpoints=checkpoints)
        return curve, quantisers.trained_matrices(student)

    def interrupt(point):
        if point.step == stop:
            raise KeyboardInterrupt

    wanted_curve, wanted = run(lambda point: None, None)
    checkpoints = Checkpoints(PartialBuild(tmp_path), 4)
    with pytest.raises(KeyboardInterrupt):
        run(interrupt, checkpoints)
    assert checkpoints.newest() == stop // 4 * 4
    seen = []
    curve, found = run(seen.append, checkpoints)

    assert curve == wanted_curve == seen
    for name, matrix in wanted.items():
        np.testing.assert_array_equal(found[name].integers, matrix.integers)
        np.testing.assert_array_equal(found[name].scales, matrix.scales)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_a_damaged_checkpoint_is_not_gone_on_from(teacher, sequences, tmp_path):
    checkpoints = Checkpoints(PartialBuild(tmp_path), 4)
    student = fake_quantised()
    curve = train(student, teacher, sequences, PLAN, lambda point: None, checkpoints=checkpoints)
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    assert checkpoints.newest() == 0
    assert train(fake_quantised(), teacher, sequences, PLAN, lambda point: None, checkpoints=checkpoints) == curve


def test_a_broken_loss_stops_the_training(teacher, sequences):
    student = fake_quantised()
    with torch.no_grad():
        student.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RecipeError, match="the training loss is nan at step 0") as caught:
        train(student, teacher, sequences, PLAN, lambda point: None)
    assert caught.value.hint == "lower $.qat.learning_rate"


def test_the_loss_is_the_mean_over_depths(teacher, sequences):
    student = fake_quantised()
    rows = sequences[0]
    with torch.no_grad():
        pairs = zip(unroll(teacher, rows, 3), unroll(student, rows, 3), strict=True)
        wanted = torch.stack([divergences(left, right).mean() for left, right in pairs]).mean()
    torch.testing.assert_close(packed_loss(student, teacher, rows, PLAN), wanted)


def test_a_pack_has_the_loss_of_its_sequences(teacher, sequences):
    student = fake_quantised()
    short = sequences[2].select(torch.arange(len(sequences[2]) - 2, len(sequences[2])))  # fewer roots than depths
    parts = [sequences[0], short, sequences[1]]
    alone = [packed_loss(student, teacher, rows, PLAN) for rows in parts]
    torch.testing.assert_close(packed_loss(student, teacher, pack(parts), PLAN), torch.stack(alone).sum())


def test_groups_keep_order_and_stay_within_the_limit(sequences):
    sizes = [len(rows) for rows in sequences]
    assert len(set(sizes)) == 1
    found = list(groups(sequences, 2 * sizes[0]))
    assert found == [list(sequences[:2]), list(sequences[2:])]
    assert list(groups(sequences, 1)) == [[rows] for rows in sequences]
    assert torch.equal(pack(found[1]).answers[: sizes[0]], sequences[2].answers)


def test_autocast_trains_in_lower_precision(teacher, sequences):
    student = fake_quantised()
    plan = TrainingPlan(**{**vars(PLAN), "autocast": torch.bfloat16})
    low = packed_loss(student, teacher, sequences[0], plan)
    high = packed_loss(student, teacher, sequences[0], PLAN)
    assert low != high
    torch.testing.assert_close(low, high, rtol=0.2, atol=0.01)
    low.backward()
    assert student.lm_head.parametrizations.weight.original.grad.dtype == torch.float32


def test_divergence_is_the_definition():
    wanted, given = torch.tensor([[1.0, 2.0, 0.5]]), torch.tensor([[0.5, 1.0, 1.5]])
    p, q = wanted.softmax(-1), given.softmax(-1)
    torch.testing.assert_close(divergences(wanted, given), (p * (p / q).log()).sum(dim=-1))


def test_the_rate_warms_up_and_falls_as_a_cosine():
    factors = [rate_factor(step, 4, 12) for step in range(12)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[8] == pytest.approx(0.5)
    assert factors[11] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert rate_factor(0, 0, 10) == 1.0


def test_every_sequence_is_seen_once_a_pass():
    order = shuffled_forever(5, 3)
    passes = [[next(order) for _ in range(5)] for _ in range(3)]
    assert [sorted(one) for one in passes] == [[0, 1, 2, 3, 4]] * 3
    assert len({tuple(one) for one in passes}) > 1


def test_a_head_agrees_with_itself_and_is_counted_by_depth(teacher, sequences):
    same = compare_heads(teacher, teacher, sequences, 3)
    assert [depth.top1 for depth in same] == [1.0, 1.0, 1.0]
    assert [depth.kl for depth in same] == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    assert [depth.positions for depth in same] == [sum(len(rows) - depth for rows in sequences) for depth in range(3)]


def test_matches_with_the_verifier_are_counted_on_the_next_token(teacher, sequences):
    hits = sum(int((unroll(teacher, rows, 2)[1].argmax(-1) == rows.answers[1:]).sum()) for rows in sequences)
    total = sum(len(rows) - 1 for rows in sequences)
    assert match_verifier(teacher, sequences, 2)[1] == hits / total


def test_the_share_won_back_is_of_what_was_lost():
    assert share_won_back([0.95, 0.9, 1.0], [0.9, 0.9, 1.0]) == pytest.approx([0.5, 0.0, 1.0])
