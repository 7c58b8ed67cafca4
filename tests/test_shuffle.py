"""The computed shuffle: a bijection, the same everywhere, at no cost in memory, and a fair one."""

from __future__ import annotations

import pickle
import tracemalloc
from hashlib import blake2b
from math import isqrt, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardqueue.errors import InvalidInputError
from shardqueue.shuffle import LARGEST_SEED, Permutation

if TYPE_CHECKING:
    from numpy.typing import NDArray

unhurried = settings(deadline=None)
seeds = st.integers(0, LARGEST_SEED)
GOLDEN: dict[tuple[int, int, int], list[int]] = {
    (1, 0, 0): [0, 0],
    (3, 0, 0): [1, 2, 0, 1, 2, 0],
    (10, 0, 0): [2, 8, 6, 3, 1, 0, 4, 9],
    (1024, 42, 1): [881, 234, 846, 827, 998, 438, 859, 649],
    (1025, 42, 1): [226, 992, 365, 514, 248, 1006, 369, 106],
    (1089, 0, 0): [906, 203, 601, 79, 235, 305, 787, 937],
    (10**6, 0, 0): [307953, 867867, 751337, 308846, 374833, 642469, 551459, 342224],
    (10**6, 0, 1): [432892, 856261, 48610, 994320, 86183, 446920, 509285, 322278],
    (10**9, 1234, 7): [998827728, 578365773, 788528368, 480835524, 66339491, 360378639, 27086165, 378136156],
    (2**53, 2**63 - 1, 2**53): [
        *(6223032176853801, 2421995187543712, 7958518201141984, 754862755988238),
        *(5911830087815403, 4158760592367238, 4007173938179922, 4529338449913019),
    ],
}
"""(rows, seed, epoch) to the first and last four images."""


def whole(rows: int, seed: int, epoch: int = 0) -> NDArray[np.int64]:
    return Permutation(rows, seed, epoch).at(0, rows)


class TestTheSameEverywhere:
    @pytest.mark.parametrize(("arguments", "images"), GOLDEN.items(), ids=str)
    def test_golden_values(self, arguments: tuple[int, int, int], images: list[int]) -> None:
        permutation = Permutation(*arguments)
        rows = len(permutation)
        ends = [*permutation.at(0, min(4, rows)), *permutation.at(max(0, rows - 4), rows)]
        assert ends == images

    @pytest.mark.parametrize("rows", [1, 2, 7, 1000, 1024, 1025, 1056, 1089, 1090, 10**6, 10**9, 2**53])
    def test_is_what_plain_integers_give(self, rows: int) -> None:
        """Without numpy: no wrap-around, no rounding, no byte order."""
        by_hand = ByHand(rows, seed=11, epoch=3)
        places = [*range(min(rows, 60)), *range(max(0, rows - 60), rows)]
        images = [int(Permutation(rows, 11, 3).at(place, place + 1)[0]) for place in places]
        assert images == [by_hand.image(place) for place in places]

    def test_each_argument_counts(self) -> None:
        for rows in (50, 5000):
            orders = [whole(rows, 1, 1), whole(rows, 2, 1), whole(rows, 1, 2), whole(rows, LARGEST_SEED, 1)]
            assert len({order.tobytes() for order in orders}) == len(orders)
            longer = whole(rows + 1, 1, 1)
            assert list(longer[longer < rows]) != list(orders[0])

    def test_touches_no_random_generator(self) -> None:
        before = np.random.get_state()[1].tobytes()  # type: ignore[index]
        whole(5000, 0)
        assert np.random.get_state()[1].tobytes() == before  # type: ignore[index]


