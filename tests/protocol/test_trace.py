"""The record of a generation: written as JSON lines in time order, read back equal."""

import msgspec
import pytest

from hyco_export.protocol.trace import GenerationTrace, LocalTrace, PrimeTrace, RoundTrace, from_lines, to_lines
from hyco_export.protocol.tree import ROOT, Source, Tree
from hyco_export.protocol.wire import Traffic

TRAFFIC = Traffic(10, 20, 110, 120)
TREE = Tree((5, 6), (ROOT, 0), (-0.5, -1.25), (Source.CHAIN, Source.SLM))


def prime(start_ms: float, lost_ms: float | None = None) -> PrimeTrace:
    return PrimeTrace(start_ms, 7, 0, 5, "", 3.0, 1.0, 2.0, TRAFFIC, lost_ms)


def verify(number: int, start_ms: float, lost_ms: float | None = None) -> RoundTrace:
    return RoundTrace(
        round=number,
        start_ms=start_ms,
        length=8,
        tree=TREE,
        accepted=(0,),
        drawn=(True,),
        tokens=(5, 9),
        finished="",
        drafted=0,
        head_ms=1.0,
        slm_ms=2.0,
        draft_ms=3.5,
        wait_ms=4.0,
        commit_ms=0.5,
        server_ms=3.0,
        traffic=TRAFFIC,
        lost_ms=lost_ms,
    )


def local(start_ms: float) -> LocalTrace:
    return LocalTrace(start_ms, 9, TREE, (0,), (5,), "", 1.0, 2.0, 3.0)


def generation(name: str, lost_ms: float | None = None) -> GenerationTrace:
    return GenerationTrace(
        system="hyco",
        prompt_id=name,
        seed=3,
        prompt_length=7,
        tokens=(5, 5, 9),
        finished="length",
        total_ms=40.0,
        first_token_ms=4.0,
        primes=(prime(0.0), prime(20.0, lost_ms)),
        rounds=(verify(1, 5.0), verify(1, 25.0, lost_ms), verify(2, 35.0)),
        locals=(local(30.0),),
        stop_ids=(1,),
    )


def test_generations_come_back_equal_one_after_the_other() -> None:
    written = [generation("a"), generation("b", lost_ms=6.0)]
    lines = [line for trace in written for line in to_lines(trace)]
    assert list(from_lines(lines)) == written
    assert list(from_lines([])) == []


def test_calls_and_local_steps_stand_in_time_order_under_their_generation() -> None:
    records = [msgspec.json.decode(line) for line in to_lines(generation("a"))]
    assert [record["record"] for record in records] == [
        "generation", "prime", "round", "prime", "round", "local", "round"
    ]  # fmt: skip
    assert [record["start_ms"] for record in records[1:]] == [0.0, 5.0, 20.0, 25.0, 30.0, 35.0]
    assert (records[0]["primes"], records[0]["rounds"]) == ([], [])


def test_a_file_that_does_not_begin_with_a_generation_is_refused() -> None:
    _, *calls = to_lines(generation("a"))
    with pytest.raises(ValueError, match="starts with a generation record, not with a call"):
        list(from_lines(calls))
    with pytest.raises(msgspec.DecodeError):
        list(from_lines([b'{"record": "something else"}']))


def test_disturbed_calls_are_those_with_lost_time() -> None:
    assert generation("a").disturbed == ()
    assert [call.start_ms for call in generation("a", lost_ms=0.0).disturbed] == [20.0, 25.0]
