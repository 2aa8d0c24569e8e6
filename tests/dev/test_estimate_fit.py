"""The fit of the estimates' coefficients: it finds what made the measurements, and moves nothing else far."""

import msgspec
import pytest

from hyco_export.core.estimates import stages
from hyco_export.core.estimates.coefficients import MEASURED, Coefficients
from hyco_export.core.estimates.stages import Estimator
from hyco_export.dev.estimate_fit import Fit, MeasuredStage, fit
from tests.support.family_shapes import PAPER, family_shape, work

ESTIMATORS: dict[str, Estimator] = {
    "capture": stages.capture_estimate,
    "qat-head": stages.qat_estimate,
    "build-keepset": stages.keepset_estimate,
    "convert-head": stages.convert_head_estimate,
    "convert-slm": stages.convert_slm_estimate,
    "compile": stages.compile_estimate,
}


# without the graph on the CPU, which would need more memory than the compiler in the larger family
RECIPE = msgspec.structs.replace(PAPER, compile=msgspec.structs.replace(PAPER.compile, emulated_feeds=0))


def measured(true: Coefficients) -> list[MeasuredStage]:
    """Stages of three families that took exactly what `true` says."""
    return [
        MeasuredStage(
            name,
            str(scale),
            it,
            RECIPE,
            family_shape(scale),
            work(4),
            it(RECIPE, family_shape(scale), work(4), true),
            1.0,
        )
        for scale in (1, 2, 3)
        for name, it in ESTIMATORS.items()
    ]


def test_measurements_that_the_table_explains_leave_it_as_it_is() -> None:
    fitted = fit(measured(MEASURED))
    for name in Coefficients.__struct_fields__:
        assert getattr(fitted, name) == pytest.approx(getattr(MEASURED, name), rel=1e-3), name


def test_changed_coefficients_are_found_again() -> None:
    changed = {"base": 2.0, "trained_weight": 1.6, "compiler": 0.5, "slm_binary": 1.3, "golden_tree": 3.0}
    true = msgspec.structs.replace(MEASURED, **{name: getattr(MEASURED, name) * by for name, by in changed.items()})
    stages_measured = measured(true)
    fitted = fit(stages_measured)
    for name in changed:
        assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=0.1), name
    for stage in stages_measured:
        estimate = stage.estimate(fitted)
        assert estimate.ram_bytes == pytest.approx(stage.took.ram_bytes, rel=0.02), stage.name
        assert estimate.disk_bytes == pytest.approx(stage.took.disk_bytes, rel=0.02), stage.name


def test_what_no_stage_determines_stays() -> None:
    fitted = fit([stage for stage in measured(msgspec.structs.replace(MEASURED, base=5e8)) if stage.name == "capture"])
    assert fitted.base == pytest.approx(5e8, rel=0.05)
    assert (fitted.compiler, fitted.graph_copies) == pytest.approx((MEASURED.compiler, MEASURED.graph_copies))


def test_the_report_sets_both_beside_what_was_measured() -> None:
    stages_measured = measured(msgspec.structs.replace(MEASURED, base=2 * MEASURED.base))
    found = Fit(fit(stages_measured), tuple(stages_measured))
    row = found.errors["capture (1)"]
    assert row["memory_bytes"] == stages_measured[0].took.ram_bytes
    assert (row["memory off"], row["fitted"]) == ("-47%", "+0%")
    assert found.table["base"]["in use"] == MEASURED.base
    assert found.table["base"]["fitted"] == pytest.approx(2 * MEASURED.base, rel=0.05)
    assert set(found.table) == set(Coefficients.__struct_fields__)
