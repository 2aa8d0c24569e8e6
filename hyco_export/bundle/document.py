"""BUNDLE.md, the specification in words, made from `bundle.json`."""

from collections.abc import Iterable
from pathlib import Path

import jinja2

from hyco_export.bundle.spec import Bundle, Tensor

TEMPLATE = "BUNDLE.md.j2"
DOCUMENT = "BUNDLE.md"
LISTS = "qnn-net-run"
PROTOCOL = Path(__file__).parents[1] / "protocol" / "PROTOCOL.md"


def write_document(folder: Path, bundle: Bundle) -> None:
    """Write BUNDLE.md, and the wire protocol that it refers to beside it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown
    )
    text = environment.get_template(TEMPLATE).render(
        b=bundle,
        head=bundle.head_spec,
        slm=bundle.slm_spec,
        table=tensor_table,
        lists=LISTS,
        head_graph=bundle.graphs["head"],
    )
    (folder / DOCUMENT).write_text(text, encoding="utf-8")
    (folder / PROTOCOL.name).write_bytes(PROTOCOL.read_bytes())


def tensor_table(tensors: Iterable[Tensor]) -> str:
    """A Markdown table of inputs or outputs."""
    rows = ["| name | type, shape | scale | zero point | meaning | handling |", "|---|---|---|---|---|---|"]
    for one in tensors:
        shape = " x ".join(map(str, one.shape))
        scale = "" if one.scale is None else f"{one.scale:.9g}"
        zero = "" if one.zero_point is None else str(one.zero_point)
        rows.append(f"| `{one.name}` | {one.dtype} [{shape}] | {scale} | {zero} | {one.meaning} | {one.handling} |")
    return "\n".join(rows)
