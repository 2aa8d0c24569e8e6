"""Opening a checkpoint's tokenizer without transformers, and encoding conversations by its template: the same entries
and ids, clear refusals.
"""

import json
import random

import pytest

from hyco_export.errors import CheckpointError, RecipeError
from hyco_export.models.text.tokenizer import (
    TokenizerFile,
    encode_prompt,
    encode_text,
    encode_turns,
    open_tokenizer,
    require_one_reading,
    require_rows,
    require_written,
)
from hyco_export.models.text.vocabulary import special_ids
from hyco_export.models.verifier import read_tokenizer
from tests.support.builders import small_tokenizer

TEXT = "os.path joins the parts of a path, and json.dumps writes what json.loads reads: {}, [], 12, 'x'"


def edit_json(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a tokenizer, and a config for transformers to open it by."""
    small_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_text"}))
    return tmp_path


def ids_of(folder):
    """TEXT by both ways of opening a tokenizer."""
    return [
        open_tokenizer(folder).backend.encode(TEXT, add_special_tokens=False).ids,
        read_tokenizer(folder)(TEXT, add_special_tokens=False).input_ids,
        read_tokenizer(folder).backend_tokenizer.encode(TEXT, add_special_tokens=False).ids,
    ]


STORED = {
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 500},
        "direction": "Left",
        "pad_to_multiple_of": 64,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    },
}


@pytest.mark.parametrize("name", STORED)
def test_what_the_last_user_had_set_in_the_file_changes_no_ids(checkpoint, name):
    before = ids_of(checkpoint)
    edit_json(checkpoint / "tokenizer.json", **{name: STORED[name]})
    assert ids_of(checkpoint) == before
    assert before[0] == before[1] == before[2] and len(before[0]) > 4


def test_what_the_last_user_had_set_in_the_configuration_changes_no_ids(checkpoint):
    before = ids_of(checkpoint)
    marked = read_tokenizer(checkpoint)("<|turn>user", add_special_tokens=False).input_ids
    edit_json(
        checkpoint / "tokenizer_config.json", model_max_length=4, truncation_side="left", split_special_tokens=True
    )
    assert ids_of(checkpoint) == before
    assert read_tokenizer(checkpoint)("<|turn>user", add_special_tokens=False).input_ids == marked
    assert read_tokenizer(checkpoint)(TEXT, truncation=True, add_special_tokens=False).input_ids == before[0]


def test_dropout_is_off_however_a_tokenizer_is_opened(checkpoint):
    before = ids_of(checkpoint)
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.9
    (checkpoint / "tokenizer.json").write_text(json.dumps(content))
    assert [ids_of(checkpoint) for _ in range(3)] == [before] * 3


def unmark(folder, name):
    """Take the mark of a control token out of the file, and its name out of the configuration; its id."""
    content = json.loads((folder / "tokenizer.json").read_text())
    token = next(token for token in content["added_tokens"] if token["content"] == name)
    token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    edit_json(folder / "tokenizer_config.json", extra_special_tokens=[], chat_template=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return token["id"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("generation_config.json", lambda stop: json.dumps({"eos_token_id": [1, stop]})),
        ("generation_config.json", lambda stop: json.dumps({"eos_token_id": stop})),
        ("config.json", lambda stop: json.dumps({"model_type": "gemma4", "text_config": {"eos_token_id": stop}})),
        ("chat_template.jinja", lambda stop: "{{ messages[0]['content'] + '<turn|>' }}"),
        ("chat_template.json", lambda stop: json.dumps({"chat_template": "{{ '<turn|>' }}"})),
        ("additional_chat_templates/tools.jinja", lambda stop: "{{ '<turn|>' }}"),
        ("special_tokens_map.json", lambda stop: json.dumps({"eot_token": {"content": "<turn|>"}})),
    ],
)
def test_a_role_makes_a_token_special_without_its_mark(checkpoint, file, content):
    stop = unmark(checkpoint, "<turn|>")
    rows = open_tokenizer(checkpoint).backend.get_vocab_size()
    assert stop not in special_ids(open_tokenizer(checkpoint), rows)
    (checkpoint / file).parent.mkdir(exist_ok=True)
    (checkpoint / file).write_text(content(stop))
    opened = open_tokenizer(checkpoint)
    assert stop in special_ids(opened, rows)
    said = opened.backend.encode("yes<turn|>", add_special_tokens=False).ids
    assert said[-1] == stop
    assert "turn" not in opened.backend.decode(said, skip_special_tokens=True)


def test_an_id_with_a_role_is_kept_even_where_it_looks_like_a_placeholder():
    backend = small_tokenizer().backend_tokenizer
    backend.add_special_tokens(["<unused7>"])
    token = backend.token_to_id("<unused7>")
    rows = backend.get_vocab_size()
    assert token not in special_ids(TokenizerFile(backend), rows)
    assert token in special_ids(TokenizerFile(backend, role_ids=frozenset({token, rows})), rows)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {"type": "Future"}}'),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", "{"),
        ("generation_config.json", "{'eos_token_id': 1}"),
        ("chat_template.json", "template"),
    ],
)
def test_a_broken_file_is_named_by_both_ways_of_opening(checkpoint, file, content):
    (checkpoint / file).write_text(content)
    for opening in (open_tokenizer, read_tokenizer):
        with pytest.raises(CheckpointError, match=r"cannot be read") as caught:
            opening(checkpoint)
        assert str(checkpoint) in caught.value.message


def test_entries_and_specials_are_those_of_transformers(tmp_path):
    whole = small_tokenizer()
    whole.save_pretrained(tmp_path)
    opened = open_tokenizer(tmp_path)
    assert opened.backend.get_vocab() == whole.get_vocab()
    assert set(whole.all_special_ids) <= set(special_ids(opened, len(whole)).tolist())
    assert set(whole.all_special_tokens) <= opened.special_names | {
        token.content for token in whole.added_tokens_decoder.values() if token.special
    }


def test_names_in_the_configuration_are_special_whatever_their_form(tmp_path):
    whole = small_tokenizer()
    whole.save_pretrained(tmp_path)
    config = {
        "eos_token": {"content": "a", "lstrip": False},
        "boi_token": "b",
        "pad_token": None,
        "extra_special_tokens": {"audio": "c"},
        "additional_special_tokens": ["d", {"content": "e"}, "not an entry"],
        "add_bos_token": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    opened = open_tokenizer(tmp_path)
    assert opened.special_names == {"a", "b", "c", "d", "e", "not an entry"}
    marked = special_ids(TokenizerFile(opened.backend), len(whole)).tolist()
    named = {whole.get_vocab()[name] for name in "abcde" if name in whole.get_vocab()}
    assert named and sorted({*marked, *named}) == special_ids(opened, len(whole)).tolist()


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer of .* cannot be read"):
        open_tokenizer(tmp_path)


# ---- conversations

USER = {"role": "user", "content": "os?"}
ALTERNATE = "{% if messages | length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}x"


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
