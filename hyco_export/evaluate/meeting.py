"""A run folder meets a server: what is driven, that both belong together, and the prompts as the verifier reads them.

The start of `validate` and of `bench`. Knows where things lie; drives nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hyco_export.core.conversations import prompt_messages
from hyco_export.core.data.prompts import PROMPT_COUNT, prompt_named, require_enough
from hyco_export.core.data.prompts import read_prompts as read_prompt_set
from hyco_export.core.recipe import Recipe
from hyco_export.evaluate.compatibility import require_compatible
from hyco_export.evaluate.run_artifacts import Checkpoints, RunArtifacts, expected_server
from hyco_export.evaluate.trials import Prompt
from hyco_export.runtime.ports import Transport
from hyco_export.runtime.transport import HttpTransport
from hyco_export.runtime.wire import Sampling, ServerInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Subject:
    """What is driven: a run folder, its recipe and opened artifacts, and where the recipe's references lie."""

    root: Path
    recipe: Recipe
    artifacts: RunArtifacts
    checkpoints: Checkpoints  # what the artifacts were made from; the verifier's has the tokenizer
    prompts: Path  # JSONL of conversations


@dataclass(frozen=True)
class Meeting:
    """Both sides, found to belong together."""

    transport: Transport
    info: ServerInfo
    artifacts: RunArtifacts
    tokenizer: "PreTrainedTokenizerFast"


def meet(subject: Subject, url: str, transport: Transport | None = None) -> Meeting:
    """Ask the server what it is, and compare that with the run; by plain calls without a transport.

    Raises:
        ServerError: nobody answers at `url`, or a server that does not belong to this run.
    """
    transport = transport or HttpTransport(url)
    info = transport.info()

    from hyco_export.nn.checkpoint import tokenizer_digest  # after the server has answered: they take seconds to import
    from hyco_export.nn.verifier import load_tokenizer

    tokenizer = load_tokenizer(subject.checkpoints.verifier)
    expected = expected_server(subject.artifacts, tokenizer_digest(subject.checkpoints.verifier), subject.recipe)
    require_compatible(info, expected, url)
    return Meeting(transport, info, subject.artifacts, tokenizer)


def wire_sampling(recipe: Recipe) -> Sampling:
    """The recipe's sampling as it travels."""
    return Sampling(recipe.sampling.temperature, recipe.sampling.top_k, recipe.sampling.top_p)


def read_prompts(
    path: Path, tokenizer: "PreTrainedTokenizerFast", count: int, asked_by: str = PROMPT_COUNT
) -> list[Prompt]:
    """The first `count` prompts of the validation set through the chat template; `asked_by` is the field or option that
    says how many.

    Raises:
        RecipeError: the set cannot be used, has fewer, or one that the chat template refuses.
    """
    from hyco_export.nn.chat import encode_prompt

    found = read_prompt_set(path, "$.data.validation")
    require_enough(len(found), count, path, asked_by)
    prompts = []
    for number, conversation in enumerate(found[:count], 1):
        messages = [{"role": m.role, "content": m.content} for m in prompt_messages(conversation)]
        with prompt_named(f"$.data.validation: {path}", number, conversation):
            prompts.append(Prompt(conversation.id, tuple(encode_prompt(tokenizer, messages))))
    return prompts
