"""Plans: which system for which aim, and the paper's own figures against its Table 2."""

import re
from pathlib import Path

import msgspec
import pytest

from hyco_export.evaluate.planning.choice import AIMS, change, choice_line, choices_for, choose, make_plan
from hyco_export.evaluate.planning.inputs import PAPER_32K, paper_inputs, read_parts
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
# the same, InfiniteBench Sum, 32K
TABLE_2_32K = {
    "specedge": (-2.9, 10.0),
    "specedge-pd": (-2.9, 8.2),
    "specedge-eps": (-15.7, 12.4),
    "hyco": (-29.2, 21.0),
    "hyco-2p": (-31.9, 18.8),
    "hyco-exact": (-11.9, 16.8),
    "hyco-server-head": (-3.8, 19.8),
}
MISSED = {"hyco-server-head"}  # its g: the paper's 26.8 ms round with the server's head is not the round of Table 2


def outcome(system: str, g: float, speed: float, draft: float = 10.0, size: float = 100.0) -> Outcome:
    return Outcome(system, 100, 20, 5.0, g, speed, draft, size, 100.0, 0.5, {})


def test_the_papers_inputs_give_its_table() -> None:
    """Within 10 %: all seven delivery rates, and the change of g of six."""
    plan = make_plan(paper_inputs(), Options(answers=30))
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


def test_on_long_prompts_server_time_is_within_a_tenth() -> None:
    """Of g itself: a change of 2.9 % would have to be met to three tenths of a percent. Six of seven delivery rates."""
    inputs = msgspec.structs.replace(paper_inputs(), **read_parts(Path(PAPER_32K)))
    baseline, *others = simulate(inputs, Options(answers=20))
    assert baseline.server_ms_per_token == pytest.approx(23.91, rel=0.01)
    missed = set()
    for one in others:
        percent, speed = TABLE_2_32K[one.system]
        assert one.server_ms_per_token == pytest.approx(23.91 * (1 + percent / 100), rel=0.1), one.system
        if one.tokens_per_s != pytest.approx(speed, rel=0.1):
            missed.add(one.system)
    assert missed == MISSED
    assert len(others) == 7


def test_the_inputs_of_the_documents_are_planned(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "measuring.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(device:.*?)^```$", text, re.DOTALL | re.MULTILINE)
    path = tmp_path / "inputs.yaml"
    path.write_text(block)
    plan = make_plan(msgspec.structs.replace(paper_inputs(), **read_parts(path)), Options(answers=2))
    assert [one.system for one in plan.outcomes] == ["cloud-mtp", "hyco"]
    assert set(plan.outcomes[1].tokens_by_source) == {"chain", "slm", "bonus"}


def test_a_busier_server_is_said_to_be_extrapolated() -> None:
    few = Options(clients=3, answers=2)
    assert any("passes of up to 99 rows" in line for line in make_plan(paper_inputs(), few).assumed)
    assert not any("passes of up to" in line for line in make_plan(paper_inputs(), Options(answers=2)).assumed)


def test_what_the_papers_inputs_assume_is_true_of_them() -> None:
    """Two of their sentences hold figures: they are those of a simulation."""
    inputs, few = paper_inputs(), Options(answers=15)
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
