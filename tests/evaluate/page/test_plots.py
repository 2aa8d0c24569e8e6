"""The page's own pictures."""

import re

import msgspec

from hyco_export.evaluate.page.distributions import distributions
from hyco_export.evaluate.page.plots import contrast_picture, ridges, trade_off, trade_off_points
from hyco_export.evaluate.page.sources import Source
from hyco_export.evaluate.page.tables import compare
from hyco_export.evaluate.quality.evaluation_folder import Contrast


def words(svg: str) -> list[str]:
    return re.findall(r">([^<>]+)</text>", svg)


def test_a_point_that_is_beaten_in_both_is_dominated(bench: Source) -> None:
    cheap = msgspec.structs.replace(bench.systems[1], system="a", server_ms_per_token=1.0, delivery_tokens_per_s=50.0)
    worse = msgspec.structs.replace(cheap, system="b", server_ms_per_token=1.1, delivery_tokens_per_s=40.0)
    fast = msgspec.structs.replace(cheap, system="c", server_ms_per_token=2.0, delivery_tokens_per_s=60.0)
    source = msgspec.structs.replace(bench, systems=(cheap, worse, fast))
    found = {point.name: point.dominated for point in trade_off_points(compare(source))}
    assert found == {"a": False, "b": True, "c": False}


def test_text_that_no_verifier_chose_beats_nobody(bench: Source) -> None:
    unverified = msgspec.structs.replace(
        bench.systems[1], system="u", server_ms_per_token=0.1, delivery_tokens_per_s=99.0, unverified_tokens=5
    )
    alone = msgspec.structs.replace(unverified, system="alone", rounds=0)
    source = msgspec.structs.replace(bench, systems=(bench.systems[0], unverified, alone))
    points = trade_off_points(compare(source))
    assert [(point.name, point.dominated, point.verified) for point in points] == [
        ("cloud-mtp", False, True),
        ("u", False, False),
    ]
    assert {"cloud-mtp", "u"} <= set(words(trade_off(points)))


def test_every_system_has_a_row_and_the_pages_colours(bench: Source) -> None:
    for one in distributions(bench):
        drawn = ridges(one)
        assert {"cloud-mtp", "hyco", one.measure.unit} <= set(words(drawn))
        assert "var(--series-1)" in drawn and not re.search(r"#0[0-9a-f]010\d", drawn)


def test_contrasts_are_drawn_with_their_unit() -> None:
    rows = (
        Contrast("cloud-mtp", "hyco", "g", "all", -0.386, -0.395, -0.377, 480, False),
        Contrast("a", "b", "g", "qa", -0.2, -0.3, -0.1, 40, True),
    )
    assert {"hyco, all", "b, qa", "difference, %"} <= set(words(contrast_picture(rows)))
    points = [msgspec.structs.replace(row, measure="judge") for row in rows]
    assert "difference" in words(contrast_picture(points))
