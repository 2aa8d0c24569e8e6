"""A checkpoint's tokenizer as the `tokenizers` library reads it (a third of the memory of transformers' own loading),
and the token ids of a conversation.

A tokenizer that was opened by `open_tokenizer` or by transformers (`verifier.read_tokenizer`) is `cleaned` first: its
file may hold settings of its last use (truncation, padding, dropout), which must not change a text's ids.
"""

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, cast

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from hyco_export.errors import CheckpointError, RecipeError, first_line

TOKENIZER_NAME = "tokenizer.json"
NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json")
NUMBERING_FILES = ("generation_config.json", "config.json")
VERSIONED_FILES = "fast_tokenizer_files"  # names by version of transformers, in the first of NAMING_FILES
TOKEN_KEY_END = "_token"  # bos_token, eos_token, image_token, ...
ID_KEY_END = "_token_id"  # eos_token_id, pad_token_id, image_token_id, ...
TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")
TEMPLATE_KEY = "chat_template"
TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
TEMPLATES_IN_JSON = ("tokenizer_config.json", "chat_template.json")


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer, and the tokens that other files of the checkpoint call special.

    Attributes:
        special_names: entries that its tokenizer configuration names.
        role_ids: ids that its model and generation configuration give a role (end of an answer, start, padding,
            image, ...), and of the added tokens that its chat templates write.
    """

    backend: Tokenizer
    special_names: frozenset[str] = frozenset()
    role_ids: frozenset[int] = frozenset()


def open_tokenizer(folder: Path) -> TokenizerFile:
    """The tokenizer of a checkpoint folder, cleaned.

    Raises:
        CheckpointError: no tokenizer.json there, or not one; or another file beside it that cannot be read.
    """
    path = folder / TOKENIZER_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {TOKENIZER_NAME}", "save its fast tokenizer there: save_pretrained")
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"tokenizer of {folder} cannot be read: {error}", "fetch or save it again") from error
    return cleaned(backend, folder)


def cleaned(backend: Tokenizer, folder: Path) -> TokenizerFile:
    """The tokenizer of a checkpoint folder without settings of its last use, and with all control tokens marked.

    Changes `backend` in place: nothing is cut or padded; a text has one tokenization (dropout draws one of many);
    control tokens are found in texts; added tokens with a role count as special, whatever their mark in the file.

    Raises:
        CheckpointError: a configuration or template file that cannot be read.
    """
    require_named_files(folder)
    names = frozenset(name for file in NAMING_FILES for name in _special_names(_json(folder / file)))
    role_ids = {token for file in NUMBERING_FILES for token in stated_ids(folder / file)}
    added = backend.get_added_tokens_decoder()
    templates = list(_templates(folder))
    for token_id, token in added.items():
        if token.content.strip() and any(token.content in template for template in templates):
            role_ids.add(token_id)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    if getattr(backend.model, "dropout", None) is not None:  # of BPE
        backend.model.dropout = None
    unmarked = (token for token_id, token in added.items() if token_id in role_ids or token.content in names)
    backend.add_special_tokens([token.content for token in unmarked if not token.special])
    return TokenizerFile(backend, names, frozenset(role_ids))


def _json(path: Path) -> dict[str, Any]:
    """The object of a JSON file; an empty one where there is no file.

    Raises:
        CheckpointError: unreadable, or not an object.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "correct the file, or fetch it again") from error


