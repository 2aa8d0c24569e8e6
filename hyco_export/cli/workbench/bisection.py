"""What `bisect` does: run two back ends on the same inputs, print where they part, write the picture."""

from pathlib import Path

import msgspec

from hyco_export.cli.console import output, show_rows
from hyco_export.cli.options import open_run, require_built
from hyco_export.core.files import write_json
from hyco_export.core.targets import find_target
from hyco_export.workbench.bisect import (
    LOW_DB,
    Divergence,
    compare_values,
    open_subject,
    require_graph,
    require_source,
)

SHOWN = 12  # tensors around the place in the terminal
LOG_FILE = "bisect.log"


class BisectOptions(msgspec.Struct, frozen=True):
    """What the command line says."""

    graph: str
    reference: str
    candidate: str
    feeds: int
    tensors: str
    out: Path | None
    probe: Path | None


def run_bisect(recipe_path: Path | None, run_dir: Path | None, target: str | None, options: BisectOptions) -> int:
    """Print and write the comparison; 1 where they part, else 0. With `probe`, write what a phone needs instead.

    Raises:
        HycoError: no such graph, back end or folder; an artifact is missing; a graph cannot be compiled.
    """
    require_graph(options.graph)
    for source in (options.reference, options.candidate):
        require_source(source)
    run = open_run(recipe_path, run_dir, target)
    require_built(run)

    from hyco_export.workbench.divergence_picture import write_divergence
    from hyco_export.workbench.graph_values import values_of, write_inputs, write_probe

    chosen = find_target(run.recipe.target)
    subject = open_subject(run.root, options.graph, options.feeds, options.tensors)
    out = options.out or run.root / "bisect"
    out.mkdir(parents=True, exist_ok=True)
    log = out / LOG_FILE
    if options.probe is not None:
        pair = write_probe(subject, options.probe, chosen, log)
        listed = write_inputs(subject, options.probe)
        output.print(f"{pair} gives out {len(subject.tensors)} tensors; inputs: {listed}")
        return 0
    names = (options.reference, options.candidate)
    wanted, found = (values_of(subject, name, chosen, log) for name in names)
    divergence = compare_values(subject, names, wanted, found)
    write_json(out / f"{options.graph}.json", divergence)
    write_divergence(out / f"{options.graph}.svg", divergence)
    _show(divergence)
    output.print(f"\nall {len(divergence.tensors)} tensors: {out / options.graph}.json, .svg", soft_wrap=True)
    return 1 if divergence.first else 0


def _show(divergence: Divergence) -> None:
    marked = {
        name: note for name, note in ((divergence.steepest, "steepest"), (divergence.first, "parts here")) if name
    }
    order = [tensor.name for tensor in divergence.tensors]
    centre = order.index(divergence.first or divergence.steepest or order[-1])
    start = max(0, min(centre - SHOWN // 2, len(order) - SHOWN))
    rows = {
        tensor.name: {
            "SQNR dB": "" if tensor.sqnr_db is None else f"{tensor.sqnr_db:.1f}",
            "drop": "" if tensor.drop_db is None else f"{tensor.drop_db:.1f}",
            "equal": f"{tensor.equal_share:.1%}",
            "": marked.get(tensor.name, "clipped before a tanh" if tensor.saturates else ""),
        }
        for tensor in divergence.tensors[start : start + SHOWN]
    }
    show_rows(
        f"{divergence.graph}: {divergence.candidate} against {divergence.reference}, {divergence.feeds} inputs", rows
    )
    if divergence.first:
        output.print(
            f"\nthey part at {divergence.first}: what it is made of is above {LOW_DB:.0f} dB, or equal", soft_wrap=True
        )
    else:
        output.print(f"\nno tensor is below {LOW_DB:.0f} dB, and all ids are equal: they do not part")
    if divergence.steepest and divergence.steepest != divergence.first:
        output.print(f"the largest loss in one step: {divergence.steepest}")
    if divergence.not_compared:
        output.print(f"{len(divergence.not_compared)} tensors are not compared: one side does not give them out")
