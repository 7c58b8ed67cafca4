"""The learner's view of a plan: positions, weights, identity of plans, and the grammar of identifiers."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardqueue.errors import InvalidInputError
from shardqueue.mailbox.names import check_key
from shardqueue.plan import Plan, check_identifier
from shardqueue.units import Unit, unit_files, unit_grid, unit_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping

unhurried = settings(deadline=None)
names = st.text("abc-_.0", min_size=1, max_size=8).filter(lambda name: name[0] != ".")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
plans = st.dictionaries(names, json_values, min_size=1, max_size=12)


def through_json(plan: Plan) -> dict[str, Any]:
    signature: dict[str, Any] = json.loads(json.dumps(plan.signature()))
    return signature


class TestPositions:
    @unhurried
    @given(plans)
    def test_are_places_among_the_sorted_identifiers(self, units: dict[str, Any]) -> None:
        plan, ordered = Plan(units), sorted(units)
        assert len(plan) == len(units)
        assert [plan.identifier(position) for position in range(len(plan))] == ordered
        assert [plan.position(name) for name in ordered] == list(range(len(plan)))
        assert [plan.value(position) for position in range(len(plan))] == [units[name] for name in ordered]

    @unhurried
    @given(plans)
    def test_the_callers_own_order_is_kept(self, units: dict[str, Any]) -> None:
        plan = Plan(units)
        assert [plan.identifier(plan.order(place)) for place in range(len(plan))] == list(units)
        assert plan.natural == (list(units) == sorted(units))

    def test_a_lazy_plan_answers_like_its_dict(self) -> None:
        grid = unit_grid(200, 20, 3, taper=4)
        lazy, listed = Plan(grid), Plan(dict(grid))
        assert lazy.natural
        assert listed.natural
        assert lazy.steps == listed.steps == 200.0
        for position in range(len(grid)):
            for ask in ("identifier", "order", "value", "weight", "batches"):
                assert getattr(lazy, ask)(position) == getattr(listed, ask)(position)

    @pytest.mark.parametrize("units", [unit_grid(60, 20, taper=False), {"b": 1, "a": 2, "c": 3}])
    def test_do_not_wrap(self, units: Mapping[str, object]) -> None:
        plan = Plan(units)
        for ask in (plan.identifier, plan.order, plan.value, plan.weight, plan.batches):
            for position in (-1, 3):
                with pytest.raises(IndexError):
                    ask(position)

    @pytest.mark.parametrize("units", [unit_grid(60, 20, taper=False), {"b": 1, "a": 2}])
    @pytest.mark.parametrize("identifier", ["", "aa", "z", "000003-0.json", 1, None])
    def test_unknown_identifiers(self, units: Mapping[str, object], identifier: Any) -> None:
        plan = Plan(units)
        assert plan.find(identifier) is None
        with pytest.raises(KeyError):
            plan.position(identifier)

    def test_known_identifiers_are_found(self) -> None:
        assert [Plan({"b": 1, "a": 2}).find(name) for name in "ab"] == [0, 1]


class TestWork:
    def test_a_unit_weighs_its_share_of_the_steps(self) -> None:
        plan = Plan(unit_grid(4000, 20, 4, taper=False))
        assert plan.weight(0) == 5.0
        assert plan.batches(0) == 20
        assert plan.steps == 4000.0

    def test_row_ranges_count_batches(self) -> None:
        plan = Plan(unit_ranges(1000, 320, 32, taper=False))
        assert [plan.batches(position) for position in range(len(plan))] == [10, 10, 10, 2]
        assert [plan.weight(position) for position in range(len(plan))] == [10.0, 10.0, 10.0, 2.0]
        assert plan.steps == 32.0

    def test_other_values_weigh_one(self) -> None:
        plan = Plan({"a": "x", "b": Unit(0, 6, 0, 3), "c": None})
        assert [plan.weight(position) for position in range(3)] == [1.0, 2.0, 1.0]
        assert [plan.batches(position) for position in range(3)] == [None, 6, None]
        assert plan.steps == 4.0

    @unhurried
    @given(
        st.one_of(
            st.builds(unit_grid, st.integers(1, 90), st.integers(1, 9), st.integers(1, 5), st.integers(1, 9)),
            st.builds(
                lambda rows, batch: unit_ranges(rows, 3 * batch, batch, 2), st.integers(1, 90), st.just(4)
            ),
            st.dictionaries(
                names, st.builds(Unit, st.just(0), st.integers(1, 9), st.just(0), st.just(3)), min_size=1
            ),
        )
    )
    def test_spans_are_the_weights_before_a_place(self, units: Mapping[str, object]) -> None:
        plan, before = Plan(units), 0.0
        for place in range(len(plan)):
            assert plan.span(place) == pytest.approx(before)
            before += plan.weight(plan.order(place))
        assert plan.span(len(plan)) == pytest.approx(before) == pytest.approx(plan.steps)

    @pytest.mark.parametrize("units", [unit_grid(60, 20, taper=False), {"b": 1, "a": 2, "c": 3}])
    @pytest.mark.parametrize("place", [-1, 4])
    def test_spans_do_not_wrap(self, units: Mapping[str, object], place: int) -> None:
        with pytest.raises(IndexError):
            Plan(units).span(place)


class TestFingerprint:
    @unhurried
    @given(plans, st.randoms(use_true_random=False))
    def test_does_not_depend_on_the_order(self, units: dict[str, Any], random: Any) -> None:
        items = list(units.items())
        random.shuffle(items)
        assert Plan(dict(items)).fingerprint() == Plan(units).fingerprint()
        assert Plan(units).matches(through_json(Plan(dict(items))))

    @unhurried
    @given(plans, st.data())
    def test_sees_a_changed_value(self, units: dict[str, Any], data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(units)))
        changed = {**units, name: [units[name]]}
        assert Plan(changed).fingerprint() != Plan(units).fingerprint()
        assert not Plan(units).matches(through_json(Plan(changed)))

    def test_sees_a_changed_identifier_and_swapped_values(self) -> None:
        prints = [
            Plan(units).fingerprint() for units in ({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 1, "c": 2})
        ]
        assert len(set(prints)) == 3

    def test_survives_json(self) -> None:
        units = {"a": {"y": [1, 2.5, None], "x": "\u00e9"}, "b": (1, 2)}
        assert Plan(json.loads(json.dumps(units))).fingerprint() == Plan(units).fingerprint()

    def test_a_unit_differs_from_what_looks_like_it(self) -> None:
        looks = ({"first": 0, "count": 1, "lane": 0, "lanes": 1}, [0, 1, 0, 1])
        prints = {Plan({"a": value}).fingerprint() for value in (Unit(0, 1, 0, 1), *looks)}
        assert len(prints) == 3

    @pytest.mark.parametrize("value", [object(), {1, 2}, float("nan"), {(1, 2): 3}, b"x"])
    def test_other_values_contribute_their_identifier(self, value: object) -> None:
        assert Plan({"a": value}).fingerprint() == Plan({"a": object()}).fingerprint()
        assert Plan({"a": value}).fingerprint() != Plan({"b": value}).fingerprint()
        assert Plan({"a": value}).fingerprint() != Plan({"a": None}).fingerprint()

    def test_never_changes_between_versions(self) -> None:
        expected = "26c7e9eba530d9a1ce0a318b597f4742e363c165d34f079c0517a12905d14b00-2"
        assert Plan({"a": 1, "b": Unit(0, 20, 1, 4)}).fingerprint() == expected


class TestSignature:
    grid = unit_grid(200, 20, 2, taper=4)

    def test_of_a_lazy_plan_is_its_arguments(self) -> None:
        arguments = {"kind": "unit_grid", "steps": 200, "unit_steps": 20, "lanes": 2, "taper": 4}
        units = len(self.grid)
        assert Plan(self.grid).signature() == {"units": units, "arguments": arguments, "fingerprint": None}

    def test_of_a_listed_plan_is_its_fingerprint(self) -> None:
        plan = Plan(unit_files(["a", "b"]))
        assert plan.signature() == {"units": 2, "arguments": None, "fingerprint": plan.fingerprint()}

    def test_a_grid_and_its_reordered_dict_agree_both_ways(self) -> None:
        lazy, listed = Plan(self.grid), Plan(dict(reversed(list(self.grid.items()))))
        assert not listed.natural
        assert listed.matches(through_json(lazy))
        assert lazy.matches(through_json(listed))
        assert lazy.fingerprint() == listed.fingerprint()

    def test_a_grid_and_a_changed_dict_differ_both_ways(self) -> None:
        unit = self.grid.value(0)
        changed = {**self.grid, self.grid.identifier(0): Unit(unit.first + 1, unit.count, 0, 2)}
        lazy, listed = Plan(self.grid), Plan(changed)
        assert not listed.matches(through_json(lazy))
        assert not lazy.matches(through_json(listed))

    def test_other_arguments_with_the_same_content_agree(self) -> None:
        one, two = Plan(unit_grid(100, 20, taper=False)), Plan(unit_ranges(100, 20, 10, taper=False))
        assert one.matches(through_json(two))
        assert two.matches(through_json(one))

    def test_other_cuts_differ(self) -> None:
        assert not Plan(self.grid).matches(through_json(Plan(unit_grid(200, 20, 2, taper=5))))
        assert not Plan(self.grid).matches(through_json(Plan(unit_grid(200, 20, 1, taper=4))))

    def test_counts_are_compared_first(self) -> None:
        plan = Plan(MappingProxyType({"a": 1}))
        assert not plan.matches({"units": 2, "arguments": {"kind": "?"}, "fingerprint": None})

    @pytest.mark.parametrize("arguments", [None, {"kind": "?"}, [1]])
    def test_an_unusable_signature_is_refused(self, arguments: object) -> None:
        with pytest.raises(InvalidInputError):
            Plan({"a": 1}).matches({"units": 1, "arguments": arguments, "fingerprint": None})


class TestPlan:
    def test_ten_million_units_cost_no_memory(self) -> None:
        grid = unit_grid(10**9, 100, 1)
        tracemalloc.start()
        try:
            plan = Plan(grid)
            assert plan.position(plan.identifier(9_000_000)) == plan.order(9_000_000) == 9_000_000
            assert plan.value(9_000_000) == Unit(900_000_000, 100, 0, 1)
            assert plan.weight(9_000_000) == plan.batches(9_000_000) == 100
            assert plan.steps == 1e9
            assert plan.matches(through_json(plan))
            assert not plan.matches(through_json(Plan(unit_grid(10**9, 100, 1, taper=65))))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(plan) > 10**7
        assert peak < 1_000_000
        assert len(pickle.dumps(plan)) < 400

    @pytest.mark.parametrize("units", [unit_grid(60, 20, 2), {"b": 1, "a": [2]}])
    def test_pickles(self, units: Mapping[str, object]) -> None:
        plan = Plan(units)
        other = pickle.loads(pickle.dumps(plan))
        assert other.units == plan.units
        assert other.matches(plan.signature())
        assert [other.order(place) for place in range(len(other))] == list(map(plan.order, range(len(plan))))

    @pytest.mark.parametrize(
        ("units", "line"),
        [
            (unit_grid(4000, 20, 4), "unit_grid(steps=4000, unit_steps=20, lanes=4, taper=64): 1344 units"),
            (unit_files(["s3://b/a.tar"]), "unit_files(<1 urls>): 1 unit"),
            ({"a": 1, "b": 2}, "dict: 2 units"),
        ],
    )
    def test_describes_itself(self, units: Mapping[str, object], line: str) -> None:
        assert Plan(units).describe() == line
        assert repr(Plan(units)) == f"<Plan {line}>"

    @pytest.mark.parametrize("units", [{}, [], ["a"], "a", None, 3])
    def test_refuses_what_is_no_plan(self, units: Any) -> None:
        with pytest.raises(InvalidInputError, match="units="):
            Plan(units)

    @pytest.mark.parametrize("order", [("a", "a-b", "a/b"), ("a/b", "a-b", "a"), ("a/b/c", "x", "a")])
    def test_refuses_a_folder_of_another(self, order: tuple[str, ...]) -> None:
        with pytest.raises(InvalidInputError, match=r"identifier='a': .*folder of another"):
            Plan(dict.fromkeys(order))

    def test_names_the_first_offender(self) -> None:
        with pytest.raises(InvalidInputError, match="identifier='b~1'"):
            Plan({"z": 1, "b~1": 2, "a~1": 3})


class TestGrammar:
    @unhurried
    @given(st.text(max_size=30))
    def test_what_it_accepts_can_be_a_key(self, name: str) -> None:
        try:
            check_identifier(name)
        except InvalidInputError:
            return
        check_key(f"units/{name}~1")

    @pytest.mark.parametrize(
        "name",
        [
            "a",
            "000003-2.json",
            "a/b.c/d",
            "a b",
            "\u00e9t\u00e9",
            "a" * 180,
            "/".join(["x" * 127] * 4),
        ],
    )
    def test_accepts(self, name: str) -> None:
        assert check_identifier(name) == name

    @pytest.mark.parametrize(
        "name",
        [
            "",
            None,
            7,
            b"a",
            "a~1",
            "~",
            "/a",
            "a/",
            "/",
            "a//b",
            ".",
            "..",
            "a/../b",
            "a/.",
            "...",
            ".hidden",
            "a/.b",
            "a\\b",
            "a\nb",
            "a\0",
            "\x7f",
            "\x9b",
            "\u2028",
            "\ud800",
            "a" * 181,
            "\u00e9" * 91,
            "/".join(["x" * 128] * 4),
        ],
    )
    def test_refuses(self, name: object) -> None:
        with pytest.raises(InvalidInputError, match="identifier="):
            check_identifier(name)

    def test_learner_ids_have_no_folders(self) -> None:
        assert check_identifier("host-0", "learner_id", folders=False) == "host-0"
        with pytest.raises(InvalidInputError, match="learner_id='a/b'"):
            check_identifier("a/b", "learner_id", folders=False)

    @unhurried
    @given(st.text(max_size=30))
    def test_messages_can_be_printed(self, name: str) -> None:
        try:
            check_identifier(name)
        except InvalidInputError as error:
            assert str(error).isprintable()


def test_the_total_of_a_listed_plan_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan({"a": Unit(0, 3, 0, 1), "b": Unit(3, 2, 0, 1)})
    assert plan.total == 5
    monkeypatch.setattr(type(plan._index), "batches", None)
    assert plan.total == 5