def _special_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Texts of the tokens that a tokenizer_config.json names; each is a string, or a mapping with `content`."""
    tokens = [value for key, value in config.items() if key.endswith(TOKEN_KEY_END)]
    for key in TOKEN_LISTS:
        listed = config.get(key) or []
        tokens += listed.values() if isinstance(listed, dict) else listed
    for token in tokens:
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            yield content


def require_named_files(folder: Path) -> None:
    """Refuse a checkpoint whose tokenizer transformers would read from another file than `tokenizer.json`.

    Raises:
        CheckpointError: its configuration names another file, or is not an object.
    """
    config, *_ = [_json(folder / file) for file in NAMING_FILES]
    listed = config.get(VERSIONED_FILES) or []
    others = [name for name in listed if name != TOKENIZER_NAME] if isinstance(listed, list) else [listed]
    if others:
        raise CheckpointError(
            f"{folder / NAMING_FILES[0]} names {others[0]!r} under {VERSIONED_FILES}: transformers may read it in "
            f"place of {TOKENIZER_NAME}",
            f"rename the file that is right to {TOKENIZER_NAME} and remove {VERSIONED_FILES}",
        )


def stated_ids(path: Path) -> frozenset[int]:
    """Ids under keys like `eos_token_id` of a configuration file, also in the parts of a multimodal one.

    Raises:
        CheckpointError: not an object, or such a key holds no ids; names file and field.
    """
    return frozenset(_role_ids(_json(path), path))


def _role_ids(config: Mapping[str, Any], path: Path) -> Iterator[int]:
    for key, value in config.items():
        if key.endswith(ID_KEY_END):
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
                raise CheckpointError(
                    f"{path}: {key} is {value!r}, it must be a token id or a list of them", "correct the file"
                )
            yield from ids
        elif isinstance(value, dict):
            yield from _role_ids(value, path)


def token_ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    """The ids of a configuration's `eos_token_id`: none, one or several."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _templates(folder: Path) -> Iterator[str]:
    """Texts of all chat templates of a checkpoint.

    Raises:
        CheckpointError: a template cannot be read as text.
    """
    for pattern in TEMPLATE_FILES:
        for path in sorted(folder.glob(pattern)):
            try:
                yield path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}", "correct the file") from error
    for name in TEMPLATES_IN_JSON:
        template = _json(folder / name).get(TEMPLATE_KEY)
        if isinstance(template, str):
            yield template
        elif isinstance(template, list):  # several, as [{name, template}, ...]
            yield from (str(entry.get("template", "")) for entry in template if isinstance(entry, dict))


# ---- token ids of a conversation: by the chat template, or as plain text without one

BETWEEN_TURNS = "\n\n"
TRIES = 4  # with other random numbers, for every prompt
LATER = timedelta(days=400, hours=7, minutes=13, seconds=17)
PROBE = "a"  # a text that shows which tokens a tokenizer puts before every text


def encode_prompt(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation by the chat template, up to where the model's answer begins.

    Raises:
        RecipeError: the template refuses the conversation.
        CheckpointError: it is not a template, or writes no token.
    """
    turns = [dict(message) for message in messages]
    template = f"the chat template of {tokenizer.name_or_path}"
    try:
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    except TemplateSyntaxError as error:
        raise CheckpointError(f"{template}, line {error.lineno}: {error.message}", "correct the template") from error
    except Exception as error:  # a template may call anything; raise_exception gives TemplateError
        roles = ", ".join(message["role"] for message in messages)
        own_words = isinstance(error, TemplateError) and not isinstance(error, UndefinedError)
        detail = first_line(error) if own_words else f"{type(error).__name__}: {first_line(error)}"
        raise RecipeError(
            f"{template} refuses turns of {roles}: {detail}",
            "correct or remove the conversation, or use a checkpoint whose template takes it"
            if _takes_a_question(tokenizer)
            else "correct the template: it refuses a single turn of the user too",
        ) from error
    if not ids:
        raise CheckpointError(f"{template} writes nothing for a conversation", "correct the template")
    return cast(list[int], ids)


def _takes_a_question(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Does the template accept a single turn of the user?"""
    with suppress(Exception):  # a template may call anything
        tokenizer.apply_chat_template([{"role": "user", "content": PROBE}], add_generation_prompt=True)
        return True
    return False


def require_written(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]]) -> None:
    """Refuse a chat template that drops the last turn's content, or depends on time or chance.

    Raises:
        CheckpointError: another content gives the same ids, or the same content gives other ids at another time or try.
        RecipeError: the template refuses the conversation.
    """
    if tokenizer.chat_template is None or not messages:
        return
    ids, template = encode_prompt(tokenizer, messages), f"the chat template of {tokenizer.name_or_path}"
    last = {**messages[-1], "content": f"{messages[-1]['content']} {PROBE} {PROBE.upper()}"}
    if encode_prompt(tokenizer, [*messages[:-1], last]) == ids:
        raise CheckpointError(
            f"{template} drops what is asked: other words of the last turn ({last['role']}) give the same tokens",
            "correct the template: it must write the content, a text, of every turn",
        )
    if all(again == ids for again in _tried_again(tokenizer, messages)):
        return
    raise CheckpointError(
        f"{template} depends on the time or on chance: the same messages give other tokens at another time",
        "correct the template: write a fixed date in place of strftime_now, and no random choice",
    )


