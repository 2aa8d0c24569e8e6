"""Loading recipes: every kind of mistake is named with its field or line before any work."""

import os
import re
import threading
from pathlib import Path

import pytest
import yaml

from hyco_export.core.recipe_loading import embedded_recipe, load_recipe, read_yaml
from hyco_export.errors import RecipeError


def edited(tmp_path: Path, field: str, value: object) -> Path:
    """The embedded recipe with one dotted field set to `value`."""
    content = yaml.safe_load(embedded_recipe().read_text())
    *parents, last = field.split(".")
    place = content
    for parent in parents:
        place = place[parent]
    place[last] = value
    path = tmp_path / "edited.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("colour", "red", "unknown field `colour`"),
        ("qat.learning_rat", 1, r"unknown field `learning_rat` - at `\$.qat`"),
        ("qat.learning_rate", "fast", r"Expected `float`, got `str` - at `\$.qat.learning_rate`"),
        ("qat.weight_bits", 3, r"at `\$.qat.weight_bits`"),
        ("qat.steps", 0, r"at `\$.qat.steps`"),
        ("sampling.top_p", 1.5, r"at `\$.sampling.top_p`"),
        ("models.hidden_norm", "both", r"at `\$.models.hidden_norm`"),
        ("name", "has space", r"at `\$.name`"),
        ("keepset.size", 200, r"\$.keepset.size is 200, but the 256 byte tokens"),
        ("keepset.size", None, r"\$.keepset has neither of `size` and `coverage`"),
        ("keepset.coverage", 0.99, r"\$.keepset has both of `size` and `coverage`"),
        ("keepset.scripts", ["Hangol"], r"\$.keepset.scripts names 'Hangol'"),
        ("keepset.held_out_share", 1.0, r"at `\$.keepset.held_out_share`"),
        ("data.calibration", {"dataset": "a/b"}, r"\$.data.calibration.split is missing"),
        ("data.calibration", {"dateset": "a/b"}, r"unknown field `dateset` - at `\$.data.calibration`"),
        ("data.calibration", 3, r"at `\$.data.calibration`"),
        ("slm.ring", 16, r"\$.slm.ring is 16, shorter than a tree pass"),
        ("slm.sliding_ring", 16, r"\$.slm.sliding_ring is 16, shorter than a tree pass"),
        ("slm.prefill_rows", 100, r"\$.slm.prefill_rows is 100, longer than the shortest ring"),
        ("head.runner_up_steps", 5, r"\$.head.runner_up_steps is 5, more than"),
        ("slm.rows", 6, r"\$.slm.rows is 6, too few for the root and 6 planted nodes"),
        ("drafting.budget", 5, r"\$.drafting.budget is 5, smaller than the 6 planted nodes"),
        ("drafting.budget", 64, None),
        ("drafting.budget", "auto", None),
        ("drafting.budget", "full", r"Invalid enum value 'full' - at `\$.drafting.budget`"),
        ("drafting.budget", 0, r"at `\$.drafting.budget`"),
        ("drafting.objective", "delivery", None),
        ("drafting.objective", {"server_ms": 1, "wall_ms": 0.2}, None),
        ("drafting.objective", {}, r"\$.drafting.objective gives neither server_ms nor wall_ms a price"),
        ("drafting.objective", {"wall_ms": -1}, r"at `\$.drafting.objective.wall_ms`"),
        ("drafting.objective", "battery", r"at `\$.drafting.objective`"),
        ("drafting.budget", 65, r"\$.drafting.budget is 65, the server takes trees of at most 64 nodes"),
        ("qat.clip_ratio_low", 1.0, None),
        ("qat.clip_ratio_high", 0.5, r"\$.qat.clip_ratio_low 0.6 is above clip_ratio_high 0.5"),
        ("qat.unrolled_steps", 9, r"\$.qat.unrolled_steps is 9, more than"),
        ("qat.grid", "blocks", r"at `\$.qat.grid`"),
        ("qat.overrides", {"lm_head": 3}, r"at `\$.qat.overrides\[...\]`"),
        ("qat.overrides", {"lm_head": 8}, None),
        (
            "qat",
            {"grid": "lpbq", "weight_bits": 8},
            r"\$.qat.grid is lpbq, which has 4 bits, and \$.qat.weight_bits is 8",
        ),
        ("data.validation", "calibration_data/train.jsonl", r"\$.data.validation is the same source"),
        ("data.validation", {"path": "calibration_data/train.jsonl"}, r"\$.data.validation is the same source"),
        ("qat.warmup_steps", 100000, r"\$.qat.warmup_steps is 100000, more than"),
        ("validation.gates.min_mat", {"foo": 1.0}, r"\$.validation.gates.min_mat has a limit for foo, not in"),
        ("validation.systems", ["hyco", "hyco"], r"\$.validation.systems names a system twice"),
        ("validation.systems", [], r"\$.validation.systems"),
        ("sampling.temperature", 0.0, r"\$.sampling.temperature 0 draws nothing"),
        ("sampling.temperature", 0.001, r"\$.sampling.temperature is 0.001, it must be 0 or lie in \[0.01, 100.0\]"),
        ("sampling.temperature", 1000.0, r"\$.sampling.temperature is 1000.0, it must be 0 or lie"),
        ("sampling.temperature", 0.01, None),
        ("drafting.slm_temperature", 1e-9, r"\$.drafting.slm_temperature is 1e-09, it must lie in"),
        ("qat.betas", [2.0, -1.0], r"at `\$.qat.betas\[0\]`"),
        ("qat.betas", [0.9, 1.0], r"at `\$.qat.betas\[1\]`"),
        ("qat.seed", -1, r"at `\$.qat.seed`"),
        ("validation.seed", 2**63, r"\$.validation.seed"),
        ("name", "../up", r"at `\$.name`"),
        ("name", "a/b", r"at `\$.name`"),
        ("name", "tiny\n", r"at `\$.name`"),
        ("name", "a" * 256, r"at `\$.name`"),
        ("name", "a" * 100, None),
        ("target", "sm8851", "sm8851"),
        ("calibration.mask_value", -1e4, r"at `\$.calibration.mask_value`"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, field: str, value: object, text: str | None) -> None:
    path = edited(tmp_path, field, value)
    if text is None:
        load_recipe(path)
        return
    with pytest.raises(RecipeError, match=text) as caught:
        load_recipe(path)
    assert caught.value.hint and "recipes/" not in caught.value.hint  # a file that is not where the user is


