"""Replay on traces of the real engine: the recorded rule gives the recorded verdicts, the others what they would."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hyco_export.cli.app import app
from hyco_export.core.recipe import Synera
from hyco_export.device.drafters import Draft, NullDrafter
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.device.offload import KeepConfident, OffloadPolicy
from hyco_export.errors import HycoError, ProtocolError
from hyco_export.evaluate.replay import chosen_settings, rejudge, replay
from hyco_export.evaluate.traces import read_traces, write_traces
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import RULES
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.protocol.tree import ROOT, Source, Tree
from hyco_export.server.admission import Facts
from hyco_export.server.engine import Engine, LocalTransport
from tests.support.scripted import STOP_ID, VOCAB_SIZE, ScriptedSession, ToyLanguageModel

MODEL = ToyLanguageModel(seed=4, stop_bias=1.0)
INFO = wire.ServerInfo(1, "test", "v", "t", VOCAB_SIZE, [STOP_ID], "", "", 32, 64, 4, list(RULES), "thread-cpu")
PROMPT = [5, 9, 2, 7]
CAP = 12
SAMPLING = wire.Sampling(1.0, 8, 0.9)
SETTINGS = {
    "exact": wire.EXACT,
    "epsilon": wire.Acceptance("epsilon", 0.05),
    "epsilon-at-rejections": wire.Acceptance("epsilon-at-rejections", 0.05, True),
    "typical": wire.Acceptance("typical", 1.0),
}


class LikelyTrees(NullDrafter):
    """Three likely children of the root, and three under the first of them."""

    def propose(self, ids):
        first = np.argsort(-MODEL.logits(ids))[:3].tolist()
        second = np.argsort(-MODEL.logits([*ids, first[0]]))[:3].tolist()
        return Draft(Tree((*first, *second), (ROOT,) * 3 + (0,) * 3, (-1.0,) * 6, (Source.SLM,) * 6))


def record(
    acceptance: wire.Acceptance, trace: bool = True, policy: OffloadPolicy | None = None, **changes: object
) -> list[GenerationTrace]:
    drafter = NullDrafter() if "draft_side" in changes else LikelyTrees()
    engine = Engine(lambda: ScriptedSession(MODEL), Facts(VOCAB_SIZE, frozenset({STOP_ID}), 256, server_steps=4))
    transport = LocalTransport(engine, INFO)
    return [
        generate(
            PROMPT,
            Request("s", f"p{seed}", SAMPLING, acceptance, seed, CAP, trace=trace, stop_ids=(STOP_ID,), **changes),
            drafter,
            transport,
            policy=policy,
        )
        for seed in range(30)
    ]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_recorded_rule_gives_the_recorded_verdicts_through_a_file(name: str, tmp_path: Path) -> None:
    traces = record(SETTINGS[name])
    write_traces(tmp_path / "t.jsonl", traces)
    read = read_traces(tmp_path / "t.jsonl")
    assert list(read) == traces
    for trace in read:
        assert tuple(rejudge(trace, trace.acceptance)) == trace.rounds
    assert {trace.finished for trace in traces} == {"stop", "length"}  # both cuts are replayed
    again = replay(read, SETTINGS[name])
    assert again.differing == 0
    assert again.mat == sum(len(r.tokens) for t in traces for r in t.rounds) / again.rounds


def test_a_chain_that_the_server_drafted_is_replayed_too() -> None:
    traces = record(wire.EXACT, draft_side="server", draft_steps=3)
    assert sum(entry.drafted for trace in traces for entry in trace.rounds) > 20
    assert not any(len(entry.tree) for trace in traces for entry in trace.rounds)
    assert replay(traces, wire.EXACT).differing == 0
    assert replay(traces, wire.Acceptance("epsilon", 0.02)).mat > replay(traces, wire.EXACT).mat


def test_rounds_behind_unverified_tokens_are_cut_where_they_were() -> None:
    """Tokens that the device kept count against the cap, too."""
    traces = record(SETTINGS["epsilon"], policy=KeepConfident(Synera(math.exp(-1.0), unverified=1)))
    last = [trace.rounds[-1] for trace in traces if trace.finished == "length"]
    assert any(entry.kept and len(entry.tokens) == len(entry.accepted) for entry in last)  # no room for the bonus
    for trace in traces:
        assert tuple(rejudge(trace, trace.acceptance)) == trace.rounds
    assert replay(traces, SETTINGS["epsilon"]).differing == 0


def test_other_rules_commit_more_of_the_same_trees() -> None:
    traces = record(SETTINGS["exact"])
    rows = {name: replay(traces, settings) for name, settings in SETTINGS.items()}
    assert rows["exact"].tokens_by_rule["threshold only"] == 0 and rows["exact"].threshold_stops == 0
    assert rows["exact"].mat < rows["epsilon-at-rejections"].mat <= rows["epsilon"].mat
    assert rows["epsilon"].differing > 0 and rows["typical"].tokens_by_rule["threshold only"] > 0
    assert rows["epsilon"].threshold_stops > 0
    assert replay(traces, wire.Acceptance("epsilon", 0.05, True)).threshold_stops == 0


def test_the_evidence_is_what_the_verifier_saw() -> None:
    trace = record(SETTINGS["exact"])[0]
    ids = [*PROMPT, *trace.tokens]
    for entry in trace.rounds:
        assert entry.evidence is not None
        assert (tuple(entry.evidence.tokens), tuple(entry.evidence.parents)) == (entry.tree.tokens, entry.tree.parents)
        logits = MODEL.logits(ids[: entry.length]).astype(np.float64)
        raw = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose(entry.evidence.raw_probs[:3], raw[list(entry.tree.tokens[:3])], rtol=1e-6)
        assert len(entry.evidence.draws) == len(entry.evidence.entropies) == len(entry.tree) + 1


def test_traces_without_evidence_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HycoError, match=r"logged without p~ \(record with `hyco-export validate --traces"):
        replay(record(SETTINGS["exact"], trace=False), SETTINGS["exact"])
    with pytest.raises(HycoError, match=r"no round \(give that of a system that asks a server"):
        replay([], SETTINGS["exact"])
    path = tmp_path / "x.jsonl"
    for content, message in (("", "holds no generation"), ("{}\n", "is not a trace"), ("nonsense", "is not a trace")):
        path.write_text(content)
        with pytest.raises(HycoError, match=message):
            read_traces(path)
    with pytest.raises(HycoError, match="cannot be read"):
        read_traces(tmp_path / "missing.jsonl")


def test_rules_are_chosen_by_what_they_read() -> None:
    assert [s.rule for s in chosen_settings(None, (), False, {})] == list(RULES)
    assert {s.epsilon for s in chosen_settings(None, (), False, {}) if "epsilon" in s.rule} == {0.005}
    chosen = chosen_settings(None, (0.1, 0.2), True, {"posterior_alpha": 0.5})
    assert [(s.rule, s.epsilon) for s in chosen] == [
        ("exact", 1.0), ("epsilon", 0.1), ("epsilon", 0.2),
        ("epsilon-at-rejections", 0.1), ("epsilon-at-rejections", 0.2), ("typical", 1.0),
    ]  # fmt: skip
    assert [s.stop_needs_draw for s in chosen] == [False, True, True, True, True, True]
    assert chosen[-1].posterior_alpha == 0.5
    for rule, epsilons, options in (
        ("fuzzy", (), {}),
        ("exact", (0.1,), {}),
        ("epsilon", (), {"posterior_alpha": 1.0}),
    ):
        with pytest.raises(ProtocolError):
            chosen_settings(rule, epsilons, False, options)


def test_the_command_prints_and_writes_the_table(tmp_path: Path) -> None:
    path = tmp_path / "hyco.jsonl"
    write_traces(path, record(SETTINGS["exact"]))
    result = CliRunner().invoke(app, ["replay", str(path), "--epsilon", "0.05", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["acceptance"]["rule"] for row in rows] == list(RULES)
    assert rows[0]["differing"] == 0 and rows[1]["mat"] > rows[0]["mat"]
