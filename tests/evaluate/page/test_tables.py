"""What is shown of a value, and what it is sorted by."""

import pytest

from hyco_export.evaluate.page.tables import Cell, number, pairs, percent, spread, text


@pytest.mark.parametrize(
    ("cell", "shown", "value"),
    [
        (number(1234.567, 1), "1,234.6", 1234.567),
        (number(-0.26, 2, sign=True), "\N{MINUS SIGN}0.26", -0.26),
        (number(3.0, 0, unit=" B"), "3 B", 3.0),
        (number(float("nan")), "\N{EN DASH}", None),
        (number(None), "\N{EN DASH}", None),
        (percent(0.1234), "12.3 %", 0.1234),
        (percent(-0.386, 1, sign=True), "\N{MINUS SIGN}38.6 %", -0.386),
        (percent(None), "\N{EN DASH}", None),
        (text("qa"), "qa", "qa"),
    ],
)
def test_a_cell_rounds_what_it_shows_and_keeps_what_it_is(cell: Cell, shown: str, value: object) -> None:
    assert (cell.shown, cell.value) == (shown, value)


def test_an_interval_shows_its_ends() -> None:
    assert spread(-1.24, 0.8, 1, sign=True) == "\N{MINUS SIGN}1.2 … +0.8"


def test_inner_maps_are_rows_too() -> None:
    table = pairs("How", {"link": None, "link_waits": False, "drafting": {"budget": 32, "sled": {"longest": 8}}})
    assert [(name.shown, value.shown) for name, value in table.rows] == [
        ("link", "\N{EN DASH}"),
        ("link waits", "no"),
        ("drafting.budget", "32"),
        ("drafting.sled.longest", "8"),
    ]
