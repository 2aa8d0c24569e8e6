"""A verifier's chat template and tokenizer, as the calls of chat clients use them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

from transformers import PreTrainedTokenizerFast

from hyco_export.core.recipe import Recipe
from hyco_export.errors import CheckpointError, ProtocolError, RecipeError
from hyco_export.models.checkpoints import checkpoint_folder
from hyco_export.models.text.tokenizer import encode_prompt
from hyco_export.models.verifier import load_tokenizer
from hyco_export.protocol.wire import Sampling
from hyco_export.server.chat.completions import ChatModel


class TemplateText:
    """`ChatText` of a checkpoint's tokenizer.

    Texts are encoded one at a time. Ids are decoded beside that, which changes nothing in the tokenizer and must not
    keep the event loop waiting.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        try:
            with self._lock:
                return encode_prompt(self._tokenizer, messages)
        except (RecipeError, CheckpointError) as error:  # callers need not know in which folder the template lies
            message = error.message.replace(f"the chat template of {self._tokenizer.name_or_path}", "the chat template")
            raise ProtocolError("unsupported", message, "send turns that the template takes") from error

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def open_chat(recipe: Recipe, recipe_folder: Path | None = None) -> ChatModel:
    """The recipe's verifier as chat clients know it; without a chat template it says why it takes no chats."""
    model, usual = recipe.models.verifier.model, recipe.sampling
    folder = checkpoint_folder(recipe.models.verifier, recipe_folder)
    name = folder.name if model.startswith(("/", ".", "~")) else model  # where a folder lies is nobody's business
    sampling = Sampling(usual.temperature, usual.top_k, usual.top_p)
    try:
        return ChatModel(name, TemplateText(load_tokenizer(folder)), sampling)
    except CheckpointError as error:
        return ChatModel(name, None, sampling, error.message.replace(str(folder), name))
