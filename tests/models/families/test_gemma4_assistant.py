"""The head's config fields; heads with ordered embeddings are read as by transformers, and converted as dense ones."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4AssistantForCausalLM

from hyco_export.errors import CheckpointError
from hyco_export.models.capture import teacher_forced
from hyco_export.models.families.config_fields import converted, require_honoured
from hyco_export.models.families.gemma4_assistant import (
    HEAD_MODEL_TYPE,
    HONOURED,
    SELECTED_ROWS,
    HeadConfig,
    HeadModel,
    make_dense,
    ordered_embeddings,
    output_logits,
    require_ordering,
)
from hyco_export.models.head.quantisers import linear_layers
from hyco_export.models.head.stored import head_architecture
from hyco_export.models.head.unroll import head_spans, response_rows, unroll
from hyco_export.models.shapes import head_shape
from hyco_export.models.verifier import load_head
from tests.support import builders
from tests.support.ordered_head import ordered, save_ordered

VOCAB, CENTROIDS, BEST = 60, 12, 3


@pytest.fixture
def published() -> Gemma4AssistantForCausalLM:
    return ordered(builders.small_head(VOCAB), CENTROIDS, BEST)


def states(count: int) -> torch.Tensor:
    return torch.randn(count, builders.HEAD_WIDTH, generator=torch.Generator().manual_seed(0))


def test_a_published_head_scores_the_tokens_of_its_best_centroids_alone(published: Gemma4AssistantForCausalLM) -> None:
    last = states(SELECTED_ROWS + 5)
    found, dense = output_logits(published, last), published.lm_head(last)
    for row in range(len(last)):  # worked out token by token
        scores = published.masked_embedding.centroids.weight @ last[row]
        clusters = published.masked_embedding.token_ordering.view(CENTROIDS, -1)
        chosen = clusters[scores.topk(BEST).indices].flatten()
        torch.testing.assert_close(found[row, chosen], dense[row, chosen])
        others = torch.ones(VOCAB, dtype=torch.bool).scatter(0, chosen, False)
        assert found[row, others].max() < found[row, chosen].min()


def test_steps_of_a_published_head_are_transformers_own(published: Gemma4AssistantForCausalLM) -> None:
    capture = teacher_forced(builders.small_verifier(VOCAB), builders.random_ids(20, VOCAB), 8)
    with torch.no_grad():
        (logits,) = unroll(published, response_rows(capture, head_spans(published.config), 100), 1)
        for row, root in enumerate(capture.roots):
            keys_values = {
                f"{kind}_attention": tuple(
                    rows[:root].transpose(0, 1)[None] for rows in (capture.k[kind], capture.v[kind])
                )
                for kind in ("sliding", "full")
            }
            wanted = published(
                inputs_embeds=torch.cat([capture.e[root], capture.h[root - 1]])[None, None],
                attention_mask=torch.ones(1, root + 1),
                position_ids=torch.tensor([[root]]),
                shared_kv_states=keys_values,
                use_cache=False,
            ).logits[0, 0]
            chosen = wanted > wanted.min()
            assert int(chosen.sum()) == BEST * VOCAB // CENTROIDS
            torch.testing.assert_close(logits[row][chosen], wanted[chosen], atol=1e-5, rtol=0)


def test_a_dense_head_scores_every_token(published: Gemma4AssistantForCausalLM) -> None:
    config = published.config
    last = states(4)
    dense = make_dense(published)
    torch.testing.assert_close(output_logits(dense, last), last @ published.lm_head.weight.T)
    assert config.use_ordered_embeddings and not dense.config.use_ordered_embeddings
    assert (ordered_embeddings(config), ordered_embeddings(dense.config)) == (
        {"output_layer": "dense", "centroids": CENTROIDS, "best_centroids": BEST},
        {},
    )


def test_centroids_are_no_layer_of_a_converted_head(published: Gemma4AssistantForCausalLM) -> None:
    plain = builders.small_head(VOCAB)
    assert [name for name, _ in linear_layers(published)] == [name for name, _ in linear_layers(plain)]
    assert head_shape(published.config) == head_shape(plain.config)
    assert published.config.use_ordered_embeddings
    assert head_architecture(published) == head_architecture(plain)


def test_a_checkpoint_of_that_form_is_loaded_whole(tmp_path: Path) -> None:
    builders.small_head(VOCAB).save_pretrained(tmp_path / "plain")
    save_ordered(tmp_path / "plain", tmp_path / "head", CENTROIDS, BEST)
    head = load_head(tmp_path / "head", "float32")
    assert sorted(head.masked_embedding.token_ordering.tolist()) == list(range(VOCAB))


def test_damaged_clusters_are_named(tmp_path: Path, published: Gemma4AssistantForCausalLM) -> None:
    published.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["masked_embedding.token_ordering"][0] = tensors["masked_embedding.token_ordering"][1]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="token_ordering does not hold each of the 60 token ids once"):
        load_head(tmp_path, "float32")


@pytest.mark.parametrize(("centroids", "best"), [(7, 3), (12, 13)])
def test_centroids_that_cannot_be_are_named(centroids: int, best: int) -> None:
    head = ordered(builders.small_head(VOCAB), CENTROIDS, BEST)
    head.masked_embedding.num_centroids = centroids
    head.masked_embedding.centroid_intermediate_top_k = best
    with pytest.raises(CheckpointError, match=f"num_centroids is {centroids} and centroid_intermediate_top_k {best}"):
        require_ordering(head, "the head")


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
