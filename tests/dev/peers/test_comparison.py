"""The comparison over scripted contestants, and the workers' lines over real processes."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hyco_export.dev.peers.comparison import (
    WARM_UP_PROMPTS,
    Answer,
    WorkerPeer,
    compare,
    require_vllm,
    transformers_peer,
)
from hyco_export.errors import HycoError

PROMPTS = [(f"p{place}", [5, 6, 7 + place]) for place in range(4)]


class Scripted:
    """Says the prompt's last id again and again, at a given speed."""

    def __init__(self, name: str, order: list[str], seconds: float, rounds: int, wrong_for: int = -1) -> None:
        self.name = name
        self._order = order
        self._seconds = seconds
        self._rounds = rounds
        self._wrong_for = wrong_for

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
        self._order.append(self.name)
        token = ids[-1] + (ids[-1] == self._wrong_for)
        return Answer((token,) * max_new_tokens, self._seconds, self._rounds)


def test_everybody_answers_in_turn_after_a_warm_up_and_texts_are_compared() -> None:
    order: list[str] = []
    ours = Scripted("ours", order, seconds=0.5, rounds=3)
    other = Scripted("other", order, seconds=1.0, rounds=9, wrong_for=8)
    comparison = compare([ours, other], PROMPTS, 10)
    assert order[: 2 * WARM_UP_PROMPTS] == ["ours", "other"] * WARM_UP_PROMPTS
    assert order[2 * WARM_UP_PROMPTS :] == ["ours", "other", "other", "ours"] * 2
    first, second = comparison.standings
    assert (first.tokens, first.tokens_per_s, first.mat) == (40, 20.0, 3.0)
    assert (second.tokens_per_s, second.mat, second.differing) == (10.0, 1.0, ("p1",))
    assert comparison.ratio("other") == 2.0 and not comparison.same_text
    assert compare([ours, Scripted("same", order, 1.0, 9)], PROMPTS, 3).same_text


def test_a_worker_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text('import sys\nprint("loading")\nsys.exit("no such model")\n')
    with (
        pytest.raises(HycoError, match="my peer ended: no such model"),
        WorkerPeer("my peer", [sys.executable, str(script)], {}),
    ):
        pass


def test_a_worker_that_ends_between_two_answers_is_named_too(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys\nprint('{\"ready\": true}', flush=True)\ninput()\n"
        'print(\'{"tokens": [7], "seconds": 0.5, "rounds": 1}\', flush=True)\nsys.exit("out of memory")\n'
    )
    with (
        pytest.raises(HycoError, match="my peer ended: out of memory"),
        WorkerPeer("my peer", [sys.executable, str(script)], {}) as peer,
    ):
        assert peer.answer([1], 1).tokens == (7,)
        peer._process.wait(30)
        peer.answer([2], 1)


def test_a_python_without_vllm_is_named() -> None:
    if vllm_is_here():
        pytest.skip("this Python has vLLM")
    with pytest.raises(HycoError, match=r"cannot import vllm: ModuleNotFoundError") as caught:
        require_vllm(Path(sys.executable))
    assert caught.value.hint == "install its CPU build there, or leave --vllm-python out"


def test_a_path_that_is_no_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(HycoError, match=r"missing is no Python that can be run: No such file"):
        require_vllm(tmp_path / "missing")
    with pytest.raises(HycoError, match="is no Python that can be run: Permission denied"):
        require_vllm(tmp_path)


def vllm_is_here() -> bool:
    import importlib.util

    return importlib.util.find_spec("vllm") is not None


@pytest.mark.slow
def test_the_server_says_what_transformers_says_plain_and_assisted() -> None:
    from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
    from hyco_export.dev.peers.comparison import CloudMtp
    from hyco_export.models.checkpoints import checkpoint_folder
    from hyco_export.server.assembly import open_server_engine
    from hyco_export.server.engine import LocalTransport

    recipe = load_recipe(embedded_recipe())
    verifier, head = (
        checkpoint_folder(which, None) for which in (recipe.models.verifier, recipe.models.require_head())
    )
    engine, info = open_server_engine(recipe)
    ours = CloudMtp(LocalTransport(engine, info), recipe.head.steps)
    here = Path(sys.executable)
    prompts = [("a", [2, 5, 300, 301, 900]), ("b", list(range(40, 140)))]  # the second one is longer than the window
    with (
        transformers_peer(here, verifier, head, 1, "float32") as assisted,
        transformers_peer(here, verifier, None, 1, "float32") as plain,
    ):
        comparison = compare([ours, assisted, plain], prompts, 40)
    assert comparison.same_text, comparison
    mats = {standing.name: standing.mat for standing in comparison.standings}
    assert mats["transformers, plain"] == 1.0
    assert mats["transformers, assisted"] > 1.2 and mats["hyco-export cloud-mtp"] > 1.2
