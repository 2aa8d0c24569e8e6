"""A whole recipe without a head, for each SLM family that is not Gemma: from checkpoints to context binaries."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import yaml
from transformers import PreTrainedConfig

from hyco_export.core.artifact import verify
from hyco_export.core.files import CHECKPOINTS
from hyco_export.core.recipe_loading import load_recipe
from hyco_export.dev.created.family import create_family
from hyco_export.dev.created.tokenizer import write_tokenizer
from hyco_export.graph.parity import ParityReport
from hyco_export.models.families.released_configs import SMALL
from hyco_export.stages.declarations import Silent
from hyco_export.stages.forecast import forecast
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.runner import build_all
from hyco_export.stages.table import stages_of
from tests.support.float_slm import llama_config, qwen3_config, save_float_slm

pytestmark = pytest.mark.slow
SIZES = {"vocab_size": SMALL.vocab_size, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}


def run_folder(root: Path, config: PreTrainedConfig, own_verifier: bool) -> RunFolder:
    """The run of a created Gemma 4 verifier, or of the SLM as its own, and this SLM with the same tokenizer."""
    folder = root / "family"
    create_family(folder, SMALL, None, 0, lambda label, share: None)
    for part in ("head", "slm"):
        shutil.rmtree(folder / part)
    save_float_slm(folder / "slm", config)
    write_tokenizer(CHECKPOINTS / "verifier", folder / "slm", SMALL.vocab_size)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    for section in ("qat", "head", "compile"):  # compile has the gates of real checkpoints
        recipe.pop(section)
    recipe["models"].pop("head")
    recipe["slm"]["weights"] = {"bits": 8}
    if own_verifier:
        recipe["models"]["verifier"] = recipe["models"]["slm"]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return RunFolder(root / "run", load_recipe(path), folder)


@pytest.mark.parametrize(
    ("config", "own_verifier"), [(qwen3_config, False), (llama_config, True)], ids=["qwen3", "llama"]
)
def test_a_family_runs_from_checkpoint_to_binary(
    config: Callable[..., PreTrainedConfig], own_verifier: bool, tmp_path: Path
) -> None:
    run = run_folder(tmp_path, config(**SIZES), own_verifier)
    chain = stages_of(run.recipe)
    assert not forecast(run, chain).missing
    manifests = build_all(run, chain, Silent())
    converted = manifests["convert-slm"].metrics
    assert all(value < 1e-3 for value in converted["parity_in_std"].values())
    done, count = converted["tensors_equal"].split(" of ")
    assert done == count
    assert converted["top1_agreement_unrounded"] > 0.9
    folder = run.folder(chain[-1])
    assert verify(folder).metrics["graphs"].keys() == {"slm_tree", "slm_prefill"}
    reports = msgspec.json.decode((folder / "parity.json").read_bytes(), type=dict[str, ParityReport])
    assert all(report.passed for report in reports.values())
