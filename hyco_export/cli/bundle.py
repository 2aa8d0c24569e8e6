"""What `bundle` and `compare` do: build the folder for an app team, judge what came back from a device."""

import shlex
import sys
from pathlib import Path

from hyco_export.cli.console import ConsoleProgress, output, show_metrics, show_next, show_rows
from hyco_export.cli.options import open_run, require_built
from hyco_export.cli.validation import subject_of
from hyco_export.core.numerics import BYTES_PER_MB


def bundle_run(recipe_path: Path | None, run_dir: Path | None, target: str | None, out: Path) -> None:
    """Write the bundle of a run."""
    run = open_run(recipe_path, run_dir, target)
    require_built(run)

    from hyco_export.bundle.folder import CONSUMER, build_bundle
    from hyco_export.bundle.spec import EMULATOR

    with run.lock(), ConsoleProgress() as progress:
        bundle = build_bundle(subject_of(run), out, progress.step)
    size_mb = sum(record.size_bytes for record in bundle.files.values()) / BYTES_PER_MB
    emulated = sum(EMULATOR in case.outputs for case in bundle.cases)
    facts = {
        "target": f"{bundle.target.name}: {bundle.target.marketing_name}, Hexagon v{bundle.target.htp_arch}",
        "compiled by": f"{bundle.toolchain.compiler}, QAIRT {bundle.toolchain.qairt}",
        "golden vectors": f"{len(bundle.cases)}, {emulated} of them from the emulator too",
        "golden sessions": len(bundle.sessions),
        "files": f"{len(bundle.files)}, {size_mb:.1f} MB",
    }
    show_metrics(f"\nbundle -> {out}", facts)
    show_next(shlex.join([sys.executable, str(out / CONSUMER), str(out)]))


def compare_outputs(bundle: Path, outputs: Path) -> int:
    """Print how a device's outputs stand to the golden ones; 1 where something is outside or missing."""
    from hyco_export.bundle.compare import EQUAL, compare

    report = compare(bundle, outputs)
    rows = {
        f"{found.case} {found.tensor}": {"verdict": found.verdict, "origin": found.origin, "by": found.by}
        for found in report.tensors
        if found.verdict != EQUAL
    }
    if rows:
        show_rows("not equal", rows)
    for note in report.notes:
        output.print(note, soft_wrap=True)
    for graph, causes in report.causes.items():
        for cause in causes:
            output.print(f"likely cause, {graph}: {cause}", soft_wrap=True)
    output.print(report.summary, soft_wrap=True)
    return 0 if report.passed else 1
