"""The table of measured coefficients: every row says its unit, what it counts and where it was measured."""

import msgspec

from hyco_export.core.estimates.coefficients import MEASURED, Coefficients, descriptions


def test_every_coefficient_has_a_unit_a_meaning_and_a_condition() -> None:
    described = descriptions()
    assert tuple(described) == Coefficients.__struct_fields__
    for name, row in described.items():
        assert row.unit.startswith(("bytes of memory", "bytes of disk")), name
        assert row.meaning and row.condition, name
        assert getattr(MEASURED, name) > 0
    assert len({row.meaning for row in described.values()}) == len(described)


def test_the_table_cannot_be_changed_by_a_reader() -> None:
    other = msgspec.structs.replace(MEASURED, base=1.0)
    assert (other.base, MEASURED.base) == (1.0, Coefficients().base)
