"""A recipe without a head: its stages, its text, and what it refuses."""

from pathlib import Path

import msgspec
import pytest

from hyco_export.core.artifact import CAPTURE, COMPILE, KEEPSET, SLM
from hyco_export.core.recipe import Checkpoint, Models, Recipe, SlmWeights
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.errors import RecipeError
from hyco_export.models.text.tokenizer import encode_prompt
from hyco_export.stages import capture_text
from hyco_export.stages.captured import read_answers
from hyco_export.stages.checks import require_family
from hyco_export.stages.declarations import Silent, Stage
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.table import (
    CAPTURE_STAGE,
    CAPTURE_TEXT_STAGE,
    STAGES,
    capture_text_config,
    chain_to,
    require_stage,
    stages_of,
)
from tests.support import builders

LINES = (
    '{"id": "real", "messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": " A list. "}]}',
    '{"id": "asked", "messages": [{"role": "user", "content": "What does a list keep?"}]}',
    '{"id": "text", "messages": [{"role": "assistant", "content": "A list keeps order."}]}',
)


def alone(**capture: int) -> Recipe:
    recipe = load_recipe(embedded_recipe())
    return msgspec.structs.replace(
        recipe,
        models=msgspec.structs.replace(recipe.models, head=None),
        capture=msgspec.structs.replace(recipe.capture, **capture),
    )


@pytest.fixture(params=["chat", "base"])
def inputs(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Path]:
    """A language model with or without a chat template, and both conversation files."""
    folder = tmp_path / "model"
    tokenizer = builders.small_tokenizer()
    builders.small_verifier(len(tokenizer)).save_pretrained(folder)
    if request.param == "base":
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    for split in ("calibration", "validation"):
        (tmp_path / split).write_text("\n".join(LINES) + "\n")
    return {"verifier": folder, "calibration": tmp_path / "calibration", "validation": tmp_path / "validation"}


def capture(inputs: dict[str, Path], out_dir: Path, **limits: int) -> dict:
    out_dir.mkdir()
    return capture_text.build(capture_text_config(alone(**limits)), inputs, out_dir, Silent())


def test_only_the_stages_of_an_slm_are_left() -> None:
    stages = stages_of(alone())
    assert [stage.name for stage in stages] == [CAPTURE, KEEPSET, SLM, COMPILE]
    assert [stage.name for stage in chain_to(stages, COMPILE)] == [CAPTURE, KEEPSET, SLM, COMPILE]
    assert stages_of(load_recipe(embedded_recipe())) is STAGES


@pytest.mark.parametrize("name", ["qat-head", "convert-head"])
def test_stages_of_a_head_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=rf"recipe tiny has no \$\.models\.head: {name} has nothing to work on"):
        require_stage(alone(), name)
    require_stage(load_recipe(embedded_recipe()), name)
    with pytest.raises(RecipeError, match=r"\$\.models\.head is missing"):
        alone().models.require_head()


def test_checkpoints_are_still_compared(tmp_path: Path) -> None:
    require_family(RunFolder(tmp_path, alone(), None))


def test_a_written_answer_is_taken_as_it_stands(inputs: dict[str, Path], tmp_path: Path) -> None:
    metrics = capture(inputs, tmp_path / "out", max_new_tokens=5, validation_max_new_tokens=3)
    assert metrics["sequences"] == {"calibration": 3, "validation": 3}
    real, asked, text = read_answers(tmp_path / "out", "calibration")
    assert real.text == "A list."
    assert 0 < len(asked.answer_ids) <= 5
    assert text.text == "A list keeps order."
    assert len(real.messages) == 1
    assert len(text.messages) == 0
    assert len(read_answers(tmp_path / "out", "validation")[1].answer_ids) <= 3


def test_prompts_are_what_the_model_reads(inputs: dict[str, Path], tmp_path: Path) -> None:
    capture(inputs, tmp_path / "out", max_new_tokens=1, validation_max_new_tokens=1)
    _, asked, _ = read_answers(tmp_path / "out", "calibration")
    tokenizer = builders.small_tokenizer()
    question = {"role": "user", "content": "What does a list keep?"}
    plain = tokenizer("What does a list keep?\n\n").input_ids
    chat = encode_prompt(tokenizer, [question])
    assert asked.prompt_ids in (plain, chat)
    assert plain != chat


def test_the_sequence_limit_holds(inputs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"a calibration prompt has \d+ tokens, \$\.capture\.sequence_limit is 2"):
        capture(inputs, tmp_path / "out", sequence_limit=2)


def test_an_empty_file_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    inputs["validation"].write_text("\n")
    with pytest.raises(RecipeError, match=r"\$\.data\.validation: .* holds no conversation"):
        capture(inputs, tmp_path / "out")


def test_one_checkpoint_may_stand_twice() -> None:
    gemma = Checkpoint(model="gemma", gguf_file="gemma.gguf")
    assert Models(verifier=gemma, slm=gemma).head is None


def test_the_clip_ratios_must_be_in_order(tmp_path: Path) -> None:
    path = tmp_path / "edited.yaml"
    text = embedded_recipe().read_text()
    path.write_text(
        text.replace("slm:  #", "slm:\n  weights: {bits: 8, clip_ratio_low: 0.9, clip_ratio_high: 0.8}\n  #")
    )
    with pytest.raises(RecipeError, match=r"\$\.slm\.weights\.clip_ratio_low is above clip_ratio_high"):
        load_recipe(path)


def test_no_weights_leave_the_key_as_it_was() -> None:
    graph = load_recipe(embedded_recipe()).slm
    assert "weights" not in msgspec.to_builtins(graph)
    assert "weights" in msgspec.to_builtins(msgspec.structs.replace(graph, weights=SlmWeights(bits=4)))


QUESTIONS = ['{"messages": [{"role": "user", "content": "a?"}]}', '{"messages": [{"role": "user", "content": "b?"}]}']
BAD = {
    "refused by the template": (
        '{"messages": [{"role": "user", "content": "stop"}]}',
        "refuses turns of user: no stop",
    ),
    "too long": ('{"messages": [{"role": "user", "content": "' + "a b " * 3000 + '"}]}', "sequence_limit is 2048"),
    "role": ('{"messages": [{"role": "human", "content": "a"}]}', "has turns of 'human'"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stage", [CAPTURE_STAGE, CAPTURE_TEXT_STAGE], ids=["capture", "text"])
def test_a_prompt_that_cannot_be_used_is_named_before_any_work(stage: Stage, name: str, tmp_path: Path) -> None:
    tokenizer = builders.small_tokenizer()
    builders.small_verifier(len(tokenizer)).save_pretrained(tmp_path / "model")
    refusing = "{% if messages[-1]['content'] == 'stop' %}{{ raise_exception('no stop') }}{% endif %}"
    tokenizer.chat_template = refusing + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "model")
    inputs = {name: tmp_path / f"{name}.jsonl" for name in ("calibration", "validation")}
    inputs["calibration"].write_text(QUESTIONS[0])
    inputs["validation"].write_text("\n".join(QUESTIONS))
    inputs["verifier"] = tmp_path / "model"
    config = stage.config(load_recipe(embedded_recipe()))
    stage.check(config, inputs)
    line, part = BAD[name]
    inputs["validation"].write_text("\n".join([*QUESTIONS, line]))
    with pytest.raises(RecipeError) as caught:
        stage.check(config, inputs)
    assert caught.value.message.startswith(f"$.data.validation: {inputs['validation']}: conversation 3 (")
    assert part in caught.value.message
