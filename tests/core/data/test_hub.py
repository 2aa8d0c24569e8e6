"""Hub data sets: the real streaming reader over a local copy of the layout, and what its failures mean."""

import pyarrow
import pytest
from pyarrow import parquet

from hyco_export.core.data.conversations import content_id
from hyco_export.core.data.sources import read_hub
from hyco_export.core.recipe_sections import DataSource
from hyco_export.errors import RecipeError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "HuggingFaceH4/ultrachat_200k"


def hub(split="train_sft", **fields):
    return DataSource(dataset=NAME, split=split, revision=COMMIT, **fields)


def row(i):
    messages = [{"content": f"Question {i}?", "role": "user"}, {"content": f"Answer {i}.", "role": "assistant"}]
    return {"prompt": f"Question {i}?", "prompt_id": f"p{i}", "messages": messages}


@pytest.fixture
def on_hub(tmp_path, monkeypatch):
    """Puts the data set's files into a folder and lets `datasets` read that instead of the Hub."""
    import datasets

    (tmp_path / "data").mkdir()
    train = (("train_sft-00000-of-00002", 0, 3), ("train_sft-00001-of-00002", 3, 5))
    for name, first, end in (*train, ("test_sft-00000-of-00001", 9, 10)):
        rows = pyarrow.Table.from_pylist([row(i) for i in range(first, end)])
        parquet.write_table(rows, tmp_path / "data" / f"{name}.parquet")
    asked, load = [], datasets.load_dataset

    def local(name, subset, *, split, revision, streaming):
        asked.append((name, subset, revision, streaming))
        return load(str(tmp_path), split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", local)
    return asked


def test_the_split_is_streamed_at_its_commit(on_hub):
    found = list(read_hub(hub()))
    assert [c.messages[1].content for c in found] == [f"Answer {i}." for i in range(5)]
    assert found[0].id == content_id(found[0].messages)
    assert on_hub == [(NAME, None, COMMIT, True)]
    assert [c.id for c in read_hub(hub("test_sft", id_column="prompt_id"))] == ["p9"]


def test_an_unknown_split_names_those_there_are(on_hub):
    with pytest.raises(RecipeError) as caught:
        list(read_hub(hub("train")))
    assert "train_sft" in caught.value.message and "test_sft" in caught.value.message
    assert caught.value.hint == "correct `split` or `subset`"


def test_another_layout_is_refused_with_its_columns(on_hub, tmp_path):
    for path in (tmp_path / "data").iterdir():
        parquet.write_table(pyarrow.Table.from_pylist([{"text": "x"}]), path)
    with pytest.raises(RecipeError, match=rf"{NAME}, split train_sft, row 1 has no column 'messages', only 'text'"):
        list(read_hub(hub()))


def failing(monkeypatch, error):
    import datasets

    def load(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load)


def test_missing_gated_and_unreachable_sets_get_their_next_step(monkeypatch):
    from datasets.exceptions import DatasetNotFoundError

    cases = [
        (DatasetNotFoundError(f"Dataset '{NAME}' doesn't exist on the Hub"), "doesn't exist", "correct `dataset`"),
        (DatasetNotFoundError(f"Dataset '{NAME}' is a gated dataset on the Hub."), "is gated", "hf auth login"),
        (
            ConnectionError(f"Couldn't reach '{NAME}' on the Hub"),
            "cannot be read",
            f"hf download {NAME} --repo-type dataset --revision {COMMIT} --include '*train_sft*' --local-dir FOLDER",
        ),
    ]
    for error, message, hint in cases:
        failing(monkeypatch, error)
        with pytest.raises(RecipeError) as caught:
            list(read_hub(hub()))
        assert message in caught.value.message and NAME in caught.value.message
        assert hint in caught.value.hint


def test_a_folder_of_the_same_name_is_not_read_in_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    with pytest.raises(RecipeError, match="is also a folder here"):
        list(read_hub(hub()))