class ByHand:
    """The method as the module's docstring says it, in Python's integers, an image at a time."""

    def __init__(self, rows: int, seed: int, epoch: int) -> None:
        digest = blake2b(f"({rows}, {seed}, {epoch})".encode(), digest_size=64, person=b"shardqueue").digest()
        self.keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8)]
        self.rows = rows
        self.a = next(side for side in range(isqrt(rows), rows + 2) if side**2 >= rows)
        self.b = next(side for side in range(max(1, self.a - 3), self.a + 1) if side * self.a >= rows)

    def word(self, key: int, index: int) -> int:
        word = (key + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    def image(self, place: int) -> int:
        if self.rows <= 1024:
            return sorted(range(self.rows), key=lambda row: self.word(self.keys[0], row))[place]
        while True:
            x, y = place % self.a, place // self.a
            for turn, key in enumerate(self.keys):
                if turn % 2 == 0:
                    x = (x + self.word(key, y) // 2) % self.a
                else:
                    y = (y + self.word(key, x) // 2) % self.b
            place = y * self.a + x
            if place < self.rows:
                return place


class TestBijection:
    @pytest.mark.parametrize("some", [range(1, 400), range(1000, 1200), [4095, 4096, 4097, 99_991, 300_000]])
    def test_has_every_row_once(self, some: list[int]) -> None:
        for rows in some:
            assert (np.sort(whole(rows, seed=rows, epoch=1)) == np.arange(rows)).all(), rows

    @unhurried
    @given(st.integers(1, 6000), seeds, st.integers(0, 2**53), st.data())
    def test_any_stretch_is_a_part_of_the_whole(
        self, rows: int, seed: int, epoch: int, data: st.DataObject
    ) -> None:
        start = data.draw(st.integers(0, rows))
        stop = data.draw(st.integers(start, rows))
        order = whole(rows, seed, epoch)
        assert (np.sort(order) == np.arange(rows)).all()
        part = Permutation(rows, seed, epoch).at(start, stop)
        assert part.dtype == np.int64
        assert part.tolist() == order[start:stop].tolist()

    @pytest.mark.parametrize("rows", [10**9, 2**32, 2**53 - 1, 2**53])
    def test_large_ones_repeat_nothing_and_stay_inside(self, rows: int) -> None:
        permutation = Permutation(rows, 7)
        images = np.concatenate([permutation.at(0, 50_000), permutation.at(rows - 50_000, rows)])
        assert len(np.unique(images)) == 100_000
        assert 0 <= images.min() <= images.max() < rows


class TestCost:
    def test_memory_does_not_grow_with_the_rows(self) -> None:
        Permutation(10**6, 0).at(0, 256)
        tracemalloc.start()
        try:
            for rows in (1024, 10**9, 2**53):
                tracemalloc.reset_peak()
                Permutation(rows, 0).at(rows // 2, rows // 2 + 256)
                assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()

    def test_what_it_gives_is_the_callers_own(self) -> None:
        for rows in (10, 10_000):
            permutation = Permutation(rows, 0)
            permutation.at(0, 10)[:] = -1
            assert permutation.at(0, 10).min() >= 0

    def test_pickles_as_its_arguments(self) -> None:
        for rows in (1000, 10**9):
            permutation = Permutation(rows, 5, 2)
            data = pickle.dumps(permutation)
            again = pickle.loads(data)
            assert len(data) < 200
            assert repr(again) == f"Permutation(rows={rows}, seed=5, epoch=2)"
            assert again.at(0, 50).tolist() == permutation.at(0, 50).tolist()


class TestRefuses:
    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            ((0, 0), "rows"),
            ((-3, 0), "rows"),
            ((2**53 + 1, 0), "rows"),
            ((True, 0), "rows"),
            ((10.0, 0), "rows"),
            ((10, -1), "seed"),
            ((10, 2**63), "seed"),
            ((10, False), "seed"),
            ((10, "0"), "seed"),
            ((10, None), "seed"),
            ((10, 0, -1), "epoch"),
            ((10, 0, 1.0), "epoch"),
            ((10, 0, True), "epoch"),
        ],
    )
    def test_arguments(self, arguments: tuple[Any, ...], name: str) -> None:
        with pytest.raises(InvalidInputError) as caught:
            Permutation(*arguments)
        assert caught.value.name == name

    @pytest.mark.parametrize("rows", [10, 10_000])
    def test_places_outside(self, rows: int) -> None:
        permutation = Permutation(rows, 0)
        for start, stop in [(-1, 3), (4, 3), (0, rows + 1), (rows + 1, rows + 1), (0, 1.0)]:
            with pytest.raises(InvalidInputError, match=r"st(art|op)"):
                permutation.at(start, stop)  # type: ignore[arg-type]
        assert permutation.at(rows, rows).shape == permutation.at(0, 0).shape == (0,)


# -- fairness: fixed seeds, so that these pass or fail for good --------------------------------------------------


def surprise(cells: NDArray[np.int64], kinds: int) -> float:
    """How many standard deviations chi-square is above its mean, if each kind of cell is as likely."""
    assert kinds >= 2
    counts = np.bincount(cells, minlength=kinds)
    expected = len(cells) / kinds
    assert len(counts) == kinds
    assert expected >= 5
    freedom = kinds - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / sqrt(2 * freedom)


class TestFair:
    """Over many seeds (or epochs), and within one order."""

    def orders(self, rows: int, count: int, places: int, by: str = "seed") -> NDArray[np.int64]:
        """Shape (count, places): the first images of as many orders."""
        made = (Permutation(rows, i) if by == "seed" else Permutation(rows, 0, i) for i in range(count))
        return np.array([one.at(0, places) for one in made])

    @pytest.mark.parametrize("by", ["seed", "epoch"])
    @pytest.mark.parametrize("rows", [2, 3, 4, 5])
    def test_each_order_of_a_few_rows_is_as_likely(self, rows: int, by: str) -> None:
        orders = self.orders(rows, 6000, rows, by)
        codes = (orders * rows ** np.arange(rows)).sum(axis=1)
        kinds = np.unique(codes, return_inverse=True)[1]
        assert surprise(kinds, [1, 1, 2, 6, 24, 120][rows]) < 5

    @pytest.mark.parametrize("by", ["seed", "epoch"])
    @pytest.mark.parametrize("rows", [6, 13, 31, 64])
    def test_each_row_is_as_likely_at_each_place(self, rows: int, by: str) -> None:
        orders = self.orders(rows, 4000, rows, by)
        assert max(surprise(orders[:, place], rows) for place in range(rows)) < 6

    @pytest.mark.parametrize("rows", [6, 13, 24])
    def test_each_pair_of_rows_is_as_likely_at_each_pair_of_places(self, rows: int) -> None:
        orders = self.orders(rows, 8000, rows)
        for one, other in [(0, 1), (1, 0), (0, rows - 1), (rows // 2, rows // 2 + 1), (2, 5)]:
            gaps = (orders[:, other] - orders[:, one]) % rows - 1
            assert surprise(orders[:, one] * (rows - 1) + gaps, rows * (rows - 1)) < 5

    @pytest.mark.parametrize("by", ["seed", "epoch"])
    @pytest.mark.parametrize("rows", [1025, 1089, 1090, 4096, 99_991])
    def test_the_network_is_as_fair(self, rows: int, by: str) -> None:
        """Places 0, 1 and a - 1 go in with one y, a with their neighbours' x; images by tenths and by x and y."""
        a = isqrt(rows - 1) + 1
        orders = self.orders(rows, 4000, a + 1, by)
        tenths, x, y = orders * 10 // rows, orders % a, orders // a
        assert max(surprise(tenths[:, place], 10) for place in (0, 1, a - 1, a)) < 5
        for one, other in [(0, 1), (0, a - 1), (0, a), (1, a)]:
            assert surprise(tenths[:, one] * 10 + tenths[:, other], 100) < 5
            for side in (x, y):
                equal = np.sum(side[:, one] == side[:, other])
                assert abs(equal - 4000 / a) < 5 * (4000 / a) ** 0.5

    @pytest.mark.parametrize("rows", [5000, 65_537, 10**6, 10**9, 2**53])
    def test_one_order_shows_no_structure(self, rows: int) -> None:
        count = min(rows, 100_000)
        images = Permutation(rows, 3).at(0, count)
        assert abs(self.correlation(np.arange(count), images)) < 5 / count**0.5
        assert abs(self.correlation(images[1:], images[:-1])) < 5 / count**0.5
        sixteenths = images * 16 // rows
        assert surprise(sixteenths[1:] * 16 + sixteenths[:-1], 256) < 5
        steps = np.diff(images)
        assert abs(np.mean(steps < 0) - 0.5) < 1.5 / count**0.5
        assert np.sum(np.abs(steps) == 1) < 12

    @pytest.mark.parametrize("rows", [100, 1024, 5000, 10**9])
    def test_epochs_and_seeds_are_strangers(self, rows: int) -> None:
        count = min(rows, 20_000)
        orders = [Permutation(rows, seed, epoch).at(0, count) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
        for at, one in enumerate(orders):
            for other in orders[:at]:
                assert abs(self.correlation(one, other)) < 5 / count**0.5
                assert np.sum(one == other) < 10
                assert np.sum(one[1:] == other[:-1]) < 10

    def correlation(self, one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
        return float(np.corrcoef(one.astype(float), other.astype(float))[0, 1])
