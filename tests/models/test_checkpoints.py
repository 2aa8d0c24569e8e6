"""Checkpoints are found on disk or fetched, and known by digests of their contents."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from hyco_export.core.artifact import file_digest
from hyco_export.core.recipe import Checkpoint
from hyco_export.errors import CheckpointError
from hyco_export.models import checkpoints
from tests.support import builders


@pytest.fixture
def family(tmp_path):
    return builders.save_family(tmp_path)


def test_a_digest_tells_contents_apart(family, tmp_path):
    first = checkpoints.checkpoint_digest(family / "verifier")
    (family / "verifier" / "notes.txt").write_text("not part of the model")
    assert checkpoints.checkpoint_digest(family / "verifier") == first

    weights = family / "verifier" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert checkpoints.checkpoint_digest(family / "verifier") != first


def test_a_snapshot_of_the_hub_is_named_by_id_and_commit(tmp_path):
    checkpoint = Checkpoint(model="owner/name", revision="v1")
    assert checkpoints.checkpoint_origin(checkpoint, tmp_path / "snapshots" / "abc123") == "owner/name@abc123"
    assert checkpoints.checkpoint_origin(Checkpoint(model="verifier"), tmp_path / "verifier") == "verifier"


def test_the_hubs_own_names_of_large_files_are_their_digests(family, tmp_path):
    plain = checkpoints.checkpoint_digest(family / "head")
    blob = tmp_path / "blobs" / file_digest(family / "head" / "model.safetensors")
    blob.parent.mkdir()
    (family / "head" / "model.safetensors").rename(blob)
    (family / "head" / "model.safetensors").symlink_to(blob)
    assert checkpoints.checkpoint_digest(family / "head") == plain
    blob.write_bytes(b"not read")
    assert checkpoints.checkpoint_digest(family / "head") == plain


def test_a_tokenizer_digest_needs_a_fast_tokenizer(family):
    assert len(checkpoints.tokenizer_digest(family / "verifier")) == 64
    with pytest.raises(CheckpointError, match=r"head has no tokenizer\.json"):
        checkpoints.tokenizer_digest(family / "head")


def test_a_local_path_is_relative_to_the_recipe(family):
    found = checkpoints.checkpoint_folder(Checkpoint(model="verifier"), family)
    assert found == family / "verifier"
    (family / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty has no config\.json"):
        checkpoints.checkpoint_folder(Checkpoint(model="empty"), family)


@pytest.mark.parametrize("reference", ["/nowhere/model", "./model", "embedded:nothing"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(reference, tmp_path):
    with pytest.raises(CheckpointError):
        checkpoints.checkpoint_folder(Checkpoint(model=reference), tmp_path)


def test_an_unreachable_hub_gives_the_command_that_fetches(monkeypatch):
    def refuse(*args, **kwargs):
        raise checkpoints.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(checkpoints, "snapshot_download", refuse)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.checkpoint_folder(Checkpoint(model="owner/name", revision="abc"))
    assert caught.value.hint == "with a network, run: hf download owner/name --revision abc"


def test_a_gated_repository_gives_the_command_that_signs_in(monkeypatch):
    def refuse(*args, **kwargs):
        raise checkpoints.GatedRepoError("gated", response=_Refused())

    monkeypatch.setattr(checkpoints, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match="owner/name is gated") as caught:
        checkpoints.checkpoint_folder(Checkpoint(model="owner/name"))
    assert caught.value.hint.endswith("then run: hf auth login")


class _Refused:
    """What the Hub's client needs of a response."""

    request = None
    status_code = 403

    def __init__(self):
        self.headers = {}


def test_configs_and_templates_belong_to_the_digest(family: Path) -> None:
    first = checkpoints.checkpoint_digest(family / "verifier")
    template = family / "verifier" / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text + " ")
    assert checkpoints.checkpoint_digest(family / "verifier") != first
    template.write_text(text)
    assert checkpoints.checkpoint_digest(family / "verifier") == first
    template.rename(family / "verifier" / "other.jinja")
    assert checkpoints.checkpoint_digest(family / "verifier") != first


def test_what_is_not_here_gets_its_next_step(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoints.local_checkpoint(Checkpoint(model="head"), family) == family / "head"

    def refuse(*args: object, **kwargs: object) -> str:
        raise checkpoints.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(checkpoints, "snapshot_download", refuse)
    wanted = Checkpoint(model="owner/name", revision="v1")
    assert checkpoints.local_checkpoint(wanted, family) is None
    assert checkpoints.next_step(wanted, family) == "run: hf download owner/name --revision v1"


def test_a_snapshot_that_lacks_weights_counts_as_not_here(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "snapshot_download", lambda *args, **kwargs: str(family / "head"))
    wanted = Checkpoint(model="owner/name")
    assert checkpoints.local_checkpoint(wanted, None) == family / "head"
    (family / "head" / "model.safetensors").unlink()
    assert checkpoints.local_checkpoint(wanted, None) is None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A plan's calls for a config, each with whether the network may be used; the Hub's first answer is not known."""
    calls: list[bool] = []

    def download(hub_id: str, name: str, revision: str | None, local_files_only: bool) -> str:
        calls.append(not local_files_only)
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(checkpoints, "hf_hub_download", download)
    monkeypatch.setattr(checkpoints.constants, "HF_HUB_OFFLINE", False)
    checkpoints.hub_answers.cache_clear()
    yield calls
    checkpoints.hub_answers.cache_clear()


def test_a_hub_that_is_silent_is_asked_once_and_not_waited_for(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server without an answer obeys no time limit of the client."""
    tries, forever = [], threading.Event()

    class Silent:
        def head(self, url: str, timeout: float) -> None:
            tries.append(url)
            forever.wait()

    monkeypatch.setattr(checkpoints, "get_session", Silent)
    monkeypatch.setattr(checkpoints, "HUB_PATIENCE_S", 0.01)
    assert [checkpoints.fetch_config(name, None) for name in ("a/one", "a/two", "a/three")] == [None] * 3
    assert (len(tries), asked) == (1, [False] * 3)
    forever.set()


def test_a_hub_that_answers_is_asked_for_the_config(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    class Answering:
        def head(self, url: str, timeout: float) -> None:
            assert url == checkpoints.constants.ENDPOINT and timeout == checkpoints.HUB_PATIENCE_S

    monkeypatch.setattr(checkpoints, "get_session", Answering)
    monkeypatch.setattr(checkpoints, "HUB_PATIENCE_S", 60.0)
    assert checkpoints.fetch_config("a/one", None) is None
    assert asked == [True]


def test_offline_the_hub_is_not_asked_at_all(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(checkpoints, "get_session", None)
    assert checkpoints.fetch_config("a/one", None) is None and asked == [False]
