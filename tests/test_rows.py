"""Batches of rows: the same as torch's own `DataLoader` makes of the same indices."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from shardqueue.errors import InvalidInputError
from shardqueue.rows import RowBatches, check_rows
from shardqueue.shuffle import Permutation
from shardqueue.units import Unit, unit_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

unhurried = settings(deadline=None)


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


class Rows(Dataset[Any]):
    """`row(index)` for each index; keeps what it was asked for."""

    def __init__(self, rows: int, row: Callable[[int], Any] = int) -> None:
        self.rows, self.row = rows, row
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.row(index)


class Batched(Rows):
    """Has `__getitems__` and nothing to say to `__getitem__`."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("__getitems__ is there")

    def __getitems__(self, indices: list[int]) -> Any:
        self.asked.append(indices)
        return [self.row(index) for index in indices]


def tensor_row(index: int) -> torch.Tensor:
    return torch.arange(3, dtype=torch.float64) + index


def tuple_row(index: int) -> tuple[torch.Tensor, int, float]:
    return tensor_row(index), index, index / 2


def dict_row(index: int) -> dict[str, Any]:
    return {"image": tensor_row(index), "text": f"row {index}", "more": [index, {"deep": index}]}


def named_row(index: int) -> Pair:
    return Pair(tensor_row(index), index)


def text_row(index: int) -> str:
    return "x" * (index % 7)


ROWS = [tensor_row, tuple_row, dict_row, named_row, text_row]
DATASETS: list[Callable[[], Any]] = [
    *(lambda row=row: Rows(23, row) for row in ROWS),
    *(lambda row=row: Batched(23, row) for row in ROWS),
    lambda: TensorDataset(torch.arange(46).reshape(23, 2), torch.arange(23.0)),
    lambda: Subset(Batched(100, dict_row), range(50, 73)),
    lambda: StackDataset(a=Rows(23), b=TensorDataset(torch.arange(23))),
    lambda: torch.arange(69).reshape(23, 3),
    lambda: [f"row {index}" for index in range(23)],
    lambda: {index: (index, str(index)) for index in range(23)},
]


def read(batches: RowBatches, epoch: int = 0, rows_per_unit: int | None = None) -> list[tuple[int, Any]]:
    """Everything the epoch's loader yields for a plan of the epoch."""
    load = batches.loader(epoch)
    rows, size = batches.rows, batches.batch_size
    plan = unit_ranges(rows, rows_per_unit or 2 * size, size)
    return [item for unit in plan.values() for item in load(unit)]


