"""What a recipe's data amount to before anything runs: prompts are counted where they are at hand, answers expected.

Knows texts and limits; shapes of models are `stages.forecast`'s. Fetches nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hyco_export.core.conversations import Conversation, prompt_messages
from hyco_export.core.data.identity import identities
from hyco_export.core.data.prompts import prompt_named, require_counted
from hyco_export.core.data.source import Reference, as_source
from hyco_export.core.sizes.estimate import Split, Work
from hyco_export.errors import RecipeError
from hyco_export.stages.capture_text import asked_and_said
from hyco_export.stages.run_folder import RunFolder

EMBEDDED_VERIFIER = "embedded:verifier"
ANSWER_SHARE = 0.83  # of the limit that an answer fills: 25,625 tokens in 60 answers of at most 512 (Appendix A)
EMBEDDED_ANSWER_TOKENS = 55  # the embedded verifier's mean, 480 answers
MISSING_PROMPTS, MISSING_PROMPT_TOKENS = 60, 60  # of a set that is not here: Table 4's number, first turns of UltraChat
MISSING_CONVERSATIONS = 20_000  # §3.3
CHARACTERS_PER_TOKEN = 4  # of English, where the tokenizer is not here
TEMPLATE_TOKENS = 10  # of the chat template around a prompt

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Counter:
    """Tokens of a prompt as `capture` gives it to the verifier, and of plain text."""

    prompt: Callable[[Messages], int]
    text: Callable[[str], int]


def expected_work(run: RunFolder, verifier: Path | None, notes: list[str]) -> Work:
    """Sequences and tokens of each split; `verifier` is its folder where it is here, `notes` gets what is assumed."""
    limits, model = run.recipe.capture, run.recipe.models.verifier.model
    share = _answer_share(verifier)
    if share < 1 and model != EMBEDDED_VERIFIER:
        notes.append(f"answers are taken to fill {share:.0%} of $.capture's limits, as in the paper")

    def answer(limit: int) -> int:
        return min(limit, EMBEDDED_ANSWER_TOKENS) if model == EMBEDDED_VERIFIER else round(share * limit)

    count = _counter(run, verifier)
    calibration = _split(run, "calibration", count, answer(limits.max_new_tokens), notes)
    validation = _split(run, "validation", count, answer(limits.validation_max_new_tokens), notes)
    drawn = limits.sampled_answers if run.recipe.models.head else 0
    sampled = Split(drawn * calibration.sequences, drawn * calibration.prompt_tokens, calibration.answer_tokens)
    return Work(calibration, sampled, validation, _conversations(run, notes))


def _conversations(run: RunFolder, notes: list[str]) -> int:
    """How many the keep set reads."""
    reference = run.recipe.data.conversations
    found = _at_hand(run, "conversations", reference)
    if found is not None:
        total, remark = require_counted(found, _field("conversations", reference), identities(()))
        notes += [f"{remark}, only the others are counted"] if remark else []
        return total
    if (limit := as_source(reference).limit) is not None:
        return limit
    notes.append(f"$.data.conversations is not here: {MISSING_CONVERSATIONS:,} assumed")
    return MISSING_CONVERSATIONS


def _answer_share(verifier: Path | None) -> float:
    """1 for a model that never stops, as created ones do not."""
    if verifier is None:
        return ANSWER_SHARE
    from hyco_export.nn.verifier import load_config

    return ANSWER_SHARE if load_config(verifier).get_text_config().eos_token_id is not None else 1.0


def _counter(run: RunFolder, verifier: Path | None) -> Counter:
    """By the verifier's tokenizer, or by length where it is not here."""
    if verifier is None:
        return Counter(_prompt_by_length, lambda text: len(text) // CHARACTERS_PER_TOKEN)
    from hyco_export.nn.chat import encode_prompt, encode_text, encode_turns, require_rows
    from hyco_export.nn.verifier import load_config, load_tokenizer, read_tokenizer

    with_head = run.recipe.models.head is not None
    tokenizer = load_tokenizer(verifier) if with_head else read_tokenizer(verifier)
    encode = encode_prompt if with_head else encode_turns
    rows = load_config(verifier).get_text_config().vocab_size

    def prompt(messages: Messages) -> int:
        ids = encode(tokenizer, messages)
        require_rows(tokenizer, ids, rows)
        return len(ids)

    return Counter(prompt, lambda text: len(encode_text(tokenizer, text)))


def _prompt_by_length(messages: Messages) -> int:
    return sum(len(message["content"]) for message in messages) // CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS


def _at_hand(run: RunFolder, name: str, reference: Reference) -> Iterator[Conversation] | None:
    """None for what is on the Hub or nowhere."""
    try:
        return run.at_hand(name, reference)
    except RecipeError:
        return None


def _field(name: str, reference: Reference) -> str:
    """A source's place in the recipe, and its path where it is one."""
    path = as_source(reference).path
    return f"$.data.{name}: {path}" if path else f"$.data.{name}"


def _split(run: RunFolder, name: str, count: Counter, answer_tokens: int, notes: list[str]) -> Split:
    """A prompt set. Without a head, `capture` takes an answer that is written there already."""
    reference = getattr(run.recipe.data, name)
    found = _at_hand(run, name, reference)
    if found is None:
        prompts = as_source(reference).limit or MISSING_PROMPTS
        notes.append(f"$.data.{name} is not here: {prompts} prompts of {MISSING_PROMPT_TOKENS} tokens assumed")
        return Split(prompts, prompts * MISSING_PROMPT_TOKENS, answer_tokens)
    with_head = run.recipe.models.head is not None
    limit = run.recipe.capture.sequence_limit
    field = _field(name, reference)
    answers, prompt_tokens = [], 0
    for number, item in enumerate(found, 1):
        with prompt_named(field, number, item):
            asked, said = (prompt_messages(item), None) if with_head else asked_and_said(item)
            prompt_tokens += count.prompt([msgspec.to_builtins(message) for message in asked])
            answers.append(answer_tokens if said is None else min(count.text(said), limit))
    if not answers:
        raise RecipeError(f"{field} holds no conversation", "give at least one prompt")
    return Split(len(answers), prompt_tokens, round(sum(answers) / len(answers)))
