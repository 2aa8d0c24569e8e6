"""The file itself."""

import re
from html.parser import HTMLParser
from pathlib import Path

from hyco_export.evaluate.charts import DARK, LIGHT
from hyco_export.evaluate.page.page import render, write_page
from hyco_export.evaluate.page.sources import read_sources
from hyco_export.evaluate.page.texts import Texts
from hyco_export.evaluate.traces import write_traces
from tests.evaluate.page.folders import answers

ASSETS = Path(render.__code__.co_filename).parent / "assets"


class Elements(HTMLParser):
    """Counts what a page holds, and the ids in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def test_it_needs_no_other_file(page: Path) -> None:
    found = Elements(page.read_text())
    assert "img" not in found.names and "iframe" not in found.names
    leads = [value for name, value in found.attributes if name in ("href", "src", "xlink:href")]
    assert leads and all(value.startswith(("#", "data:,")) for value in leads)
    script = (ASSETS / "page.js").read_text()
    assert not re.search(r"\bfetch\(|XMLHttpRequest|https?://(?!www\.w3\.org)|\bimport\b", script)


def test_every_picture_is_followed_by_its_table_and_tables_have_captions(page: Path) -> None:
    results = page.read_text().partition('<main id="rounds"')[0]
    drawn = re.findall(r"<figure.*?</figure>", results, flags=re.DOTALL)
    pictures = [one for one in drawn if "<svg" in one]
    assert len(pictures) > 20
    assert all('role="img"' in one and "<table" in one for one in pictures)
    assert results.count("<table") == results.count("<caption")


def test_ids_are_unique_and_links_inside_lead_somewhere(page: Path) -> None:
    found = Elements(re.sub(r"<svg.*?</svg>", "", page.read_text(), flags=re.DOTALL)).attributes
    ids = [value for name, value in found if name == "id"]
    assert len(ids) == len(set(ids))
    inside = [value[1:] for name, value in found if name == "href" and value.startswith("#")]
    assert {one for one in inside if one and not one.startswith("rounds/")} <= set(ids)


def test_colours_are_those_of_every_picture() -> None:
    style = (ASSETS / "base.css").read_text()
    light, dark = style.split("prefers-color-scheme: dark", 1)
    for colors, declared in ((LIGHT, light), (DARK, dark)):
        for name, color in colors.items():
            assert f"--{name}: {color};" in declared
    used = {name for path in ASSETS.glob("page.*") for name in re.findall(r"var\((--[a-z0-9-]+)\)", path.read_text())}
    assert used <= set(re.findall(r"(--[a-z0-9-]+):", style))


def test_what_a_folder_says_cannot_become_markup(tmp_path: Path) -> None:
    trace = answers("hyco", 1, 2)
    name = "<b>&x"
    write_traces(tmp_path / name / "hyco.jsonl", trace)
    page = render(read_sources([tmp_path / name]), Texts())
    assert name not in page and "&lt;b&gt;&amp;x" in page


def test_a_source_without_traces_has_no_viewer(folders: dict[str, Path]) -> None:
    page = render(read_sources([folders["run"]])[:1], Texts())
    assert 'id="rounds"' not in page and "Gates" in page


def test_it_is_written_whole_into_a_new_folder(tmp_path: Path, folders: dict[str, Path]) -> None:
    path = tmp_path / "new" / "page.html"
    size = write_page(read_sources([folders["bench"]]), Texts(), path)
    assert path.stat().st_size == size and [one.name for one in path.parent.iterdir()] == ["page.html"]
    assert path.read_text().rstrip().endswith("</html>")


def test_the_same_folder_gives_the_same_page(tmp_path: Path) -> None:
    write_traces(tmp_path / "hyco.jsonl", answers("hyco", 2, 2))
    assert render(read_sources([tmp_path]), Texts()) == render(read_sources([tmp_path]), Texts())
