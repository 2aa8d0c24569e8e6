"""Plans: which system for which aim, and the paper's own figures against its Table 2."""

import msgspec
import pytest

from hyco_export.evaluate.planning.choice import AIMS, change, choice_line, choices_for, choose, make_plan
from hyco_export.evaluate.planning.inputs import paper_inputs
from hyco_export.evaluate.planning.simulation import Options, Outcome, simulate

# HyCo, Table 2, Spec-Bench: change of g in percent, tokens per second
TABLE_2 = {
    "specedge": (-20.6, 16.1),
    "specedge-pd": (-23.9, 12.1),
    "specedge-eps": (-29.6, 18.9),
    "hyco": (-38.6, 35.0),
    "hyco-2p": (-44.7, 29.0),
    "hyco-exact": (-27.7, 28.2),
    "hyco-server-head": (-14.6, 36.1),
}
MISSED = {"hyco-server-head"}  # its g: the paper's 26.8 ms round with the server's head is not the round of Table 2


def outcome(system: str, g: float, speed: float, draft: float = 10.0, size: float = 100.0) -> Outcome:
    return Outcome(system, 100, 20, 5.0, g, speed, draft, size, 100.0, 0.5, {})


def test_the_papers_inputs_give_its_table() -> None:
    """Within 10 %: all seven delivery rates, and the change of g of six."""
    plan = make_plan(paper_inputs(), Options(answers=60))
    baseline = plan.outcomes[0]
    assert baseline.system == "cloud-mtp"
    assert baseline.server_ms_per_token == pytest.approx(7.81, rel=0.01)
    found = {one.system: one for one in plan.outcomes[1:]}
    assert set(found) == set(TABLE_2)
    missed = set()
    for name, (percent, speed) in TABLE_2.items():
        assert found[name].tokens_per_s == pytest.approx(speed, rel=0.1), name
        if 100 * change(found[name], baseline) != pytest.approx(percent, rel=0.1):
            missed.add(name)
    assert missed == MISSED
    best = {choice.aim: choice.system for choice in plan.choices if choice.drafting or choice.aim == "g"}
    assert best["g"] == "hyco-2p"
    assert best["delivery"] == "hyco"


def test_what_the_papers_inputs_assume_is_true_of_them() -> None:
    """Two of their sentences hold figures: they are those of a simulation."""
    inputs, few = paper_inputs(), Options(answers=40)
    said = " ".join(inputs.assumed)
    speeds = {}
    for tokens in (300, 500, 800):
        workload = msgspec.structs.replace(inputs.workload, answer_tokens=tokens)
        speeds[tokens] = [one.tokens_per_s for one in simulate(msgspec.structs.replace(inputs, workload=workload), few)]
    assert "between 300 and 800 no system's tokens per second move by 5 %" in said
    for tokens in (300, 800):
        assert speeds[tokens] == pytest.approx(speeds[500], rel=0.05)
    device = msgspec.structs.replace(inputs.device, looks_between_passes=True)
    looking = msgspec.structs.replace(inputs, device=device, systems={"specedge-pd": inputs.systems["specedge-pd"]})
    assert "looking between passes it would deliver 15.6" in said
    assert simulate(looking, few)[0].tokens_per_s == pytest.approx(15.6, abs=0.3)


def test_each_aim_has_its_best_and_the_margin_over_the_next() -> None:
    rows = (outcome("cloud-mtp", 8.0, 40.0, 0.0, 50.0), outcome("hyco", 5.0, 35.0), outcome("hyco-2p", 4.0, 34.5, 16.0))
    g = choose(AIMS[0], rows)
    assert (g.system, g.value, g.next_system, g.next_value) == ("hyco-2p", 4.0, "hyco", 5.0)
    assert g.margin == pytest.approx(0.2)
    assert choice_line(g) == "least server time: hyco-2p, 4 server ms per token (next hyco, 5; ahead by 20.0%)"
    fastest, of_drafting = choices_for(AIMS[1], rows)
    assert (fastest.system, of_drafting.system, of_drafting.drafting) == ("cloud-mtp", "hyco", True)
    assert not of_drafting.decided
    assert choice_line(of_drafting).endswith("ahead by 1.4%, too near to tell)")
    alone = choose(AIMS[0], rows[:1])
    assert alone.margin is None
    assert choice_line(alone) == "least server time: cloud-mtp, 8 server ms per token"
