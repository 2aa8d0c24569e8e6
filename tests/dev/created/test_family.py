"""Created checkpoints: they belong together, have the promised shapes, and appear whole or not at all."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from hyco_export.core.files import CHECKPOINTS
from hyco_export.core.recipe_loading import load_recipe
from hyco_export.dev.created import family, models
from hyco_export.dev.created.family import create_family
from hyco_export.dev.created.tokenizer import filler, write_tokenizer
from hyco_export.errors import CheckpointError, RecipeError
from hyco_export.models.checkpoints import checkpoint_digest
from hyco_export.models.families.checks import check_family
from hyco_export.models.families.released_configs import FULL, SMALL, find_scale, head_config, verifier_config
from hyco_export.models.verifier import kv_shapes, load_config, load_head, load_tokenizer, load_verifier, stop_ids


def ignore(label: str, share: float) -> None:
    pass


@pytest.fixture(scope="module")
def created(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("created") / "family"
    create_family(out, SMALL, None, 0, ignore)
    return out


def test_full_scale_has_the_papers_shapes() -> None:
    verifier, head = verifier_config(FULL), head_config(FULL)
    assert 2 * verifier.hidden_size == 5_632  # values of e and h a round, §3.1
    assert sum(2 * shape.heads * shape.dim for shape in kv_shapes(verifier).values()) == 6_144  # a token
    check_family(verifier, head)
    assert (head.text_config.hidden_size, head.text_config.intermediate_size) == (1024, 8192)
    assert FULL.run.keepset == 86_089


def test_the_three_belong_together_and_load_whole(created: Path) -> None:
    configs = [load_config(created / part) for part in ("verifier", "head", "slm")]
    check_family(*configs)
    verifier, head = load_verifier(created / "verifier"), load_head(created / "head")
    assert verifier.lm_head.weight is verifier.model.embed_tokens.weight
    assert head.model.embed_tokens.weight.shape == (SMALL.vocab_size, SMALL.head.hidden)
    assert stop_ids(verifier) == ()


def test_no_two_rows_are_equal(created: Path) -> None:
    with safe_open(created / "verifier" / "model.safetensors", framework="pt") as file:
        for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
            rows = file.get_tensor(name)
            assert len(rows.unique(dim=0)) == len(rows), name


def test_the_recipe_beside_them_names_them(created: Path) -> None:
    recipe = load_recipe(created / "recipe.yaml")
    assert recipe.keepset.size == SMALL.run.keepset
    assert (created / recipe.models.slm.model / "config.json").is_file()
    assert len((created / recipe.data.calibration).read_text().splitlines()) == SMALL.run.prompts


def test_equal_seeds_give_equal_bytes(created: Path, tmp_path: Path) -> None:
    create_family(tmp_path / "again", SMALL, None, 0, ignore)
    create_family(tmp_path / "other", SMALL, None, 1, ignore)
    for part in ("verifier", "head", "slm"):
        digest = checkpoint_digest(created / part)
        assert checkpoint_digest(tmp_path / "again" / part) == digest
        assert checkpoint_digest(tmp_path / "other" / part) != digest


def test_weights_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SHARD_BYTES", 200_000)
    create_family(tmp_path / "sharded", SMALL, None, 0, ignore)
    index = json.loads((tmp_path / "sharded" / "verifier" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    load_verifier(tmp_path / "sharded" / "verifier")


def test_the_tokenizer_is_filled_up(created: Path) -> None:
    plain, filled = load_tokenizer(CHECKPOINTS / "verifier"), load_tokenizer(created / "verifier")
    assert len(filled) == SMALL.vocab_size
    text = "What does json.loads do? ⟨3000⟩"
    assert filled(text).input_ids == plain(text).input_ids
    assert filled.decode([3000]) == filler(3000)


def test_a_wrong_tokenizer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a fast BPE tokenizer"):
        create_family(tmp_path / "out", SMALL, tmp_path, 0, ignore)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match=r"has ids up to 2,047, the model 2,000 rows"):
        write_tokenizer(CHECKPOINTS / "verifier", tmp_path, 2_000)


def test_an_existing_folder_stays_and_a_failed_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match="mine exists already"):
        create_family(tmp_path / "mine", SMALL, None, 0, ignore)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(family, "write_packed_slm", interrupt)
    with pytest.raises(KeyboardInterrupt):
        create_family(tmp_path / "half", SMALL, None, 0, ignore)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_unknown_scale_lists_the_known() -> None:
    with pytest.raises(RecipeError, match=r"--scale is 'huge' \(give one of: full, thin, middle, small\)"):
        find_scale("huge")
