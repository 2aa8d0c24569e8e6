"""Whatever is wrong in a user's checkpoint ends as file, place, rule and next step: in the plan, in the checks before
the first stage, and before a server is ready. The table grows with every new way of breaking one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyco_export.core.files import locate
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.errors import CheckpointError
from hyco_export.server.assembly import open_server_engine
from hyco_export.stages.checks import check_sources
from hyco_export.stages.forecast import forecast
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.table import stages_of

WEIGHTS, CONFIG = "model.safetensors", "config.json"
Break = Callable[[Path], Any]


def rewritten(change: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    """Change a checkpoint's tensors."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return spoil


def fields(**given: Any) -> Break:
    """Change fields of the text model's config."""

    def spoil(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        config.get("text_config", config).update(given)
        (folder / CONFIG).write_text(json.dumps(config))

    return spoil


def quantizer(**given: Any) -> Break:
    """Change the quantizer's settings."""

    def spoil(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        config["quantization_config"].update(given)
        (folder / CONFIG).write_text(json.dumps(config))

    return spoil


def written(name: str, content: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def value(name: str, number: float) -> Break:
    """Put a number into the first place of a tensor."""
    return rewritten(lambda tensors: tensors[name].view(-1)[:1].fill_(number))


ANY: dict[str, tuple[Break, str]] = {  # for every role
    "config cut": (written(CONFIG, b'{"model_type": '), "config.json is not JSON"),
    "config a list": (written(CONFIG, b"[1]"), "config.json holds a list, a config is a mapping"),
    "config not text": (written(CONFIG, b"\xff\xfe{}"), "config.json is not JSON"),
    "config of nothing": (written(CONFIG, b"{}"), "Should have a `model_type` key"),
    "number as text": (fields(hidden_size="64"), "Field 'hidden_size' expected int, got str"),
    "no heads": (fields(num_key_value_heads=0), "num_key_value_heads is 0, it must be finite and greater than 0"),
    "negative": (fields(sliding_window=-4), "sliding_window is -4, it must be finite and greater than 0"),
    "not a number": (fields(rms_norm_eps=float("nan")), "rms_norm_eps is nan, it must be finite"),
    "layers": (fields(num_kv_shared_layers=99), "99"),
    "weights cut": (cut, "incomplete metadata, file not fully covered"),
    "header too large": (written(WEIGHTS, (1 << 40).to_bytes(8, "little") + bytes(64)), "header too large"),
    "a page": (written(WEIGHTS, b"<html>Not found</html>"), "header too large"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "model.safetensors does not exist"),
    "link to nothing": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).symlink_to("/nowhere")),
        "model.safetensors does not exist",
    ),
    "norm": (value("model.norm.weight", float("nan")), "model.norm.weight holds nan at [0] (1 of"),
}
DOWN = "model.layers.1.mlp.down_proj"
OWN: dict[str, dict[str, tuple[Break, str]]] = {
    "verifier": {
        "heads": (
            fields(num_attention_heads=3),
            "o_proj.weight is stored as [128, 128], the config asks for",
        ),
        "missing": (rewritten(lambda tensors: tensors.pop(f"{DOWN}.weight")), f"lacks 1 tensors, first {DOWN}.weight"),
        "activation": (fields(hidden_activation="squid"), "no 'squid'"),
        "padding": (fields(pad_token_id=99_999), "Padding_idx must be within num_embeddings"),
        "rotary": (fields(rope_parameters={"full_attention": {"rope_theta": 1.0}}), "no 'sliding_attention'"),
        "experts": (fields(enable_moe_block=True), "NoneType"),
        "infinity": (value(f"{DOWN}.weight", float("inf")), f"{DOWN}.weight holds inf at [0, 0] (1 of 65536"),
    },
    "head": {
        "missing": (rewritten(lambda tensors: tensors.pop(f"{DOWN}.weight")), f"lacks 1 tensors, first {DOWN}.weight"),
        "no axes": (
            rewritten(lambda tensors: tensors.update({"model.norm.weight": torch.tensor(1.0)})),
            "model.norm.weight is stored as [], the config asks for [128]",
        ),
        "infinity": (value("post_projection.weight", float("-inf")), "post_projection.weight holds -inf at [0, 0]"),
    },
    "slm": {
        "padding": (fields(pad_token_id=99_999), "Padding_idx must be within num_embeddings"),
        "heads": (
            fields(num_attention_heads=3),
            "q_proj.weight is stored as [64, 32]; 4 bits of [96, 64] are",
        ),
        "scale": (value(f"{DOWN}.weight_scale", float("inf")), f"{DOWN}.weight_scale: scale of row 0 is [inf]"),
        "zero scale": (value("lm_head.weight_scale", 0.0), "lm_head.weight_scale: scale of row 0 is [0.0]"),
        "layer scalar": (value("model.layers.0.layer_scalar", float("nan")), "model.layers.0.layer_scalar holds nan"),
        "width as text": (quantizer(num_bits="4"), "Expected `int`, got `str` - at `$.num_bits`"),
        "names as text": (quantizer(modules_to_not_convert="lm_head"), "at `$.modules_to_not_convert`"),
        "rules as a list": (quantizer(module_quant_configs=[1]), "at `$.module_quant_configs`"),
        "unknown setting": (quantizer(zero_point=True), "Object contains unknown field `zero_point`"),
        "float module": (quantizer(modules_to_not_convert=[DOWN]), f"leaves 1 modules in floats, first {DOWN} ("),
        "float output": (quantizer(modules_to_not_convert=["lm_head"]), "leaves 1 modules in floats, first lm_head ("),
        "float tables": (quantizer(quantize_embeddings=False), "leaves 2 modules in floats, first model.embed_tokens"),
    },
}
CASES = [(role, name) for role in OWN for name in (*ANY, *OWN[role])]
LOADED_ONLY = {
    "heads",
    "missing",
    "infinity",
    "norm",
}  # of a verifier: seen as it loads, the first thing a capture does


@pytest.mark.parametrize(("role", "name"), CASES)
def test_a_broken_checkpoint_is_named_before_any_work(role: str, name: str, tmp_path: Path) -> None:
    spoil, words = OWN[role].get(name) or ANY[name]
    for part in OWN:
        found = locate(f"embedded:{part}", None)
        assert found is not None
        shutil.copytree(found, tmp_path / part)
    text = embedded_recipe().read_text()
    for part in OWN:
        text = text.replace(f'"embedded:{part}"', part).replace(f"embedded:{part}", part)
    (tmp_path / "recipe.yaml").write_text(text)
    spoil(tmp_path / role)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    run = RunFolder(tmp_path / "run", recipe, tmp_path)
    asked: list[Callable[[], object]] = []
    if role != "verifier" or name not in LOADED_ONLY:
        asked.append(lambda: forecast(run, stages_of(recipe)))
    if role != "verifier":
        asked.append(lambda: check_sources(run, stages_of(recipe), lambda note: None))
    if role != "slm":
        asked.append(lambda: open_server_engine(recipe, recipe_folder=tmp_path))
    for ask in asked:
        with pytest.raises(CheckpointError) as caught:
            ask()
        assert words in caught.value.message
        assert caught.value.hint
    assert not run.root.exists()
