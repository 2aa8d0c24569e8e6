"""The target table and its look-up."""

import msgspec
import pytest

from hyco_export.core.targets import TARGETS, Target, find_target
from hyco_export.errors import CompileError, HycoError


def test_sm8850_is_soc_87_on_v81_with_8_mb() -> None:
    target = find_target("sm8850")
    assert (target.soc_model, target.htp_arch, target.vtcm_bytes) == (87, 81, 8 * 2**20)


def test_sm8845_shares_the_architecture_but_not_the_soc_model() -> None:
    # a binary for one is refused by the other: they must never be mixed up
    assert find_target("sm8845").htp_arch == find_target("sm8850").htp_arch
    assert find_target("sm8845").soc_model != find_target("sm8850").soc_model


def test_soc_models_and_names_are_unique() -> None:
    assert len(TARGETS) >= 7
    assert len({target.soc_model for target in TARGETS.values()}) == len(TARGETS)
    assert len({target.soc for target in TARGETS.values()}) == len(TARGETS)
    assert all(key == target.name == key.lower() for key, target in TARGETS.items())


def test_case_and_spaces_do_not_matter() -> None:
    assert find_target(" SM8850 ") is TARGETS["sm8850"]


def test_unknown_target_lists_the_known_ones_and_the_closest() -> None:
    with pytest.raises(CompileError) as caught:
        find_target("sm885")
    assert caught.value.message == "unknown target 'sm885'"
    assert caught.value.hint == (
        "did you mean sm8850? known targets: sm8850, sm8845, sm8750, sm8650, sm8550, x-elite, x2-elite"
    )


def test_unknown_target_without_a_near_name_only_lists() -> None:
    with pytest.raises(HycoError, match="known targets: sm8850") as caught:
        find_target("tpu")
    assert "did you mean" not in str(caught.value)


def test_target_survives_json() -> None:
    target = find_target("x2-elite")
    assert msgspec.json.decode(msgspec.json.encode(target), type=Target) == target
