"""A conversation becomes ids by the checkpoint's template; what template, tokenizer and text disagree on is said."""

import json
import random

import pytest

from hyco_export.errors import CheckpointError, RecipeError
from hyco_export.models.text.tokenizer import (
    encode_prompt,
    encode_text,
    encode_turns,
    open_tokenizer,
    require_one_reading,
    require_rows,
    require_written,
)
from hyco_export.models.verifier import read_tokenizer
from tests.support.builders import small_tokenizer

USER = {"role": "user", "content": "os?"}
ALTERNATE = "{% if messages | length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}x"


@pytest.fixture
def checkpoint(tmp_path):
    small_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_text"}))
    return tmp_path


def with_template(folder, text):
    (folder / "chat_template.jinja").write_text(text)
    return read_tokenizer(folder)


@pytest.mark.parametrize(
    ("template", "error", "part"),
    [
        (ALTERNATE, RecipeError, "refuses turns of user, user: roles must alternate"),
        ("{{ messages[0]['name'].upper() }}", RecipeError, "refuses turns of user, user: UndefinedError: "),
        ("{{ messages[0]['content'] + 1 }}", RecipeError, "refuses turns of user, user: TypeError: "),
        ("{{ tools[0].name }}", RecipeError, "refuses turns of user, user: "),
        ("\n{% for message in messages %}", CheckpointError, "line 2: "),
        ("{{ messages | nosuchfilter }}", CheckpointError, "line 1: "),
        ("{% if false %}x{% endif %}", CheckpointError, "writes nothing"),
    ],
)
def test_a_template_that_fails_is_the_users_affair(checkpoint, template, error, part):
    with pytest.raises(error) as caught:
        encode_prompt(with_template(checkpoint, template), [USER, USER])
    assert caught.value.message.startswith(f"the chat template of {checkpoint}")
    assert part in caught.value.message
    assert caught.value.hint and caught.value.exit_code == 2


def test_a_token_beyond_the_models_rows_is_named(checkpoint):
    tokenizer = read_tokenizer(checkpoint)
    ids = encode_text(tokenizer, "os.path")
    require_rows(tokenizer, ids, max(ids) + 1)
    require_rows(tokenizer, [], 1)
    with pytest.raises(CheckpointError, match=rf"is token {max(ids):,}, but the model has {max(ids):,} rows") as caught:
        require_rows(tokenizer, ids, max(ids))
    assert repr(tokenizer.convert_ids_to_tokens(max(ids))) in caught.value.message


def test_a_tokenizer_of_which_transformers_makes_another_is_refused(checkpoint):
    texts = ["os.path joins", "", "json?"]
    require_one_reading(read_tokenizer(checkpoint), checkpoint, texts)
    path = checkpoint / "tokenizer_config.json"
    added = {"300": {"content": "path joins", "special": False, "normalized": False}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens_decoder": added}))
    with pytest.raises(CheckpointError, match=r"tokens for 'os\.path joins', transformers") as caught:
        require_one_reading(read_tokenizer(checkpoint), checkpoint, texts)
    assert "save_pretrained" in caught.value.hint


def test_entries_that_another_file_adds_are_refused(checkpoint):
    (checkpoint / "added_tokens.json").write_text(json.dumps({"brand-new": 5000}))
    with pytest.raises(CheckpointError, match=r"differ in 1 entries, first 'brand-new': token none in the file and "):
        require_one_reading(read_tokenizer(checkpoint), checkpoint, [])


def test_a_tokenizer_in_another_file_is_refused_by_every_reader(checkpoint):
    (checkpoint / "tokenizer.4.0.0.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    path = checkpoint / "tokenizer_config.json"
    listed = ["tokenizer.4.0.0.json", "tokenizer.json"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "fast_tokenizer_files": listed}))
    for reader in (read_tokenizer, open_tokenizer):
        with pytest.raises(CheckpointError, match=r"names 'tokenizer\.4\.0\.0\.json' under fast_tokenizer_files"):
            reader(checkpoint)


def test_a_template_that_fails_for_everybody_is_what_is_to_be_corrected(checkpoint):
    for template, hint in ((ALTERNATE, "correct or remove the conversation"), ("{{ 1 / 0 }}", "correct the template")):
        with pytest.raises(RecipeError) as caught:
            encode_prompt(with_template(checkpoint, template), [USER, USER])
        assert caught.value.hint.startswith(hint)


WRITTEN = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] | trim }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("os.path", "drops what is asked"),
        (WRITTEN.replace("['content']", "['content'][0]['text']"), "drops what is asked"),
        ("{{ messages[0]['content'] }}", "drops what is asked"),
        (WRITTEN + "{{ strftime_now('%Y') }}", "depends on the time or on chance"),
        (WRITTEN + "{{ strftime_now('%A') }}", "depends on the time or on chance"),
        (WRITTEN + "{{ strftime_now('%d %b') }}", "depends on the time or on chance"),
        (WRITTEN + "{{ range(99999) | random }}", "depends on the time or on chance"),
        (WRITTEN + "{{ lipsum() }}", "depends on the time or on chance"),
    ],
)
def test_a_template_writes_the_messages_and_nothing_else(checkpoint, template, words):
    with pytest.raises(CheckpointError, match=words):
        require_written(with_template(checkpoint, template), [USER, {"role": "user", "content": "json?"}])


def test_templates_that_write_the_messages_pass(checkpoint):
    state = random.getstate()
    for template in (WRITTEN, "{% if false %}{{ strftime_now('%Y') }}{% endif %}" + WRITTEN):
        require_written(with_template(checkpoint, template), [USER, {"role": "user", "content": "json?\n"}])
    require_written(read_tokenizer(checkpoint), [])
    assert random.getstate() == state


@pytest.mark.parametrize("ends", [False, True])
def test_plain_text_begins_as_the_tokenizer_says_and_is_never_ended(checkpoint, ends):
    path = checkpoint / "tokenizer.json"
    content = json.loads(path.read_text())
    if ends:
        content["post_processor"]["single"].append({"SpecialToken": {"id": "<eos>", "type_id": 0}})
        content["post_processor"]["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}
    path.write_text(json.dumps(content))
    (checkpoint / "chat_template.jinja").unlink()
    tokenizer = read_tokenizer(checkpoint)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert (tokenizer("x").input_ids[-1] == eos) is ends  # what the file asks for
    assert encode_turns(tokenizer, [USER]) == [bos, *encode_text(tokenizer, "os?\n\n")]
    assert encode_turns(tokenizer, []) == [bos]