def float_fields(value: object, path: str) -> list[str]:
    if isinstance(value, dict):
        return [name for key, part in value.items() for name in float_fields(part, f"{path}.{key}")]
    return [path.lstrip(".")] if isinstance(value, float) else []


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e39])
def test_no_field_takes_what_float32_does_not_have(tmp_path: Path, value: float) -> None:
    fields = float_fields(yaml.safe_load(embedded_recipe().read_text()), "")
    assert {"qat.learning_rate", "qat.gradient_norm_clip", "qat.weight_decay", "calibration.kv_margin"} <= set(fields)
    for field in fields:
        with pytest.raises(RecipeError, match=rf"\$\.{re.escape(field)}"):
            load_recipe(edited(tmp_path, field, value))


def test_a_key_that_stands_twice_is_named_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(embedded_recipe().read_text() + "\nthreads: 2\n")
    with pytest.raises(RecipeError, match=r"`threads` stands twice, in lines \d+ and \d+") as caught:
        load_recipe(path)
    assert caught.value.hint == "remove one of them"
    path.write_text("name: x\nqat: {steps: 1, seed: 2, steps: 3}\n")
    with pytest.raises(RecipeError, match=r"`steps` stands twice, in lines 2 and 2"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        ("0200", "128 in YAML 1.1 and 200 in YAML 1.2"),
        ("1:30", "90 in YAML 1.1 and the text '1:30'"),
        ("1_000", "1000 in YAML 1.1 and the text '1_000'"),
        ("0b11", "3 in YAML 1.1 and the text '0b11'"),
        ("yes", "true in YAML 1.1 and the text 'yes'"),
        ("Off", "false in YAML 1.1 and the text 'Off'"),
        ("2026-10-11", "2026-10-11 in YAML 1.1 and the text '2026-10-11'"),
    ],
)
def test_a_value_with_two_readings_is_refused_with_both(tmp_path: Path, text: str, readings: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: x\nqat:\n  steps: {text}\n")
    with pytest.raises(RecipeError, match="line 3: ") as caught:
        read_yaml(path)
    assert f"`{text}` is {readings}" in caught.value.message
    path.write_text(f"name: x\nqat:\n  steps: '{text}'\n")
    assert read_yaml(path)["qat"]["steps"] == text


def test_plain_values_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    text = "a: 1e-5\nb: .5\nc: 0x1F\nd: true\ne:\nf: !!str 0200\ng: &x {k: -3}\nh: {<<: *x, j: 1.5e3}\ni: a b\n"
    wanted = {"a": 1e-5, "b": 0.5, "c": 31, "d": True, "e": None, "f": "0200", "g": {"k": -3}, "i": "a b"}
    wanted["h"] = {"k": -3, "j": 1500.0}
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path.write_text(text, encoding=encoding)
        assert read_yaml(path) == wanted


def test_a_recipe_comes_from_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(embedded_recipe().read_bytes()))
    writer.start()
    assert load_recipe(pipe) == load_recipe(embedded_recipe())
    writer.join()


def test_unknown_target_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(edited(tmp_path, "target", "sm9999"))
    assert "sm8850" in str(caught.value)
    assert "sm8650" in str(caught.value)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match=r"is a folder \(give the YAML file in it\)"):
        load_recipe(tmp_path)
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [")
    with pytest.raises(RecipeError, match="is not YAML"):
        load_recipe(broken)
    broken.write_text("")
    with pytest.raises(RecipeError, match=r"broken\.yaml"):
        load_recipe(broken)


def test_the_smallest_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(edited(tmp_path, "keepset.size", 256))
    assert "at least 257" in caught.value.hint
