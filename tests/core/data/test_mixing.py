"""Weighted mixing and window shuffling: shares, order by seed, nothing lost or repeated."""

from itertools import islice

from hyco_export.core.data.sources import interleaved, shuffled


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


def test_a_shuffle_keeps_every_item_and_draws_from_beyond_the_first():
    items = list(range(1000))
    for window in (1, 7, 100, 5000):
        order = list(shuffled(iter(items), 4, window))
        assert sorted(order) == items
        assert order == list(shuffled(iter(items), 4, window))
    assert list(shuffled(iter(items), 4, 100)) != list(shuffled(iter(items), 5, 100))
    first = list(islice(shuffled(iter(items), 4, 500), 60))
    assert max(first) > 300 and min(first) < 200
