"""SLM families: found by their files alone, and the only files that name transformers' model classes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedConfig

import hyco_export
from hyco_export.errors import CheckpointError
from hyco_export.models.families import llama, qwen3
from hyco_export.models.families.config_fields import require_honoured
from hyco_export.models.families.slm_family import find_family, slm_families
from hyco_export.models.slm.surgery import network_of
from tests.support.float_slm import llama_config, qwen3_config
from tests.support.packed_slm import RINGS

PACKAGE = Path(hyco_export.__file__).parent
FAMILIES = PACKAGE / "models" / "families"
PROGRAMS = "_worker.py"  # of other libraries, timed beside ours: they import nothing of this package
MODEL_CLASS = re.compile(r"(Gemma|Llama|Qwen|Quantized)\w+")
MODEL_MODULES = ("transformers.models.", "transformers.integrations.gemma_quant")


def model_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
            for name in node.names:
                if MODEL_CLASS.fullmatch(name.name) or (node.module or "").startswith(MODEL_MODULES):
                    yield f"{path.relative_to(PACKAGE)}: {name.name}"


def test_only_families_name_model_classes() -> None:
    inside = [found for path in FAMILIES.glob("*.py") for found in model_imports(path)]
    assert len(inside) > 10
    others = [path for path in PACKAGE.rglob("*.py") if path.parent != FAMILIES and not path.name.endswith(PROGRAMS)]
    assert len(others) > 100
    assert [found for path in others for found in model_imports(path)] == []


def test_no_family_is_named_outside_its_file() -> None:
    for family in ("qwen3", "llama"):
        elsewhere = [
            path
            for path in PACKAGE.rglob("*.py")
            if path != FAMILIES / f"{family}.py"
            and re.search(rf"import.*\b{family}\b|families\.{family}", path.read_text())
        ]
        assert elsewhere == []


def test_every_family_is_found_by_its_model_type() -> None:
    assert set(slm_families()) >= {"gemma3_text", "gemma4_text", "llama", "qwen3"}
    assert find_family(qwen3_config(), "here") is qwen3.FAMILY
    with pytest.raises(CheckpointError, match=r"here holds a 'mistral' model, an SLM must be one of .*, qwen3"):
        find_family(PreTrainedConfig.from_dict({"model_type": "mistral"}), "here")


def no_tensor(name: str) -> np.ndarray:
    raise AssertionError(f"{name} is read")


def test_blocks_have_the_options_of_their_family() -> None:
    network = network_of(qwen3_config(), RINGS, no_tensor)
    assert (network.activation, network.query_key_norms, network.query_scale, network.post_norms) == (
        *("silu", True, 1.0),
        False,
    )
    assert network.rings == {"full": RINGS["full"]}
    assert network.spans == {"full": None}
    network = network_of(llama_config(), RINGS, no_tensor)
    assert (network.activation, network.query_key_norms, network.post_norms) == ("silu", False, False)
    assert network.query_scale == 8**-0.5


def test_the_norm_before_the_mlp_has_the_networks_name() -> None:
    weight = np.ones(4, np.float32)
    names = {f"layers.0.{norm}": weight for norm in ("input_layernorm", "post_attention_layernorm")}
    assert set(llama.norms(llama_config(), names)) == {"layers.0.input_layernorm", "layers.0.pre_feedforward_layernorm"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: qwen3_config(attention_bias=True), "attention_bias is True, only False is implemented"),
        (lambda: qwen3_config(hidden_act="gelu"), "hidden_act is 'gelu', only 'silu' is implemented"),
        (lambda: qwen3_config(num_experts=8), "num_experts is 8, a field that transformers' Qwen3Config does not know"),
        (lambda: qwen3_config(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0, a field that"),
        (lambda: llama_config(mlp_bias=True), "mlp_bias is True, only False is implemented"),
        (
            lambda: llama_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_parameters.rope_type is 'dynamic', not one of default, linear",
        ),
    ],
)
def test_what_a_family_does_not_compute_is_refused(config, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        require_honoured(config(), "SLM")
    assert words in caught.value.message


def test_scaled_rotary_tables_are_refused() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(CheckpointError, match=r"rope_parameters multiply cos and sin by 1\.1"):
        network_of(qwen3_config(rope_parameters=yarn), RINGS, no_tensor)
