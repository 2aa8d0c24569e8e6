"""A benchmark: the order of generations, seeds, and going on after an interruption."""

import io
import re

import msgspec
import pytest
from rich.console import Console

from hyco_export.core.recipe import Drafting, SpecEdge
from hyco_export.errors import ArtifactError
from hyco_export.evaluate.bench import (
    BenchPlan,
    bench_table,
    chosen_budgets,
    code_digest,
    measure_bench,
    run_bench,
    texts_digest,
    this_machine,
)
from hyco_export.evaluate.connect import Prompt
from hyco_export.evaluate.metrics import caveats, measure
from hyco_export.evaluate.runs import WARM_UP_TOKENS, prompt_seed
from hyco_export.evaluate.traces import TraceStore, kept_generations
from hyco_export.protocol.wire import PAPER_SAMPLING
from tests.evaluate.synthetic_run import KEEPSET
from tests.evaluate.synthetic_traces import generation, prime_trace, round_trace

PROMPTS = [Prompt("a", (1, 2)), Prompt("b", (3,))]
SEED = 5
PLAN = BenchPlan(
    systems=("cloud-mtp", "hyco"),
    backend="torch",
    prompts=("a", "b"),
    texts=texts_digest(PROMPTS),
    seeds=(SEED, SEED + 1),
    sampling=PAPER_SAMPLING,
    max_new_tokens=16,
    artifacts="c" * 64,
    verifier="v" * 64,
    drafting=Drafting(),
    epsilon=0.005,
    first_reply_rows=0,
    threads=1,
    machine="one core",
    code="0" * 64,
    server="hyco-export 0.1.0",
    clock="thread-cpu",
    link=None,
    link_waits=False,
)


class CountingRunner:
    """One round of five tokens a generation; stops with KeyboardInterrupt after `limit` generations."""

    def __init__(self, limit=10**9):
        self.calls = []
        self._limit = limit

    def generate(self, system, backend, prompt, sampling, max_new_tokens, repeat=0):
        if len(self.calls) == self._limit:
            raise KeyboardInterrupt
        self.calls.append((system, prompt.id, repeat, max_new_tokens))
        made = generation(round_trace((0, 1, 2)), system=system, prompt_id=prompt.id)
        return msgspec.structs.replace(made, seed=prompt_seed(SEED + repeat, prompt.id))


def ignore(*_):
    pass


def store_in(folder):
    return TraceStore(folder, PLAN, PLAN.systems)


def test_systems_take_turns_prompt_by_prompt_and_seed_by_seed_after_a_warm_up(tmp_path):
    runner = CountingRunner()
    run_bench(PLAN, runner, PROMPTS, store_in(tmp_path), ignore)
    assert [call[3] for call in runner.calls[:2]] == [WARM_UP_TOKENS] * 2
    assert [call[:3] for call in runner.calls[2:]] == [
        ("cloud-mtp", "a", 0), ("hyco", "a", 0), ("hyco", "b", 0), ("cloud-mtp", "b", 0),
        ("cloud-mtp", "a", 1), ("hyco", "a", 1), ("hyco", "b", 1), ("cloud-mtp", "b", 1),
    ]  # fmt: skip


def test_an_interrupted_run_makes_only_what_is_missing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_bench(PLAN, CountingRunner(limit=2 + 3), PROMPTS, store_in(tmp_path), ignore)
    assert kept_generations(tmp_path) == f"3 generations in {tmp_path}"
    rest, seen = CountingRunner(), []
    store = store_in(tmp_path)
    run_bench(PLAN, rest, PROMPTS, store, lambda *step: seen.append(step))
    assert [call[:3] for call in rest.calls[2:]][:2] == [("cloud-mtp", "b", 0), ("cloud-mtp", "a", 1)]
    assert seen[0] == ("generations", 4, 8) and seen[-1] == ("generations", 8, 8)
    assert [len(store.traces(system)) for system in PLAN.systems] == [4, 4]
    nothing = CountingRunner()
    run_bench(PLAN, nothing, PROMPTS, store_in(tmp_path), ignore)
    assert nothing.calls == []


