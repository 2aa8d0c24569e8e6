"""The head's config fields: all of transformers' class are judged, and its text part is a Gemma 4 text model."""

from dataclasses import fields

import pytest

from hyco_export.errors import CheckpointError
from hyco_export.models.families.config_fields import converted, require_honoured
from hyco_export.models.families.gemma4_assistant import HEAD_MODEL_TYPE, HONOURED, HeadConfig, HeadModel
from tests.support import builders


def test_every_field_of_transformers_class_is_honoured_or_limited() -> None:
    assert HeadConfig.model_type == HEAD_MODEL_TYPE and HeadModel.config_class is HeadConfig
    own = {field.name for field in fields(HeadConfig)}
    assert "backbone_hidden_size" in own
    assert own <= HONOURED.read | set(HONOURED.only)
    assert converted()[HEAD_MODEL_TYPE] is HONOURED


def test_the_text_part_is_judged_too() -> None:
    config = builders.small_head(60).config
    require_honoured(config, "head")
    config.text_config.attention_bias = True
    with pytest.raises(CheckpointError, match="the head cannot run as a static graph: attention_bias is True"):
        require_honoured(config, "head")
