"""One self-contained HTML file from sources: tables and pictures that need no script, and the rounds for the viewer."""

from collections.abc import Sequence
from pathlib import Path

import hyco_export
from hyco_export.core.files import storage_errors
from hyco_export.device.systems import SYSTEMS
from hyco_export.evaluate import pictures
from hyco_export.evaluate.charts import css_colors
from hyco_export.evaluate.page.parts import part
from hyco_export.evaluate.page.rounds import MOST_ROUNDS, packed, viewer_data
from hyco_export.evaluate.page.sources import Source
from hyco_export.evaluate.page.tables import compare, overview_table
from hyco_export.evaluate.page.texts import Texts
from hyco_export.evaluate.report import page_template, replace_file

TEMPLATE = "page.html.j2"
STYLE_FILES, SCRIPT_FILE = ("base.css", "page.css"), "page.js"


def write_page(sources: Sequence[Source], texts: Texts, path: Path, most_rounds: int = MOST_ROUNDS) -> int:
    """Write the page, whole or not at all, and return its size in bytes.

    Raises:
        StorageError: it cannot be written.
    """
    content = render(sources, texts, most_rounds).encode()
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return len(content)


def render(sources: Sequence[Source], texts: Texts, most_rounds: int = MOST_ROUNDS) -> str:
    """The page's text; figures are of all rounds, the viewer holds about `most_rounds` of them."""
    assets = Path(__file__).parent / "assets"
    compared = [compare(source) for source in sources]
    measured = [one for one in compared if one.source.systems]
    return page_template(assets, TEMPLATE).render(
        title=" · ".join(source.name for source in sources),
        style="".join((assets / name).read_text(encoding="utf-8") for name in STYLE_FILES),
        script=(assets / SCRIPT_FILE).read_text(encoding="utf-8"),
        overview=overview_table(measured) if len(measured) > 1 else None,
        parts=[part(one) for one in compared],
        rounds=packed(viewer_data(sources, texts, most_rounds)) if any(source.traces for source in sources) else "",
        recorded=sum(source.rounds for source in sources),
        node_legend=css_colors(pictures.SOURCE_COLORS),
        meanings={name: SYSTEMS[name].summary for name in _named_systems(sources) if name in SYSTEMS},
        version=hyco_export.__version__,
    )


def _named_systems(sources: Sequence[Source]) -> dict[str, None]:
    return dict.fromkeys(system.system for source in sources for system in source.systems)
