"""What a bundle takes of a run."""

from hyco_export.bundle.contents import chat_parts
from tests.evaluate.diagnosis.small_run import SmallRun


def test_chat_parts_give_the_templates_own_text(small_run: SmallRun) -> None:
    chat = chat_parts(small_run.tokenizer)
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    messages.append({"role": "user", "content": "three"})
    whole = small_run.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat.before + "one" + chat.after + "two" + chat.between + "three" + chat.after == whole
