"""What a process of a launch computes and keeps; launches of several processes are tested with the server."""

import os

import pytest
import torch

from hyco_export.core.handoff import KvShape
from hyco_export.errors import ProcessGroupError
from hyco_export.models import process_group
from hyco_export.models.process_group import ALONE, HeadShares, ProcessGroup, divides_heads, first_to_fail
from tests.support import builders

CPU = torch.device("cpu")
TEXT = builders.text_config("SSFSF", 60, builders.HIDDEN)  # K/V heads: 2 in sliding layers, 1 in full ones
EVEN = builders.text_config("SSFSF", 60, builders.HIDDEN, num_global_key_value_heads=2)
READ = {3, 4}  # the last layers of each type, which the hand-off reads


class Second(ProcessGroup):
    """Rank 1 of 2, whose tensors the other process has, too."""

    def __init__(self) -> None:
        super().__init__(1, 2, CPU)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, tensor + 100]


def test_a_process_on_its_own_needs_no_messages() -> None:
    assert ALONE.main and ALONE.share([1, 2, 3]) == [1, 2, 3]
    assert ALONE.broadcast({"a": 1}) == {"a": 1}
    ALONE.wait()
    tensor = torch.ones(2)
    assert ALONE.gather(tensor)[0] is tensor
    assert ALONE.model_device == "cpu"
    assert ProcessGroup(0, 1, torch.device("cuda")).model_device == "auto"
    assert ProcessGroup(1, 2, torch.device("cuda", 1)).model_device == "cuda:1"


def test_items_are_divided_without_rest() -> None:
    shares = [ProcessGroup(rank, 3, CPU).share(range(8)) for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_heads_are_divided_only_where_every_layer_can() -> None:
    assert [divides_heads(TEXT, size) for size in (1, 2)] == [True, False]
    assert [divides_heads(EVEN, size) for size in (1, 2, 4)] == [True, True, False]


def test_layers_of_the_hand_off_are_kept_whole_the_others_in_part() -> None:
    shares = HeadShares(Second(), EVEN)
    kept = [shares.kept(layer, KvShape(2, 8)).heads for layer in range(5)]
    assert kept == [2 if layer in READ else 1 for layer in range(5)]
    own = torch.arange(8.0).reshape(1, 1, 1, 8)  # K/V [1, one computed head, R, d]
    keys, values = shares.gathered(4, own, own)
    assert keys.shape == values.shape == (1, 2, 1, 8)
    assert torch.equal(keys[:, 1], own[:, 0] + 100)
    assert torch.equal(shares.computed(4, keys[0]), keys[0, 1:])
    assert shares.gathered(0, own, own)[0] is own and shares.computed(0, own) is own


def test_undivided_heads_are_kept_by_every_process() -> None:
    shares = HeadShares(Second(), TEXT)
    whole = torch.zeros(1, 2, 3, 8)
    assert shares.kept(0, KvShape(2, 8)) == KvShape(2, 8)
    assert shares.gathered(4, whole, whole)[0] is whole and shares.computed(4, whole) is whole


def test_a_lost_process_is_an_error_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(process_group.distributed, "barrier", gone)
    with pytest.raises(ProcessGroupError, match="another process of this launch ended before its work was done"):
        ProcessGroup(0, 2, CPU).wait()


def test_only_one_process_of_a_launch_reports_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "WORLD_SIZE" not in os.environ and first_to_fail()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not first_to_fail()  # no store: the process that failed first has ended the launch
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    assert [first_to_fail(), first_to_fail()] == [True, False]