def test_a_folder_without_finished_generations_keeps_nothing(tmp_path):
    assert kept_generations(tmp_path) == kept_generations(tmp_path / "none") == ""
    with pytest.raises(KeyboardInterrupt):
        run_bench(PLAN, CountingRunner(limit=2 + 1), PROMPTS, store_in(tmp_path), ignore)
    assert kept_generations(tmp_path) == f"1 generation in {tmp_path}"
    (tmp_path / "progress.json").write_text("{")
    assert kept_generations(tmp_path) == ""  # the next run says what is wrong with it


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"link": "lte"}, "link is None there, lte here"),
        ({"epsilon": 0.05}, "epsilon is 0.005 there, 0.05 here"),
        ({"drafting": Drafting(specedge=SpecEdge(passes=2))}, "drafting.specedge.passes is 4 there, 2 here"),
        ({"machine": "two cores"}, "machine is one core there, two cores here"),
        ({"code": "1" * 64}, "code is 0000"),
        ({"threads": 2}, "threads is 1 there, 2 here"),
        ({"clock": "cuda-events"}, "clock is thread-cpu there, cuda-events here"),
        ({"texts": texts_digest([Prompt("a", (1, 3)), Prompt("b", (3,))])}, "texts is"),
    ],
)
def test_generations_of_other_options_are_not_pooled(tmp_path, changes, message):
    run_bench(PLAN, CountingRunner(), PROMPTS, store_in(tmp_path), ignore)
    with pytest.raises(ArtifactError, match=f"holds another benchmark: {message}"):
        TraceStore(tmp_path, msgspec.structs.replace(PLAN, **changes), PLAN.systems)


def test_the_table_compares_with_the_first_system_and_fits_80_columns(tmp_path):
    store = store_in(tmp_path)
    run_bench(PLAN, CountingRunner(), PROMPTS, store, ignore)
    measured = measure_bench(PLAN, store, KEEPSET)
    assert [system.output_tokens for system in measured] == [20, 20]
    screen = io.StringIO()
    renamed = msgspec.structs.replace(measured[1], system="hyco-server-head")
    Console(width=80, file=screen).print(bench_table((measured[0], renamed), "2 prompts"))
    lines = screen.getvalue().splitlines()
    assert "%" not in next(line for line in lines if line.startswith("cloud-mtp"))
    assert next(line for line in lines if line.startswith("hyco-server-head")).rstrip().endswith("400")


def test_the_table_of_disturbed_systems_keeps_their_names_and_fits_80_columns():
    lost = generation(round_trace((0,)), primes=(prime_trace(), prime_trace(continue_from=3, lost_ms=9.0)))
    screen = io.StringIO()
    systems = [measure(name, [lost], KEEPSET) for name in ("cloud-mtp", "hyco-server-head")]
    Console(width=80, file=screen).print(bench_table(systems, "1 prompt"))
    lines = screen.getvalue().splitlines()
    assert "1 primed again" not in screen.getvalue()  # it stands in the notes
    assert all("1 primed again" in note for note in caveats(systems)) and len(caveats(systems)) == 2
    assert next(line for line in lines if line.startswith("hyco-server-head")).rstrip().endswith("400")


def test_machine_and_code_have_names():
    assert re.fullmatch(r".+, \d+ cores", this_machine())
    assert re.fullmatch("[0-9a-f]{64}", code_digest()) and code_digest() == code_digest()


def test_what_a_device_chose_to_send_is_said_and_a_fixed_number_is_not(tmp_path):
    auto = msgspec.structs.replace(PLAN, drafting=Drafting(budget="auto"))
    store = TraceStore(tmp_path, auto, auto.systems)
    run_bench(auto, CountingRunner(), PROMPTS, store, ignore)
    sent = len(round_trace((0, 1, 2)).tree)
    each = f"{sent:.1f} ({sent} / {sent} / {sent})"
    line = f"nodes sent a round, mean (p5 / p50 / p95): cloud-mtp {each}, hyco {each}"
    assert chosen_budgets(auto, store) == line
    assert chosen_budgets(PLAN, store) == ""
