"""Does a text become the ids that the artifacts were built with? And do verifier and SLM mean the same by an id?"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.core.golden import Golden
from hyco_export.evaluate.diagnosis.finding import Finding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHOWN = 3


def tokenizer_findings(
    golden: Golden, tokenizer: "PreTrainedTokenizerFast", slm_checkpoint: Path | None
) -> Iterator[Finding]:
    """The golden prompts through this tokenizer and template, and the SLM's vocabulary beside the verifier's.

    `slm_checkpoint` is None where a token bridge lies between the two vocabularies.
    """
    from hyco_export.nn.chat import encode_prompt

    wrong = [
        number
        for number, text in enumerate(golden.texts)
        if tuple(encode_prompt(tokenizer, [msgspec.to_builtins(message) for message in text.messages]))
        != text.prompt_ids
    ]
    if wrong:
        seen = f"{len(wrong)} of {len(golden.texts)} golden prompts become other ids than when the head was converted"
        hint = "use the tokenizer.json and chat template that the verifier's checkpoint had then, or capture again"
        yield Finding("tokenizer", "the device's tokenizer", seen, hint)
    if slm_checkpoint is not None:
        yield from _slm_vocabulary(tokenizer, slm_checkpoint)


def _slm_vocabulary(tokenizer: "PreTrainedTokenizerFast", slm_checkpoint: Path) -> Iterator[Finding]:
    """Equal sizes with other tokens raise no error anywhere: the SLM then drafts words that were never meant."""
    from hyco_export.nn.verifier import load_tokenizer

    if not (slm_checkpoint / "tokenizer.json").is_file():
        return
    ours: Mapping[str, int] = tokenizer.get_vocab()
    theirs: Mapping[str, int] = load_tokenizer(slm_checkpoint).get_vocab()
    if len(ours) != len(theirs):
        return
    moved = [token for token, number in ours.items() if theirs.get(token) != number]
    if moved:
        examples = ", ".join(repr(token) for token in moved[:SHOWN])
        seen = f"{len(moved)} of {len(ours)} tokens have other ids in the SLM's tokenizer, among them {examples}"
        yield Finding("tokenizer", "verifier and SLM", seen, "use an SLM with the verifier's tokenizer ($.models.slm)")
