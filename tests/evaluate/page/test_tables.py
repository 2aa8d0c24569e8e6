"""What is shown of a value, and what it is sorted by."""

import msgspec
import pytest

from hyco_export.evaluate.metrics import DepthAcceptance
from hyco_export.evaluate.page.sources import Source
from hyco_export.evaluate.page.tables import (
    Cell,
    Table,
    acceptance_table,
    change,
    compare,
    counts_table,
    number,
    overview_table,
    pairs,
    percent,
    phases_table,
    sources_table,
    spread,
    systems_table,
    text,
)
from hyco_export.evaluate.pictures import RoundTimes


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


def column(table: Table, label: str) -> list[object]:
    place = [one.label for one in table.columns].index(label)
    return [row[place].value for row in table.rows]


def test_cells_hold_the_jsons_figures_unrounded(bench: Source) -> None:
    table = systems_table(compare(bench))
    assert column(table, "MAT") == [system.mat for system in bench.systems]
    assert column(table, "server time") == [system.server_ms_per_token for system in bench.systems]
    assert column(table, "against first") == [None, change(bench.systems[1], bench.systems[0])]
    assert all(row[1].note and " … " in row[1].note for row in table.rows)
    counts = counts_table(bench)
    assert column(counts, "down") == [system.bytes_down.payload_mean for system in bench.systems]
    assert column(counts, "bonus outside keep set") == [system.bonus_miss_share for system in bench.systems]


def test_unknown_keep_sets_and_systems_without_a_server_have_dashes(bench: Source) -> None:
    alone = msgspec.structs.replace(bench.systems[1], system="on-device", rounds=0, unverified_tokens=9)
    source = msgspec.structs.replace(bench, systems=(*bench.systems, alone), keepset_known=False)
    assert column(counts_table(source), "bonus outside keep set") == [None] * 3
    last = systems_table(compare(source)).rows[-1]
    assert last[0].note.endswith("% unverified") and last[2].value is None and last[3].value is None


def test_an_evaluations_own_contrast_is_the_interval_of_the_change(evaluation: Source) -> None:
    changed = compare(evaluation).changes["hyco"]
    assert (changed.low, changed.high) == (pytest.approx(-0.395), pytest.approx(-0.377))


def test_the_overview_names_every_folder(bench: Source, evaluation: Source) -> None:
    table = overview_table([compare(bench), compare(evaluation)])
    assert column(table, "folder") == ["a-bench"] * 2 + ["an-evaluation"] * 2


def test_acceptance_says_share_and_counts_by_depth(bench: Source) -> None:
    steps = (DepthAcceptance(1, 8, 10), DepthAcceptance(2, 4, 8))
    shorter = msgspec.structs.replace(bench.systems[0], chain_acceptance=steps[:1])
    table = acceptance_table([msgspec.structs.replace(bench.systems[1], chain_acceptance=steps), shorter])
    assert [cell.value for cell in table.rows[0][1:]] == [0.8, 0.5, pytest.approx(0.4)]
    assert table.rows[0][1].note == "8 of 10" and table.rows[1][2].value is None


def test_tokens_by_source_add_up_to_mat(bench: Source) -> None:
    for row, system in zip(sources_table(bench.systems).rows, bench.systems, strict=True):
        assert sum(cell.value for cell in row[1:5]) == pytest.approx(system.mat)
        assert sum(cell.value for cell in row[5:]) == pytest.approx(system.mat)


def test_phases_are_those_of_the_picture() -> None:
    table = phases_table([RoundTimes("hyco", 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)])
    assert [cell.value for cell in table.rows[0][1:]] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