def same(one: Any, other: Any) -> bool:
    """Equal in value and type all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class TestSameAsTorch:
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("make", DATASETS)
    def test_in_value(self, make: Callable[[], Any], shuffle: bool) -> None:
        batches = RowBatches(make(), 23, 5, shuffle, seed=1)
        sampler = [batches.indices(2, step) for step in range(batches.steps)]
        expected = list(DataLoader(make(), batch_sampler=sampler))
        steps, found = zip(*read(batches, epoch=2), strict=True)
        assert steps == (0, 1, 2, 3, 4)
        assert all(map(same, found, expected))

    @pytest.mark.parametrize("kind", [Rows, Batched])
    def test_with_a_collate_fn(self, kind: type[Rows]) -> None:
        def collate(rows: list[int]) -> tuple[str, list[int]]:
            return "made", rows

        batches = RowBatches(kind(7), 7, 3, shuffle=True, collate_fn=collate)
        sampler = [batches.indices(0, step) for step in range(3)]
        expected = list(DataLoader(kind(7), batch_sampler=sampler, collate_fn=collate))
        assert [batch for _, batch in read(batches)] == expected
        assert expected[0] == ("made", sampler[0])

    @pytest.mark.parametrize("last", [1, 4, 5])
    def test_unshuffled_it_is_the_sequential_loader(self, last: int) -> None:
        dataset = Rows(10 + last, tuple_row)
        found = [batch for _, batch in read(RowBatches(dataset, 10 + last, 5))]
        assert all(map(same, found, DataLoader(dataset, batch_size=5)))
        assert len(found[-1][1]) == last


class TestAsking:
    def test_plain_ints_one_by_one(self) -> None:
        for shuffle in (False, True):
            dataset = Rows(2000)
            read(RowBatches(dataset, 2000, 7, shuffle))
            assert {type(index) for index in dataset.asked} == {int}
            assert sorted(dataset.asked) == list(range(2000))

    def test_getitems_once_a_batch_with_a_list_of_plain_ints(self) -> None:
        for shuffle in (False, True):
            dataset = Batched(2000)
            batches = RowBatches(dataset, 2000, 300, shuffle)
            read(batches)
            assert {type(asked) for asked in dataset.asked} == {list}
            assert {type(index) for asked in dataset.asked for index in asked} == {int}
            assert dataset.asked == [batches.indices(0, step) for step in range(7)]

    def test_a_falsy_getitems_is_none(self) -> None:
        class Off(Rows):
            __getitems__ = None

        dataset = Off(4)
        assert [batch.tolist() for _, batch in read(RowBatches(dataset, 4, 2))] == [[0, 1], [2, 3]]
        assert dataset.asked == [0, 1, 2, 3]

    def test_what_getitems_gives_reaches_collate_fn_unseen(self) -> None:
        class Columns(Batched):
            def __getitems__(self, indices: list[int]) -> dict[str, list[int]]:
                return {"a": indices, "b": indices}

        found = read(RowBatches(Columns(6), 6, 3, collate_fn=lambda columns: columns))
        assert found[1] == (1, {"a": [3, 4, 5], "b": [3, 4, 5]})

    def test_reads_no_batch_before_it_is_asked_for(self) -> None:
        dataset = Rows(100)
        stream = RowBatches(dataset, 100, 5, shuffle=True).loader(0)(Unit(20, 20, 0, 1))
        assert dataset.asked == []
        assert next(stream)[0] == 4
        assert len(dataset.asked) == 5

    def test_an_error_passes_through_unchanged(self) -> None:
        error = OSError("the disk is gone")

        def fails(index: int) -> int:
            if index == 7:
                raise error
            return index

        stream = RowBatches(Rows(10, fails), 10, 5).loader(0)(Unit(0, 10, 0, 1))
        assert next(stream)[0] == 0
        with pytest.raises(OSError, match="the disk is gone") as caught:
            next(stream)
        assert caught.value is error

    def test_so_does_one_of_collate_fn(self) -> None:
        stream = RowBatches(Rows(3, text_row), 3, 3, collate_fn=lambda rows: rows[7]).loader(0)(
            Unit(0, 3, 0, 1)
        )
        with pytest.raises(IndexError, match="list index out of range"):
            next(stream)


class TestOrder:
    @unhurried
    @given(st.integers(1, 3000), st.integers(1, 50), st.integers(1, 30), st.booleans())
    def test_each_row_once_an_epoch(self, rows: int, size: int, steps: int, shuffle: bool) -> None:
        batches = RowBatches(Batched(rows), rows, size, shuffle, seed=3, collate_fn=list)
        found = read(batches, epoch=1, rows_per_unit=steps * size)
        assert [step for step, _ in found] == list(range(batches.steps))
        assert Counter(row for _, batch in found for row in batch) == Counter(range(rows))
        assert [len(batch) for _, batch in found[:-1]] == [size] * (batches.steps - 1)

    def test_whatever_the_units(self) -> None:
        batches = RowBatches(Rows(5000), 5000, 7, shuffle=True, collate_fn=list)
        assert read(batches, 0, 7) == read(batches, 0, 7 * 100) == read(batches, 0, 7 * 1000)

    @pytest.mark.parametrize("rows", [100, 5000])
    def test_other_epochs_and_seeds_have_other_orders(self, rows: int) -> None:
        def order(epoch: int, seed: int) -> tuple[int, ...]:
            batches = RowBatches(Rows(rows), rows, 8, True, seed, collate_fn=list)
            return tuple(row for _, batch in read(batches, epoch) for row in batch)

        orders = [order(epoch, seed) for epoch in (0, 1, 2) for seed in (0, 1)]
        assert len(set(orders)) == 6
        assert {tuple(sorted(one)) for one in orders} == {tuple(range(rows))}
        assert order(1, 1) == orders[3] == tuple(Permutation(rows, 1, 1).at(0, rows))

    def test_only_the_first_rows_take_part(self) -> None:
        for shuffle in (False, True):
            batches = RowBatches(Rows(103), 100, 10, shuffle, collate_fn=list)
            found = read(batches)
            assert [len(batch) for _, batch in found] == [10] * 10
            assert sorted(row for _, batch in found for row in batch) == list(range(100))

    def test_indices(self) -> None:
        batches = RowBatches(Rows(10), 10, 4)
        assert [batches.indices(0, step) for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        shuffled = RowBatches(Rows(10), 10, 4, shuffle=True, seed=9)
        assert shuffled.indices(5, 1) == Permutation(10, 9, 5).at(4, 8).tolist()
        assert {type(row) for row in shuffled.indices(5, 1)} == {int}

    def test_a_huge_dataset_is_read_at_once(self) -> None:
        load = RowBatches(Rows(10**12), 10**12, 4, shuffle=True).loader(0)
        step, batch = next(load(Unit(10**11, 10**10, 0, 1)))
        assert step == 10**11 // 4
        assert batch.tolist() == Permutation(10**12, 0).at(10**11, 10**11 + 4).tolist()


class TestPickling:
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("collate", [None, list])
    def test_a_loader_reads_the_same_elsewhere(
        self, shuffle: bool, collate: Callable[[Any], Any] | None
    ) -> None:
        for rows in (50, 5000):
            load = RowBatches(Rows(rows, dict_row), rows, 8, shuffle, 4, collate).loader(3)
            data = pickle.dumps(load)
            assert len(data) < 700
            unit = Unit(16, 24, 0, 1)
            again = pickle.loads(data)(unit)
            assert all(map(same, again, load(unit)))


class TestRefuses:
    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            ({"rows": 0}, "rows"),
            ({"rows": 10.0}, "rows"),
            ({"batch_size": 0}, "batch_size"),
            ({"batch_size": None}, "batch_size"),
            ({"batch_size": True}, "batch_size"),
            ({"seed": -1}, "seed"),
            ({"seed": 2**63}, "seed"),
            ({"seed": None}, "seed"),
        ],
    )
    def test_arguments(self, arguments: dict[str, Any], name: str) -> None:
        with pytest.raises(InvalidInputError) as caught:
            RowBatches(**{"dataset": Rows(10), "rows": 10, "batch_size": 4, **arguments})
        assert caught.value.name == name

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_epochs_and_steps(self, shuffle: bool) -> None:
        batches = RowBatches(Rows(10), 10, 4, shuffle)
        for epoch in (-1, 0.0, True, None):
            with pytest.raises(InvalidInputError, match="epoch"):
                batches.loader(epoch)  # type: ignore[arg-type]
        for step in (-1, 3, 1.0):
            with pytest.raises(InvalidInputError, match="step"):
                batches.indices(0, step)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "unit",
        [Unit(2, 4, 0, 1), Unit(0, 6, 0, 1), Unit(8, 4, 0, 1), Unit(12, 4, 0, 1), Unit(0, 4, 1, 2)],
    )
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_units_of_another_plan_at_once(self, unit: Unit, shuffle: bool) -> None:
        load = RowBatches(Rows(100), 10, 4, shuffle).loader(0)
        with pytest.raises(InvalidInputError, match="whole batches of 4 of 10 rows"):
            load(unit)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class BadLength(NoLength):
    def __len__(self) -> int:
        raise OSError("no such table")


class NoRows:
    def __len__(self) -> int:
        return 3


class BaseClassOnly(Dataset[int]):
    def __len__(self) -> int:
        return 3


class OnlyGetitems(NoRows):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class TestCheckRows:
    @pytest.mark.parametrize("make", DATASETS)
    def test_is_the_length(self, make: Callable[[], Any]) -> None:
        assert check_rows(make()) == 23

    def test_getitems_alone_will_do_as_it_does_for_torch(self) -> None:
        assert check_rows(OnlyGetitems()) == 3
        found = [batch for _, batch in read(RowBatches(OnlyGetitems(), 3, 2))]
        assert all(map(same, found, DataLoader(OnlyGetitems(), batch_size=2)))  # type: ignore[arg-type]

    @pytest.mark.parametrize("dataset", [Stream(), NoRows(), BaseClassOnly(), iter([1]), None, 7])
    def test_refuses_what_has_no_rows_to_ask_for(self, dataset: Any) -> None:
        with pytest.raises(
            InvalidInputError, match="pass units and a load function to SharedQueueDataset"
        ) as caught:
            check_rows(dataset)
        assert type(dataset).__name__ in str(caught.value)
        assert "__len__ and __getitem__" in caught.value.bound

    @pytest.mark.parametrize("dataset", [NoLength(), BadLength(), torch.tensor(1.0)])
    def test_refuses_what_has_no_length(self, dataset: Any) -> None:
        with pytest.raises(InvalidInputError, match="give it a __len__ that works") as caught:
            check_rows(dataset)
        assert caught.value.__cause__ is not None
        assert str(caught.value.__cause__) in caught.value.remedy

    @pytest.mark.parametrize("dataset", [[], TensorDataset(torch.zeros(0, 3)), Rows(0)])
    def test_refuses_an_empty_one(self, dataset: Any) -> None:
        with pytest.raises(InvalidInputError, match="at least one row long"):
            check_rows(dataset)

    def test_refuses_one_that_is_too_long(self) -> None:
        with pytest.raises(InvalidInputError, match="pass at most"):
            check_rows(Rows(2**53 + 1))
        assert check_rows(Rows(2**53)) == 2**53

    def test_the_refusal_pickles_and_holds_no_dataset(self) -> None:
        with pytest.raises(InvalidInputError) as caught:
            check_rows(x for x in "abc")
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert caught.value.value == "builtins.generator"
