"""Sources as the stages see them: selections, weighted mixes, shuffling, digests, and files that appear whole."""

import json
from itertools import islice

import msgspec
import pytest

from hyco_export.core.data.readers import read_conversations
from hyco_export.core.data.sources import conversations, interleaved, prepared, shuffled, source_digest
from hyco_export.core.recipe_sections import DataSource
from hyco_export.errors import RecipeError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def ignore(done):
    pass


def write(path, name, count):
    answer = {"role": "assistant", "content": "Yes."}
    lines = [
        {"id": f"{name}{i}", "messages": [{"role": "user", "content": f"{name} {i}?"}, answer]} for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "a.jsonl", "a", 300)
    write(tmp_path / "b.jsonl", "b", 300)
    return tmp_path


def source(**fields):
    return msgspec.convert(fields, DataSource)


def test_a_plain_path_is_read_where_it_lies(folder):
    for reference in ("a.jsonl", source(path="a.jsonl")):
        assert prepared("x", reference, folder, folder / "prepared", ignore) == folder / "a.jsonl"
    assert not (folder / "prepared").exists()


def test_a_selection_is_written_once_with_ids(folder):
    chosen = source(path="a.jsonl", limit=20, shuffle_seed=5, first_turn=True)
    counted = []
    path = prepared("calibration", chosen, folder, folder / "prepared", counted.append)
    found = list(read_conversations(path))
    assert len({c.id for c in found}) == 20
    assert {len(c.messages) for c in found} == {1}
    assert counted == list(range(1, 21))
    assert [p.name for p in (folder / "prepared").iterdir()] == [path.name]
    assert prepared("calibration", chosen, folder, folder / "prepared", counted.append) == path
    assert len(counted) == 20  # not read again
    other = prepared("calibration", source(path="a.jsonl", limit=20, shuffle_seed=6), folder, folder / "other", ignore)
    assert [c.id for c in read_conversations(other)] != [c.id for c in found]


def test_a_mix_draws_by_weight_with_the_parts_own_limits(folder):
    mix = source(mix=[{"path": "a.jsonl", "weight": 4.0}, {"path": "b.jsonl", "limit": 3}], limit=200, seed=2)
    ids = [c.id for c in conversations(mix, folder)]
    assert len(set(ids)) == 200
    assert sum(name.startswith("b") for name in ids) == 3
    assert ids == [c.id for c in conversations(mix, folder)]


def test_digests_follow_content_and_fields(folder):
    plain = source_digest("a.jsonl", folder)
    assert plain == source_digest(source(path="a.jsonl"), folder) != source_digest("b.jsonl", folder)
    mix = source(mix=[{"path": "a.jsonl"}, {"path": "b.jsonl"}])
    hub = source(dataset="o/n", split="train", revision=COMMIT)
    varied = [
        source(path="a.jsonl", limit=3),
        source(path="a.jsonl", limit=3, shuffle_seed=1),
        mix,
        source(mix=[{"path": "a.jsonl", "weight": 2.0}, {"path": "b.jsonl"}]),
        hub,
        msgspec.structs.replace(hub, split="test"),
        msgspec.structs.replace(hub, revision=COMMIT[::-1]),
    ]
    digests = [source_digest(item, folder) for item in varied]  # of the Hub sets without any network
    assert len({plain, *digests}) == 1 + len(varied)
    write(folder / "b.jsonl", "b", 299)
    assert source_digest(mix, folder) != digests[2]
    (folder / "b.jsonl").rename(folder / "moved.jsonl")
    write(folder / "b.jsonl", "b", 300)
    assert source_digest(mix, folder) == digests[2]


def test_a_source_that_breaks_off_leaves_nothing(folder):
    with (folder / "a.jsonl").open("a") as stream:
        stream.write('{"broken"\n')
    with pytest.raises(RecipeError, match="line 301"):
        prepared("x", source(path="a.jsonl", limit=400), folder, folder / "prepared", ignore)
    assert list((folder / "prepared").iterdir()) == []


def test_an_empty_source_and_a_missing_path_are_named(folder):
    (folder / "empty.jsonl").write_text("\n")
    with pytest.raises(RecipeError, match="the source holds no conversation"):
        prepared("x", source(path="empty.jsonl", limit=4), folder, folder / "prepared", ignore)
    with pytest.raises(RecipeError, match=r"none.jsonl does not exist"):
        source_digest(source(mix=[{"path": "a.jsonl"}, {"path": "none.jsonl"}]), folder)


def test_sources_are_drawn_by_weight_and_the_seed_decides():
    def draw(seed):
        sources = [iter(("a", i) for i in range(4000)), iter(("b", i) for i in range(4000))]
        return list(islice(interleaved(sources, [3.0, 1.0], seed), 2000))

    first = draw(1)
    assert 0.72 < sum(name == "a" for name, _ in first) / 2000 < 0.78
    assert first == draw(1) != draw(2)
    assert [i for name, i in first if name == "b"] == list(range(sum(name == "b" for name, _ in first)))


def test_a_source_that_ends_leaves_its_share_to_the_others():
    mixed = list(interleaved([iter("xy"), iter("123456"), iter("")], [5.0, 1.0, 2.0], 3))
    assert sorted(mixed) == sorted("xy123456")
    assert list(interleaved([], [], 0)) == []


@pytest.mark.parametrize("sizes", [{"a": 40, "b": 200}, {"a": 200, "b": 40}, {"a": 60, "b": 200, "c": 200}])
@pytest.mark.parametrize("seed", [1, 2, 20261011])
def test_the_order_of_a_mix_is_the_librarys_until_a_third_part_must_share(sizes, seed):
    import datasets

    weights = [2.0, 1.0, 1.0][: len(sizes)]
    parts = {name: [f"{name}{i}" for i in range(size)] for name, size in sizes.items()}
    theirs = datasets.interleave_datasets(
        [datasets.Dataset.from_dict({"name": items}).to_iterable_dataset() for items in parts.values()],
        probabilities=[weight / sum(weights) for weight in weights],
        seed=seed,
        stopping_strategy="all_exhausted_without_replacement",
    )
    wanted = [row["name"] for row in theirs]
    mixed = list(interleaved([iter(items) for items in parts.values()], weights, seed))
    assert sorted(mixed) == sorted(wanted)
    first_end = min(mixed.index(items[-1]) for items in parts.values())
    same = len(mixed) if len(sizes) == 2 else first_end + 1
    assert mixed[:same] == wanted[:same]


def test_a_shuffle_keeps_every_item_and_draws_from_beyond_the_first():
    items = list(range(1000))
    for window in (1, 7, 100, 5000):
        order = list(shuffled(iter(items), 4, window))
        assert sorted(order) == items
        assert order == list(shuffled(iter(items), 4, window))
    assert list(shuffled(iter(items), 4, 100)) != list(shuffled(iter(items), 5, 100))
    first = list(islice(shuffled(iter(items), 4, 500), 60))
    assert max(first) > 300 and min(first) < 200
