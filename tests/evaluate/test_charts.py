"""The coverage picture: the chosen size is marked and named, with and without held-out text."""

import xml.etree.ElementTree as ElementTree

import pytest

from hyco_export.evaluate.charts import CSS_VARIABLES, coverage_picture, write_picture


def rows(held_out):
    return [
        {"size": size, "held_out_share": held_out * share, "counted_share": share}
        for size, share in ((280, 0.05), (5000, 0.9), (86_089, 0.995), (262_144, 1.0))
    ]


@pytest.mark.parametrize(("held_out", "names"), [(0.99, ["held out", "counted"]), (0.0, ["counted"])])
def test_the_chosen_size_is_named_with_its_share(held_out, names):
    picture = coverage_picture(rows(held_out), 86_089)
    assert f"86,089 tokens: {100 * 0.995 * (held_out or 1.0):.2f} %" in picture
    assert "262,144" in picture
    assert [name for name in ("held out", "counted") if f">{name}<" in picture] == names


def test_a_chosen_size_that_covers_little_stays_inside_the_picture():
    assert "280 tokens: 5.00 %" in coverage_picture(rows(1.0), 280)


def test_a_file_of_its_own_brings_every_variable(tmp_path):
    write_picture(tmp_path / "curve.svg", coverage_picture(rows(0.99), 5000))
    text = (tmp_path / "curve.svg").read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    for variable in (*CSS_VARIABLES.values(), "var(--font)"):
        name = variable.removeprefix("var(").removesuffix(")")
        assert text.count(f"{name}: ") == (1 if name == "--font" else 2), name
