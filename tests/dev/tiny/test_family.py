"""The committed family and a quickly trained one: folders, formats, determinism."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from hyco_export.core.files import CHECKPOINTS
from hyco_export.dev.tiny.card import load_family
from hyco_export.dev.tiny.corpus import HELD_OUT_NAMES
from hyco_export.dev.tiny.family import run_side_by_side, train_family
from hyco_export.errors import HycoError

MAX_PACKAGE_BYTES = 12_000_000


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert files
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_committed_family_has_the_files_of_a_fresh_one(quick_family):
    assert digests(CHECKPOINTS).keys() == digests(quick_family).keys()
    for part in ("verifier", "head", "slm"):
        fresh = json.loads((quick_family / part / "config.json").read_text())
        assert json.loads((CHECKPOINTS / part / "config.json").read_text()) == fresh


def test_committed_family_is_small():
    assert sum(path.stat().st_size for path in CHECKPOINTS.rglob("*") if path.is_file()) <= MAX_PACKAGE_BYTES


@pytest.mark.parametrize("folder", [CHECKPOINTS, None], ids=["committed", "quick"])
def test_family_loads_and_belongs_together(folder, quick_family):
    folder = folder or quick_family
    verifier, head, slm = load_family(folder)
    text = head.config.get_text_config()
    assert head.config.backbone_hidden_size == verifier.config.hidden_size
    assert text.vocab_size == verifier.config.vocab_size == slm.config.vocab_size
    assert slm.config.use_double_wide_mlp
    assert slm.config.hidden_size_per_layer_input > 0
    assert slm.config.num_kv_shared_layers > 0
    assert AutoConfig.from_pretrained(folder / "slm").quantization_config["quant_method"] == "gemma"
    tokenizers = [AutoTokenizer.from_pretrained(folder / part) for part in ("verifier", "slm")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    for model in (verifier, slm):
        assert model.generation_config.eos_token_id == [1, 6]
        assert torch.isfinite(model(torch.tensor([[2, 5, 300]])).logits).all()


def test_conversations_are_training_dialogues():
    lines = (CHECKPOINTS / "conversations.jsonl").read_text(encoding="utf-8").splitlines()
    conversations = [json.loads(line) for line in lines]
    assert 600 <= len(conversations) <= 1000
    assert all([turn["role"] for turn in item["messages"]][:2] == ["user", "assistant"] for item in conversations)
    assert not {item["id"].removeprefix("stdlib/") for item in conversations} & HELD_OUT_NAMES


def test_card_names_data_licence_and_numbers():
    card = " ".join((CHECKPOINTS / "MODEL_CARD.md").read_text(encoding="utf-8").split())
    for wanted in ("Python Software Foundation License", "chain MAT", "top-1 agreement of the packed SLM"):
        assert wanted in card


def test_two_quick_runs_are_identical(quick_family, tmp_path):
    """The second run goes through the documented command, in a process of its own."""
    second = tmp_path / "second"
    command = [sys.executable, "-m", "hyco_export", "dev", "train-tiny", str(second), "--quick"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert digests(second) == digests(quick_family)
    assert "# The embedded tiny family" in printed


def test_a_full_folder_is_refused(tmp_path):
    (tmp_path / "something").touch()
    with pytest.raises(HycoError, match="is not empty"):
        train_family(tmp_path, seed=0, quick=True, on_progress=lambda _part, _share: None)


def test_jobs_run_side_by_side_and_report():
    seen = []
    results, _cpu_s = run_side_by_side(
        {"a": (half_done, (1,)), "b": (half_done, (2,))}, lambda name, share: seen.append((name, share))
    )
    assert results == {"a": 10, "b": 20}
    assert ("a", 1.0) in seen
    assert ("b", 1.0) in seen


def test_a_failing_job_is_named():
    with pytest.raises(HycoError, match=r"(?s)training of the bad failed.*ZeroDivisionError"):
        run_side_by_side({"bad": (failing, ())}, lambda _name, _share: None)


def half_done(number, report):
    report(1.0)
    return 10 * number


def failing(_report):
    return 1 / 0
