"""The log of replies: gone on with after a kill, newest reply first, and what replies cost."""

from pathlib import Path

import msgspec
import pytest

from hyco_export.errors import ArtifactError
from hyco_export.evaluate.quality.judge.log import Judgement, JudgementLog, Prices


def judgement(value: float | None = 80.0, question: str = "1", model: str = "m") -> Judgement:
    reason = "" if value is not None else "refused: by the judge"
    return Judgement(
        "hyco", question, 1, 0, "judge", model, "digest", value, reason, "80", "stop", 9, 1, 1, {"model": model}
    )


def test_replies_are_found_again_by_another_process(tmp_path: Path) -> None:
    JudgementLog(tmp_path).add(judgement())
    again = JudgementLog(tmp_path)
    assert again.find(judgement().key) == judgement()
    assert again.find(judgement(question="2").key) is None and again.find(judgement(model="other").key) is None
    assert again.has_reply_of("m") and not again.has_reply_of("other")


def test_a_kill_in_the_middle_of_a_line_loses_that_line_alone(tmp_path: Path) -> None:
    log = JudgementLog(tmp_path)
    log.add(judgement())
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + whole[:40])
    again = JudgementLog(tmp_path)
    assert log.path.read_bytes() == whole
    again.add(judgement(question="2"))
    assert JudgementLog(tmp_path).find(judgement(question="2").key)


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    log = JudgementLog(tmp_path)
    log.path.write_bytes(b"{}\n" + msgspec.json.encode(judgement()) + b"\n")
    with pytest.raises(ArtifactError, match=r"judgements.jsonl, line 1, cannot be read"):
        JudgementLog(tmp_path)


def test_of_two_replies_to_a_request_the_newest_counts_and_both_are_kept(tmp_path: Path) -> None:
    log = JudgementLog(tmp_path)
    log.add(judgement(None))
    assert not log.has_reply_of("m")
    log.add(judgement(70.0))
    again = JudgementLog(tmp_path).find(judgement().key)
    assert again is not None and again.value == 70.0
    assert len(log.path.read_bytes().splitlines()) == 2


def test_prices_are_for_a_million_tokens() -> None:
    assert Prices(2.0, 8.0).of(500_000, 250_000) == 3.0
    assert Prices(None, 8.0).of(500_000, 250_000) == 2.0
    assert Prices(None, None).of(1, 1) is None