def _tried_again(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]]) -> Iterator[list[int]]:
    """Ids of the same messages at another time, and with other random numbers; the process's own state is restored."""
    with _another_time():
        yield encode_prompt(tokenizer, messages)
    state = random.getstate()
    try:
        for seed in range(TRIES):
            random.seed(seed)
            yield encode_prompt(tokenizer, messages)
    finally:
        random.setstate(state)


@contextmanager
def _another_time() -> Iterator[None]:
    """In the block chat templates see a date more than a year ahead: year, month, day, weekday and hour differ."""

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Later":
            return cls.fromtimestamp(time.time() + LATER.total_seconds(), tz)

    clock = chat_template_utils.datetime
    chat_template_utils.datetime = Later  # type: ignore[misc]
    try:
        yield
    finally:
        chat_template_utils.datetime = clock  # type: ignore[misc]


def encode_turns(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation up to where the assistant's next answer begins; of no messages, what begins every text.

    Raises:
        RecipeError, CheckpointError: as `encode_prompt`.
    """
    if tokenizer.chat_template is not None and messages:
        return encode_prompt(tokenizer, messages)
    text = "".join(message["content"].strip() + BETWEEN_TURNS for message in messages)
    return _text_prefix(tokenizer) + encode_text(tokenizer, text)


def encode_text(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of a text alone."""
    return cast(list[int], tokenizer(text, add_special_tokens=False).input_ids)


def _text_prefix(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids that a tokenizer puts before every text, without those that it puts after it (`add_eos_token`)."""
    whole, bare = cast(list[int], tokenizer(PROBE).input_ids), encode_text(tokenizer, PROBE)
    starts = (first for first in range(len(whole)) if whole[first : first + len(bare)] == bare)
    return whole[: next(starts, 0)]


def require_rows(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], rows: int) -> None:
    """Refuse ids without a row in the model's embedding.

    Raises:
        CheckpointError: the tokenizer has more tokens than the model, and the text contains one of them.
    """
    beyond = max(ids, default=0)
    if beyond >= rows:
        raise CheckpointError(
            f"{tokenizer.convert_ids_to_tokens(beyond)!r} is token {beyond:,}, but the model has {rows:,} rows",
            "take it out of the conversation, or use the tokenizer that was saved with the model",
        )


def require_one_reading(tokenizer: PreTrainedTokenizerFast, folder: Path, texts: Sequence[str]) -> None:
    """Refuse a checkpoint whose tokenizer.json, by which tokens are counted, differs from transformers' tokenizer, by
    which prompts are encoded.

    Raises:
        CheckpointError: their entries or the ids of a text differ: transformers also read another file.
    """
    backend = open_tokenizer(folder).backend
    counting = backend.encode_batch(list(texts), add_special_tokens=False)
    for text, encoding in zip(texts, counting, strict=True):
        asked = encode_text(tokenizer, text)
        if asked != encoding.ids:
            raise CheckpointError(
                f"{folder / 'tokenizer.json'} gives {len(encoding.ids)} tokens for {text[:40]!r}, transformers "
                f"({type(tokenizer).__name__}) gives {len(asked)} others",
                "save it anew from the one that is right: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            )
    ours, theirs = backend.get_vocab(), tokenizer.get_vocab()
    if ours != theirs:  # two sets of 262,144 entries take memory: they are made only to say where
        apart = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda entry: entry[::-1])
        entry = apart[0][0]
        raise CheckpointError(
            f"{folder / TOKENIZER_NAME} and transformers ({type(tokenizer).__name__}) differ in {len(apart)} entries, "
            f"first {entry!r}: token {ours.get(entry, 'none')} in the file and {theirs.get(entry, 'none')} there",
            "save it anew from the one that is right: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
