"""Refits the coefficients of `--dry-run`'s estimates: builds created families, measures every stage, solves for what
makes the estimates fit.

Every estimate is linear in each coefficient, but for the larger of two terms and for rounding: a few steps of least
squares over relative errors suffice. What the runs do not determine stays near its present value.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import msgspec
import numpy as np

from hyco_export.core.artifact import read_manifest
from hyco_export.core.estimates.coefficients import MEASURED, Coefficients, descriptions
from hyco_export.core.estimates.shapes import FamilyShape
from hyco_export.core.estimates.stages import Estimate, Estimator, Work
from hyco_export.core.recipe import Recipe
from hyco_export.core.recipe_loading import load_recipe
from hyco_export.dev.created.family import DEFAULT_SEED, create_family
from hyco_export.dev.created.recipe import RECIPE_FILE
from hyco_export.errors import HycoError
from hyco_export.models.families.released_configs import Scale
from hyco_export.models.shapes import head_shape, slm_shape, verifier_shape
from hyco_export.models.verifier import load_config
from hyco_export.stages.forecast import expected_work
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.table import stages_of

STEPS = 4  # of the solver; terms that swap places in a maximum settle in two
RELATIVE_STEP = 1e-2  # of a coefficient, to see how an estimate moves: large against rounding to whole bytes
PULL = 3e-2  # weight of staying: a coefficient that doubles counts as much as an estimate that is off by 3 %
SMALLEST, LARGEST = 0.1, 10.0  # times its value, what one fit may make of a coefficient
ERROR_LINES = 5  # of a failed stage's output

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class MeasuredStage:
    """One stage of one run: what its estimate is computed from, and what it took."""

    name: str
    scale: str
    estimator: Estimator
    recipe: Recipe
    family: FamilyShape
    work: Work
    took: Estimate
    wall_s: float

    def estimate(self, coefficients: Coefficients) -> Estimate:
        return self.estimator(self.recipe, self.family, self.work, coefficients)


@dataclass(frozen=True)
class Fit:
    """The coefficients that fit best, beside those in use, and the stages that they were fitted to."""

    coefficients: Coefficients
    stages: tuple[MeasuredStage, ...]

    @property
    def table(self) -> dict[str, Mapping[str, object]]:
        """A row a coefficient, to be written into `core/estimates/coefficients.py`."""
        return {
            name: {
                "in use": getattr(MEASURED, name),
                "fitted": _short(getattr(self.coefficients, name)),
                "unit": it.unit,
            }
            for name, it in descriptions().items()
        }

    @property
    def errors(self) -> dict[str, Mapping[str, object]]:
        """A row a stage: what it took, and by how much the estimates are off, now and with the fit."""
        rows: dict[str, Mapping[str, object]] = {}
        for stage in self.stages:
            now, fitted = stage.estimate(MEASURED), stage.estimate(self.coefficients)
            rows[f"{stage.name} ({stage.scale})"] = {
                "wall_s": round(stage.wall_s, 1),
                "memory_bytes": stage.took.ram_bytes,
                "memory off": f"{now.ram_bytes / stage.took.ram_bytes - 1:+z.0%}",
                "fitted": f"{fitted.ram_bytes / stage.took.ram_bytes - 1:+z.0%}",
                "disk_bytes": stage.took.disk_bytes,
                "disk off": f"{now.disk_bytes / stage.took.disk_bytes - 1:+z.0%}",
                "disk fitted": f"{fitted.disk_bytes / stage.took.disk_bytes - 1:+z.0%}",
            }
        return rows


def fit_estimates(scales: Sequence[Scale], on_progress: Progress) -> Fit:
    """Build a created family of each scale in a temporary folder and fit the coefficients to all of their stages.

    Raises:
        HycoError: a stage failed.
    """
    measured: list[MeasuredStage] = []
    for scale in scales:
        with TemporaryDirectory(prefix="hyco-estimates-") as folder:
            measured += measure(scale, Path(folder), on_progress)
    return Fit(fit(measured), tuple(measured))


def measure(scale: Scale, folder: Path, on_progress: Progress) -> list[MeasuredStage]:
    """Build every stage of a created family, each in a process that holds nothing else.

    Raises:
        HycoError: a stage failed; with the end of what it printed.
    """
    create_family(folder / "family", scale, None, DEFAULT_SEED, lambda part, share: None)
    path = folder / "family" / RECIPE_FILE
    recipe = load_recipe(path)
    run = RunFolder(folder / "run", recipe, path.parent)
    family = _shapes(path.parent)
    work = expected_work(run, path.parent / "verifier", [])
    found, stages = [], stages_of(recipe)
    for done, stage in enumerate(stages):
        on_progress(f"{scale.name}: {stage.name}", done, len(stages))
        command = stage.name.partition("@")[0]
        build = [sys.executable, "-m", "hyco_export", command, "--recipe", str(path), "--run", str(run.root)]
        ended = subprocess.run(build, capture_output=True, text=True)
        if ended.returncode:
            said = " ".join((ended.stderr or ended.stdout).splitlines()[-ERROR_LINES:])
            raise HycoError(f"{stage.name} of scale {scale.name} failed: {said}", "run it alone: " + " ".join(build))
        manifest = read_manifest(run.folder(stage))
        binaries = sum(record.size_bytes for name, record in manifest.files.items() if name.endswith(".bin"))
        took = Estimate(manifest.size_bytes, manifest.total_rss_bytes, binary_bytes=binaries)
        estimator = cast(Estimator, stage.estimate)  # every stage of the table has one that takes coefficients
        found.append(MeasuredStage(stage.name, scale.name, estimator, recipe, family, work, took, manifest.wall_s))
    return found


def _shapes(folder: Path) -> FamilyShape:
    verifier, head, slm = (load_config(folder / name) for name in ("verifier", "head", "slm"))
    return FamilyShape(verifier_shape(verifier), head_shape(head), slm_shape(slm, None))


def fit(stages: Sequence[MeasuredStage], start: Coefficients = MEASURED) -> Coefficients:
    """The coefficients near `start` that make the estimates of these stages fit what they took."""
    names = Coefficients.__struct_fields__
    factors = np.ones(len(names))  # [C] times the values of `start`
    for _ in range(STEPS):
        errors = _errors(stages, _scaled(start, factors))  # [E]
        columns = []
        for index in range(len(names)):
            moved = factors.copy()
            moved[index] += RELATIVE_STEP
            columns.append((_errors(stages, _scaled(start, moved)) - errors) / RELATIVE_STEP)
        jacobian = np.stack(columns, axis=1)  # [E, C]
        # least squares over [errors, pull]: |errors + J d|^2 + PULL^2 |factors - 1 + d|^2
        matrix = np.concatenate([jacobian, PULL * np.eye(len(names))])
        wanted = np.concatenate([-errors, PULL * (1 - factors)])
        factors = np.clip(factors + np.linalg.lstsq(matrix, wanted, rcond=None)[0], SMALLEST, LARGEST)
    return _scaled(start, factors)


def _scaled(start: Coefficients, factors: np.ndarray) -> Coefficients:
    names = Coefficients.__struct_fields__
    return Coefficients(
        **{name: getattr(start, name) * float(factor) for name, factor in zip(names, factors, strict=True)}
    )


def _errors(stages: Sequence[MeasuredStage], coefficients: Coefficients) -> np.ndarray:
    """Relative errors [E] of all estimates: disk, memory, and binaries where there are any."""
    errors = []
    for stage in stages:
        estimate = msgspec.structs.asdict(stage.estimate(coefficients))
        for name, took in msgspec.structs.asdict(stage.took).items():
            if took:
                errors.append(estimate[name] / took - 1)
    return np.array(errors)


def _short(value: float) -> float:
    """Three significant digits: estimates are close within a fifth."""
    return float(f"{value:.3g}")
