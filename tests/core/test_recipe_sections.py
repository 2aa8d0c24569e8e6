"""Which fields of a data source fit together; each refusal names the field."""

import msgspec
import pytest

from hyco_export.core.recipe_sections import DataSource, as_source, check_source
from hyco_export.errors import RecipeError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = {"dataset": "HuggingFaceH4/ultrachat_200k", "split": "train_sft", "revision": COMMIT}


def source(**fields):
    return msgspec.convert(fields, DataSource)


def test_good_sources_pass():
    check_source("data.jsonl", "$.data.calibration")
    check_source(source(**HUB, limit=60, shuffle_seed=1, first_turn=True), "$.data.calibration")
    check_source(source(mix=[HUB, {"path": "mine", "weight": 0.5}], limit=9), "$.data.conversations")


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({}, "$.data.x has no source", "exactly one of path, dataset, mix"),
        ({**HUB, "path": "a"}, "$.data.x has path and dataset", "exactly one"),
        ({"path": "a", "split": "train"}, "$.data.x.split is for a Hub data set", "add `dataset`"),
        ({**HUB, "split": None}, "$.data.x.split is missing", "hf datasets info HuggingFaceH4/ultrachat_200k"),
        ({**HUB, "revision": None}, "$.data.x.revision is None, it must be the full commit", "hf datasets info"),
        ({**HUB, "revision": "main"}, "$.data.x.revision is 'main', it must be the full commit", "hf datasets info"),
        ({"mix": [{"path": "a"}, {"dataset": "b/c"}]}, "$.data.x.mix[1].split is missing", "hf datasets info b/c"),
    ],
)
def test_fields_that_do_not_fit_are_named(fields, message, hint):
    with pytest.raises(RecipeError) as caught:
        check_source(source(**fields), "$.data.x")
    assert caught.value.message.startswith(message)
    assert hint in caught.value.hint


def test_only_a_path_without_options_is_plain():
    assert as_source("a") == source(path="a")
    assert source(path="a").plain_path == "a"
    assert source(path="a", limit=3).plain_path is None
    assert source(path="a", id_column="key").plain_path is None
    assert source(**HUB).plain_path is None
