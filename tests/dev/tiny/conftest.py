"""One quick family per test session, and the committed one."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hyco_export.core.files import CHECKPOINTS
from hyco_export.dev.tiny.card import load_family
from hyco_export.dev.tiny.family import DEFAULT_SEED, train_family
from tests.support.shared import built_once


@pytest.fixture(scope="session")
def quick_family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def train(folder: Path) -> None:
        train_family(folder / "first", seed=DEFAULT_SEED, quick=True, on_progress=lambda _part, _share: None)

    return built_once(tmp_path_factory, "quick-family", train) / "first"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINTS / "verifier")


@pytest.fixture(scope="session")
def family():
    """The committed verifier, head and SLM."""
    return load_family(CHECKPOINTS)
