"""Units and the arithmetic plans: what they cover, in which order, and what they cost."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import tracemalloc
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardqueue.errors import InvalidInputError
from shardqueue.units import LazyUnits, Step, Unit, rebuild, unit_files, unit_grid, unit_ranges

if TYPE_CHECKING:
    from collections.abc import Callable

unhurried = settings(deadline=None)
tapers = st.one_of(st.just(False), st.integers(1, 40))


@st.composite
def grids(draw: st.DrawFn) -> LazyUnits:
    steps, unit_steps = draw(st.integers(1, 300)), draw(st.integers(1, 40))
    return unit_grid(steps, unit_steps, draw(st.integers(1, 12)), draw(tapers))


@st.composite
def ranges(draw: st.DrawFn) -> LazyUnits:
    batch_rows = draw(st.integers(1, 7))
    rows, per_unit = draw(st.integers(1, 500)), batch_rows * draw(st.integers(1, 20))
    return unit_ranges(rows, per_unit, batch_rows, draw(tapers))


def sizes_by_definition(steps: int, unit_steps: int, lanes: int, taper: int) -> list[int]:
    """Group after group, as the docstring of `unit_grid` says it."""
    sizes: list[int] = []
    while steps:
        size = min(unit_steps, max(1, steps * lanes // (3 * taper)))
        for _ in range(-(-taper // lanes)):
            if steps:
                sizes.append(min(size, steps))
                steps -= sizes[-1]
    return sizes


class TestUnit:
    def test_holds_a_range_of_steps(self) -> None:
        assert Unit(first=60, count=20, lane=2, lanes=4).steps == range(60, 80)

    @pytest.mark.parametrize(
        ("values", "name"),
        [
            ((-1, 1, 0, 1), "first"),
            ((True, 1, 0, 1), "first"),
            ((0, 0, 0, 1), "count"),
            ((0, 1.0, 0, 1), "count"),
            ((0, 1, 0, 0), "lanes"),
            ((0, 1, 4, 4), "lane"),
            ((0, 1, -1, 4), "lane"),
            ((0, 1, "0", 4), "lane"),
        ],
    )
    def test_refuses(self, values: tuple[Any, Any, Any, Any], name: str) -> None:
        with pytest.raises(InvalidInputError) as caught:
            Unit(*values)
        assert caught.value.name == name

    def test_is_a_frozen_value(self) -> None:
        unit = Unit(0, 20, 1, 4)
        with pytest.raises(dataclasses.FrozenInstanceError):
            unit.first = 1  # type: ignore[misc]
        assert not hasattr(unit, "__dict__")
        assert pickle.loads(pickle.dumps(unit)) == copy.deepcopy(unit) == unit
        assert len({unit, Unit(0, 20, 1, 4)}) == 1


class TestStep:
    step = Step(7, unit="000003-2.json", attempt=1, index=4, pass_="e1")

    def test_is_an_int_to_everybody(self) -> None:
        assert self.step == 7
        assert hash(self.step) == hash(7)
        assert f"{self.step} {self.step!r} {self.step:03d}" == "7 7 007"
        assert json.dumps(self.step) == "7"
        assert list(range(10))[self.step] == 7

    def test_arithmetic_gives_plain_ints(self) -> None:
        results = [self.step + 0, self.step * 2, -self.step, +self.step, int(self.step), 1 + self.step]
        assert {type(result) for result in results} == {int}

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_pickles_with_its_place(self, protocol: int) -> None:
        self.check(pickle.loads(pickle.dumps(self.step, protocol)))

    def test_copies_with_its_place(self) -> None:
        self.check(copy.copy(self.step))
        self.check(copy.deepcopy([self.step])[0])

    def check(self, other: Step) -> None:
        assert type(other) is Step
        assert other == 7
        assert (other.unit, other.attempt, other.index, other.pass_) == ("000003-2.json", 1, 4, "e1")

    def test_the_first_pass_has_no_name(self) -> None:
        first = Step(0, "a")
        assert (first.attempt, first.index, first.pass_) == (0, 0, "")


class TestGrid:
    def test_the_worked_example(self) -> None:
        grid = unit_grid(4000, 20, 4, taper=False)
        assert len(grid) == 800
        assert list(grid)[:5] == [f"000000-{lane}.json" for lane in range(4)] + ["000001-0.json"]
        assert grid["000003-2.json"] == Unit(first=60, count=20, lane=2, lanes=4)
        assert [unit.count for unit in grid.values()] == [20] * 800

    @pytest.mark.parametrize(
        ("steps", "taper", "units"), [(4000, 4, 832), (4000, 64, 1344), (16000, 512, 7680)]
    )
    def test_tapered_examples(self, steps: int, taper: int, units: int) -> None:
        assert len(unit_grid(steps, 20, 4, taper)) == units

    @unhurried
    @given(grids())
    def test_covers_every_lane_of_every_step_once(self, grid: LazyUnits) -> None:
        covered = [(step, unit.lane) for unit in grid.values() for step in unit.steps]
        lanes = grid.value(0).lanes
        assert len(covered) == len(set(covered)) == grid.steps * lanes
        assert {unit.lanes for unit in grid.values()} == {lanes}
        assert max(covered) == (grid.steps - 1, lanes - 1)

    @unhurried
    @given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 12), st.integers(1, 40))
    def test_is_cut_as_defined(self, steps: int, unit_steps: int, lanes: int, taper: int) -> None:
        grid = unit_grid(steps, unit_steps, lanes, taper)
        expected = sizes_by_definition(steps, unit_steps, lanes, taper)
        assert [unit.count for unit in grid.values() if unit.lane == 0] == expected

    @unhurried
    @given(st.one_of(grids(), ranges()))
    def test_sizes_never_grow_and_firsts_follow(self, grid: LazyUnits) -> None:
        units = list(grid.values())
        assert all(one.count >= two.count for one, two in pairwise(units))
        lane = [unit for unit in units if unit.lane == 0]
        assert lane[0].first == 0
        assert all(one.first + one.count == two.first for one, two in pairwise(lane))

    @unhurried
    @given(st.one_of(grids(), ranges()))
    def test_is_a_consistent_mapping(self, grid: LazyUnits) -> None:
        names = list(grid)
        assert names == sorted(set(names))
        assert len(names) == len(grid)
        assert list(grid.items()) == [(name, grid[name]) for name in names]
        assert [grid.position(name) for name in names] == list(range(len(grid)))
        assert [grid.identifier(position) for position in range(len(grid))] == names
        assert [grid.value(position) for position in range(len(grid))] == list(grid.values())
        assert all(name in grid and name in grid.keys() for name in names)  # noqa: SIM118

    @unhurried
    @given(st.one_of(grids(), ranges()))
    def test_weights_sum_to_the_steps(self, grid: LazyUnits) -> None:
        assert sum(map(grid.weight, range(len(grid)))) == pytest.approx(grid.steps)

    @unhurried
    @given(st.one_of(grids(), ranges()), st.randoms(use_true_random=False))
    def test_equals_a_dict_of_the_same(self, grid: LazyUnits, random: Any) -> None:
        items = list(grid.items())
        random.shuffle(items)
        assert grid == dict(items)
        assert dict(items) == grid
        first, rest = items[0], items[1:]
        assert grid != dict(rest)
        assert grid != {**dict(rest), first[0]: "another"}
        assert grid != {**dict(rest), "another": first[1]}

    @unhurried
    @given(st.one_of(grids(), ranges()))
    def test_pickles_and_is_rebuilt(self, grid: LazyUnits) -> None:
        for other in (pickle.loads(pickle.dumps(grid)), rebuild(json.loads(json.dumps(grid.arguments)))):
            assert other == grid
            assert other.arguments == grid.arguments
            assert list(other.items()) == list(grid.items())

    def test_equality_is_by_content(self) -> None:
        assert unit_grid(100, 20, taper=False) == unit_ranges(100, 20, batch_rows=5, taper=False)
        assert unit_grid(99, 20, taper=False) == unit_ranges(99, 20, batch_rows=5, taper=False)
        assert unit_grid(100, 20, 2, taper=False) != unit_grid(100, 20, 1, taper=False)
        assert unit_grid(100, 20) != unit_grid(100, 21, taper=False)
        assert unit_grid(100, 20) != 1

    @pytest.mark.parametrize(
        "identifier",
        [
            "000000-0",
            "000000-4.json",
            "000200-0.json",
            "00000-0.json",
            "0000000-0.json",
            "000000-00.json",
            "000000-0.json\n",
            "00000\u0663-0.json",
            "-00001-0.json",
            "",
            3,
            None,
        ],
    )
    def test_knows_only_its_own_identifiers(self, identifier: Any) -> None:
        grid = unit_grid(4000, 20, 4, taper=False)
        assert identifier not in grid
        with pytest.raises(KeyError):
            grid[identifier]

    def test_positions_do_not_wrap(self) -> None:
        grid = unit_grid(100, 20, taper=False)
        lookups: list[Callable[[int], object]] = [grid.identifier, grid.value, grid.batches, grid.weight]
        for look_up in lookups:
            for position in (-1, 5):
                with pytest.raises(IndexError):
                    look_up(position)

    def test_identifiers_widen_when_needed(self) -> None:
        grid = unit_grid(2_000_000, 1, 11, taper=False)
        assert grid.identifier(0) == "0000000-00.json"
        assert grid.identifier(len(grid) - 1) == "1999999-10.json"

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            ((0, 20, 4, 64), "steps"),
            ((True, 20, 4, 64), "steps"),
            ((2**53, 20, 4, 64), "steps"),
            ((4000, 0, 4, 64), "unit_steps"),
            ((4000, 2.5, 4, 64), "unit_steps"),
            ((4000, 20, 0, 64), "lanes"),
            ((4000, 20, "4", 64), "lanes"),
            ((4000, 20, 4, 0), "taper"),
            ((4000, 20, 4, None), "taper"),
            ((4000, 20, 4, True), "taper"),
        ],
    )
    def test_refuses(self, arguments: tuple[Any, Any, Any, Any], name: str) -> None:
        with pytest.raises(InvalidInputError, match=name) as caught:
            unit_grid(*arguments)
        assert caught.value.name == name

    def test_a_switch_for_taper_is_explained(self) -> None:
        with pytest.raises(InvalidInputError, match=r"number of learners the tail is cut for.*taper=64"):
            unit_grid(4000, 20, 4, taper=True)

    def test_ten_million_units_cost_no_memory(self) -> None:
        tracemalloc.start()
        try:
            grid = unit_grid(10**9, 100, 1)
            far = grid.identifier(9_876_543)
            assert grid.position(far) == 9_876_543
            assert grid[far].first == 987_654_300
            assert far in grid
            assert next(iter(grid.items()))[1].count == 100
            assert grid == unit_grid(10**9, 100, 1)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(grid) > 10**7
        assert peak < 1_000_000
        assert len(pickle.dumps(grid)) < 250
        assert repr(grid) == "unit_grid(steps=1000000000, unit_steps=100, lanes=1, taper=64)"

    def test_long_units_are_cut_into_few_sizes(self) -> None:
        grid = unit_grid(2**53, 2**40, 1, taper=512)
        assert len(pickle.dumps(grid)) < 250
        assert len({grid.value(position).count for position in range(0, len(grid), 64)}) < 100


class TestRanges:
    @unhurried
    @given(ranges())
    def test_covers_every_row_once_in_whole_batches(self, plan: LazyUnits) -> None:
        arguments = plan.arguments
        rows = [row for unit in plan.values() for row in unit.steps]
        assert rows == list(range(int(arguments["rows"])))
        assert all(unit.first % int(arguments["batch_rows"]) == 0 for unit in plan.values())
        assert all((unit.lane, unit.lanes) == (0, 1) for unit in plan.values())
        assert max(unit.count for unit in plan.values()) <= int(arguments["rows_per_unit"])

    @unhurried
    @given(ranges())
    def test_counts_work_in_batches(self, plan: LazyUnits) -> None:
        batch_rows = int(plan.arguments["batch_rows"])
        batches = [plan.batches(position) for position in range(len(plan))]
        assert batches == [-(-unit.count // batch_rows) for unit in plan.values()]
        assert sum(batches) == plan.steps

    def test_is_cut_like_the_grid_of_its_batches(self) -> None:
        grid, plan = unit_grid(1000, 20, 1, taper=8), unit_ranges(31_990, 640, 32, taper=8)
        assert list(plan) == list(grid)
        scaled = [(unit.first * 32, unit.count * 32) for unit in grid.values()]
        assert [(unit.first, unit.count) for unit in plan.values()][:-1] == scaled[:-1]
        assert plan.value(len(plan) - 1) == Unit(31_968, 22, 0, 1)

    def test_refuses_units_of_broken_batches(self) -> None:
        with pytest.raises(InvalidInputError, match=r"multiple of batch_rows=32; pass 96"):
            unit_ranges(1000, 100, 32)

    @pytest.mark.parametrize("name", ["rows", "rows_per_unit", "batch_rows"])
    def test_refuses(self, name: str) -> None:
        given_ = {"rows": 100, "rows_per_unit": 10, "batch_rows": 1, name: 0}
        with pytest.raises(InvalidInputError, match=name):
            unit_ranges(**given_)

    def test_is_lazy_too(self) -> None:
        tracemalloc.start()
        try:
            plan = unit_ranges(10**9, 96, 32)
            assert plan[plan.identifier(10**7)].first == 960_000_000
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1_000_000
        assert repr(plan) == "unit_ranges(rows=1000000000, rows_per_unit=96, batch_rows=32, taper=64)"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"kind": "unit_files"},
        {"kind": "unit_grid", "steps": 10},
        {"kind": "unit_grid", "steps": 10, "unit_steps": 1, "lanes": 1, "taper": 4, "more": 1},
        {"kind": "unit_grid", "steps": "10", "unit_steps": 1, "lanes": 1, "taper": 4},
        {"kind": "unit_ranges", "rows": 10, "rows_per_unit": 3, "batch_rows": 2, "taper": 4},
    ],
)
def test_rebuild_refuses(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        rebuild(arguments)


class TestFiles:
    urls = ("s3://b/train/part 7.parquet", "s3://b/val/part 7.parquet", "/data/a.tar", "data/a.tar", "x")

    def test_keeps_the_order_given(self) -> None:
        assert list(unit_files(self.urls).values()) == list(self.urls)
        assert unit_files(iter(self.urls)) == unit_files(self.urls)

    def test_an_identifier_depends_on_its_url_alone(self) -> None:
        backwards = unit_files(reversed(self.urls))
        assert backwards == unit_files(self.urls)
        assert list(backwards) == list(unit_files(self.urls))[::-1]

    def test_an_identifier_shows_the_base_name(self) -> None:
        first, *_, last = unit_files(self.urls)
        assert re.fullmatch(r"part_7\.parquet-[0-9a-f]{16}", first)
        assert re.fullmatch(r"x-[0-9a-f]{16}", last)

    def test_identifiers_never_change_between_versions(self) -> None:
        assert list(unit_files(["s3://bucket/a.tar"])) == ["a.tar-bf0e17e11564efe0"]

    @unhurried
    @given(st.lists(st.text(min_size=1), min_size=1, max_size=20, unique=True))
    def test_identifiers_are_safe_and_bounded(self, urls: list[str]) -> None:
        for name, url in unit_files(urls).items():
            assert re.fullmatch(r"[A-Za-z0-9._-]{1,80}-[0-9a-f]{16}", name)
            assert url in urls

    @pytest.mark.parametrize(
        "url",
        [
            "https://host/a.tar?signature=secret",
            "https://host/a.tar#secret",
            "https://host/?secret",
            "https://user:secret@host",
            "https://user:secret@host/",
            "https://user:secret@host?x=a/secret",
        ],
    )
    def test_no_secret_of_a_url_is_shown(self, url: str) -> None:
        plan = unit_files([url])
        assert "secret" not in next(iter(plan)) + repr(plan)
        with pytest.raises(InvalidInputError) as caught:
            unit_files([url, url])
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("urls", [[], ["a", "b", "a"], ["a", ""], ["a", 1], "abc"])
    def test_refuses(self, urls: Any) -> None:
        with pytest.raises(InvalidInputError, match="urls"):
            unit_files(urls)

    def test_pickles_and_has_no_arguments(self) -> None:
        plan = unit_files(self.urls)
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert plan.arguments is None
        assert repr(plan) == "unit_files(<5 urls>)"
