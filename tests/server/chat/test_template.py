"""The embedded verifier as a chat model: its template, its text, and an answer that is `cloud-mtp`'s."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import msgspec
import openai
import pytest

from hyco_export.core.recipe import Checkpoint, Recipe
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.device.client import HttpTransport
from hyco_export.device.driver import generate
from hyco_export.device.systems import find_system, make_drafter, make_request
from hyco_export.errors import ProtocolError
from hyco_export.evaluate.runs import run_settings
from hyco_export.models.checkpoints import checkpoint_folder
from hyco_export.models.verifier import read_tokenizer
from hyco_export.protocol import wire
from hyco_export.server.assembly import open_server_engine
from hyco_export.server.chat.template import TemplateText, open_chat
from hyco_export.server.http import create_app
from tests.support.live_server import running

ROOT = Path(__file__).parents[3]
MESSAGES = [{"role": "user", "content": "How do I build the keep set?"}]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(embedded_recipe())


@pytest.fixture(scope="module")
def folder(recipe: Recipe) -> Path:
    return checkpoint_folder(recipe.models.verifier)


@pytest.fixture(scope="module")
def url(recipe: Recipe) -> Iterator[str]:
    engine, info = open_server_engine(recipe)
    with running(create_app(engine, info, chat=open_chat(recipe))) as url:
        yield url


def of_folder(recipe: Recipe, folder: Path) -> Recipe:
    models = msgspec.structs.replace(recipe.models, verifier=Checkpoint(str(folder), dtype="float32"))
    return msgspec.structs.replace(recipe, models=models)


def test_the_model_has_the_recipes_name_and_sampling(recipe: Recipe) -> None:
    chat = open_chat(recipe)
    assert (chat.name, chat.refusal) == ("embedded:verifier", "")
    assert chat.sampling == wire.Sampling(recipe.sampling.temperature, recipe.sampling.top_k, recipe.sampling.top_p)


def test_a_checkpoint_without_a_template_takes_no_chats_and_its_folder_is_not_told(
    recipe: Recipe, folder: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in folder.iterdir():
        if path.name != "chat_template.jinja":
            (bare / path.name).symlink_to(path)
    chat = open_chat(of_folder(recipe, bare))
    assert (chat.name, chat.text) == ("bare", None)
    assert "no chat template" in chat.refusal and str(tmp_path) not in chat.refusal


def test_turns_that_the_template_refuses_are_the_callers_to_mend(folder: Path) -> None:
    tokenizer = read_tokenizer(folder)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ProtocolError, match="roles must alternate") as refused:
        TemplateText(tokenizer).encode(MESSAGES)
    assert refused.value.code == "unsupported" and str(folder) not in str(refused.value)


def test_control_tokens_are_no_part_of_a_text(folder: Path) -> None:
    text = TemplateText(read_tokenizer(folder))
    ids = text.encode(MESSAGES)
    assert "<bos>" not in text.decode(ids) and MESSAGES[0]["content"] in text.decode(ids)


def test_the_examples_of_the_documentation_are_answered(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    chapter = (
        (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").split("\n## Chat clients\n")[1].split("\n## ")[0]
    )
    shell, python = (chapter.split(f"```{kind}\n")[1].split("```")[0] for kind in ("sh", "python"))
    exec(python.replace("http://127.0.0.1:8411", url), {})
    assert len(capsys.readouterr().out) > 10
    words = shlex.split(shell)
    place, body = words[2].replace("http://127.0.0.1:8411", url), words[words.index("-d") + 1]
    name, _, value = words[words.index("-H") + 1].partition(": ")
    answer = httpx.post(place, content=body, headers={name: value}, timeout=300)
    assert answer.json()["choices"][0]["message"]["content"]


def test_an_answer_is_that_of_cloud_mtp(recipe: Recipe, folder: Path, url: str) -> None:
    """The same ids, sampling and seed over the wire, round by round, and in one request."""
    text, system = TemplateText(read_tokenizer(folder)), find_system("cloud-mtp")
    transport = HttpTransport(url)
    info = transport.info()
    settings = run_settings(recipe, info.head_digest, info)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for seed, temperature in ((0, 0.0), (1, 1.0), (2, 1.0)):
        request = make_request(system, settings, "p", wire.Sampling(temperature, 40, 0.9), seed, 48)
        trace = generate(text.encode(MESSAGES), request, make_drafter(system, settings, None), transport)
        reply = client.chat.completions.create(
            model="embedded:verifier",
            messages=MESSAGES,  # type: ignore[arg-type]
            temperature=temperature,
            top_p=0.9,
            seed=seed,
            max_tokens=48,
            extra_body={"top_k": 40},
        )
        choice, usage = reply.choices[0], reply.usage
        assert usage is not None and usage.completion_tokens == len(trace.tokens)
        assert choice.message.content == text.decode(trace.tokens)
        assert choice.finish_reason == trace.finished
