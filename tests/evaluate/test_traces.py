"""Generations on disk: what a kill leaves is cut off, what was finished stays, foreign plans are refused."""

import msgspec
import pytest

from hyco_export.errors import ArtifactError
from hyco_export.evaluate.traces import PROGRESS_FILE, TraceStore
from tests.evaluate.synthetic_traces import generation, round_trace


class Inner(msgspec.Struct, frozen=True):
    budget: int = 32
    edge: float = 0.9


class Plan(msgspec.Struct):
    backend: str = "torch"
    prompts: tuple[str, ...] = ("a", "b")
    inner: Inner = Inner()


PLAN = Plan()
A = generation(round_trace((0, 1)), prompt_id="a")
B = generation(round_trace((0,)), round_trace((), number=2), prompt_id="b")


def test_what_was_added_is_there_at_the_next_start(tmp_path):
    store = TraceStore(tmp_path, PLAN, ("hyco", "cloud-mtp"))
    store.add(A)
    store.add(B)
    again = TraceStore(tmp_path, PLAN, ("hyco", "cloud-mtp"))
    assert again.traces("hyco") == [A, B]
    assert again.traces("cloud-mtp") == []
    assert again.holds("hyco", "a", A.seed)
    assert not again.holds("hyco", "a", A.seed + 1)
    assert not again.holds("cloud-mtp", "a", A.seed)


@pytest.mark.parametrize("torn", [b'{"record": "gener', b'{"record"', b"\n", b""])
def test_a_generation_that_was_cut_short_is_made_again(tmp_path, torn):
    store = TraceStore(tmp_path, PLAN, ("hyco",))
    store.add(A)
    whole = store.path("hyco").read_bytes()
    with store.path("hyco").open("ab") as stream:
        stream.write(torn)
    again = TraceStore(tmp_path, PLAN, ("hyco",))
    assert store.path("hyco").read_bytes() == whole
    again.add(B)
    assert TraceStore(tmp_path, PLAN, ("hyco",)).traces("hyco") == [A, B]


def test_lines_without_a_record_in_the_progress_file_do_not_count(tmp_path):
    """A kill between the lines and the progress file."""
    store = TraceStore(tmp_path, PLAN, ("hyco",))
    store.add(A)
    recorded = (tmp_path / PROGRESS_FILE).read_bytes()
    store.add(B)
    (tmp_path / PROGRESS_FILE).write_bytes(recorded)
    assert TraceStore(tmp_path, PLAN, ("hyco",)).traces("hyco") == [A]


def test_another_plan_is_refused_with_what_differs(tmp_path):
    TraceStore(tmp_path, PLAN, ("hyco",))
    with pytest.raises(ArtifactError, match=r"holds another benchmark: backend is torch there, qnn here"):
        TraceStore(tmp_path, Plan("qnn"), ("hyco",))
    with pytest.raises(ArtifactError, match=r"another benchmark: inner.budget is 32 there, 8 here \(give"):
        TraceStore(tmp_path, Plan(inner=Inner(8)), ("hyco",))


def test_missing_bytes_and_damaged_files_are_named(tmp_path):
    store = TraceStore(tmp_path, PLAN, ("hyco",))
    store.add(A)
    content = store.path("hyco").read_bytes()
    store.path("hyco").write_bytes(content[:-5])
    with pytest.raises(ArtifactError, match=r"hyco.jsonl has \d+ of \d+ recorded bytes"):
        TraceStore(tmp_path, PLAN, ("hyco",))
    store.path("hyco").write_bytes(b"x" * len(content))
    with pytest.raises(ArtifactError, match=r"hyco.jsonl cannot be read"):
        TraceStore(tmp_path, PLAN, ("hyco",))
