"""The words that a process and its workers share: which iteration a worker takes part in, whatever the order."""

from __future__ import annotations

import multiprocessing
import os
from array import array
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardqueue.block import WORDS, Block, Doing, Message, Pipe, Told, iteration_key, pass_of
from shardqueue.records import pass_name

if TYPE_CHECKING:
    from collections.abc import Callable


def block() -> Block:
    made = Block(memoryview(array("q", bytes(8 * WORDS))))
    made.own("00ffab")
    return made


def joins(shared: Block, key: int, workers: Any) -> set[tuple[int, bool]]:
    return {shared.join(worker, key) for worker in workers}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_workers_of_one_iteration_agree_and_epochs_are_counted(order: tuple[int, ...]) -> None:
    shared = block()
    for epoch in range(4):
        ((word, tracked),) = joins(shared, iteration_key(epoch), order)
        assert (pass_of(word), tracked) == (epoch, False)
        assert shared.current == word


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_equal_seeds_make_no_difference(order: tuple[int, ...]) -> None:
    """A user may seed torch alike before each epoch: then every iteration has the same key."""
    shared = block()
    for epoch in range(4):
        ((word, _),) = joins(shared, 77, order)
        assert pass_of(word) == epoch


def test_what_is_known_of_an_earlier_loop_counts_until_more_is_known() -> None:
    """Else a worker that was told of one batch on its way would never hear that the loop took it."""
    shared = block()
    shared.join(0, 1)
    assert shared.taken(0) is None
    shared.took(0, 10.0, 0.25)
    shared.took(0, 11.0, None)
    assert shared.taken(0) == (2, 11.0, 0.25)


def test_an_epoch_that_is_set_is_the_pass() -> None:
    shared = block()
    for number, epoch in enumerate((5, 2, 2, 9)):
        shared.epoch = epoch
        ((word, _),) = joins(shared, iteration_key(number), range(2))
        assert pass_of(word) == epoch


def test_a_worker_that_was_too_slow_takes_nothing_over() -> None:
    shared = block()
    (first, _) = shared.join(0, 1)
    (second, _) = shared.join(0, 2)
    assert (pass_of(first), pass_of(second)) == (0, 1)
    assert shared.join(1, 1) == (first, False)
    assert shared.is_over(first)
    assert not shared.is_over(second)
    assert shared.workers(second) == [(0, os.getpid(), Doing.CLAIMING)]
    assert shared.join(1, 2) == (second, False)


class Interrupted:
    """Words of which the `number`-th read lets somebody else go first."""

    def __init__(self, words: memoryview, number: int, other: Callable[[], object]) -> None:
        self._words, self._left, self._other = words, number, other

    def __getitem__(self, place: int) -> int:
        self._left -= 1
        if self._left == 0:
            self._other()
        return self._words[place]

    def __setitem__(self, place: int, word: int) -> None:
        self._words[place] = word


@pytest.mark.parametrize("equal_seeds", [False, True])
@pytest.mark.parametrize("number", range(1, 40))
def test_workers_that_join_at_once_agree(number: int, equal_seeds: bool) -> None:
    """Whatever one reads before the other has joined, and after."""
    words = memoryview(array("q", bytes(8 * WORDS)))
    shared = Block(words)
    shared.own("00ffab")
    for epoch in range(3):
        key = 7 if equal_seeds else epoch
        others: list[tuple[int, bool]] = []

        def join_another(key: int = key, others: list[tuple[int, bool]] = others) -> None:
            others.append(shared.join(1 + len(others), key))

        interrupted: Any = Interrupted(words, number, join_another)
        mine = Block(interrupted).join(0, key)
        while len(others) < 2:
            join_another()
        assert {mine, *others} == {mine}
        assert pass_of(mine[0]) == epoch
        assert [worker for worker, _, _ in shared.workers(mine[0])] == [0, 1, 2]


def test_seeds_that_take_turns_are_new_iterations() -> None:
    shared = block()
    for number in range(6):
        ((word, _),) = joins(shared, number % 2, range(2))
        assert pass_of(word) == number


def test_a_tracked_iteration_is_joined_once_by_each_worker() -> None:
    shared = block()
    word = shared.next_word(9)
    shared.expect(word, fresh=True)
    assert joins(shared, 1, range(3)) == {(word, True)}
    ((later, tracked),) = joins(shared, 2, range(3))
    assert (pass_of(later), tracked) == (1, False)


def test_leaving_is_seen_by_those_who_come_late() -> None:
    shared = block()
    word = shared.next_word(9)
    shared.expect(word, fresh=True)
    shared.leave(word)
    assert shared.join(0, 1) == (word, True)
    assert shared.is_over(word)
    assert shared.was_left(word)


def test_a_state_of_an_older_iteration_does_not_land_in_a_newer_one() -> None:
    shared = block()
    first, _ = shared.join(0, 1)
    second, _ = shared.join(0, 2)
    shared.note(0, first, Doing.STOPPED)
    assert shared.workers(second)[0][2] is Doing.CLAIMING
    shared.note(0, second, Doing.ENDED)
    assert shared.workers(second)[0][2] is Doing.ENDED


def test_finished_passes() -> None:
    shared = block()
    words = []
    for number in range(100):
        word, _ = shared.join(0, iteration_key(number))
        shared.finish(word)
        shared.finish(word)
        words.append(word)
    assert not any(map(shared.finished_before, words)), "its own iteration is no other"
    shared.epoch = 99
    again, _ = shared.join(0, iteration_key("again"))
    assert shared.finished_before(again)


def test_a_run_is_remembered_by_its_number() -> None:
    shared = block()
    runs = []
    for run in ("a-name", "7"):
        shared.run = run
        runs.append(shared.run)
    assert runs == [None, "7"]


def test_names_and_numbers() -> None:
    shared = block()
    assert (shared.owner, shared.instance, shared.epoch, shared.run) == (
        os.getpid(),
        "00000000ffab",
        None,
        None,
    )
    assert [pass_name(number) for number in range(3)] == ["", "e1", "e2"]
    assert pass_of(0) == -1


messages = st.builds(
    Message,
    worker=st.integers(0, 255),
    word=st.integers(0, 2**62),
    told=st.sampled_from(Told),
    position=st.integers(0, 2**60),
    attempt=st.integers(0, 2**40),
    value=st.integers(0, 2**60),
)


@given(st.lists(messages, max_size=50))
def test_messages_arrive_as_they_were_sent(sent: list[Message]) -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    pipe = Pipe(reader, writer)
    assert pipe.receive() == []
    assert all(pipe.send(message) for message in sent)
    assert pipe.receive() == sent
    reader.close()
    writer.close()


def test_a_full_pipe_refuses_and_loses_nothing() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    pipe = Pipe(reader, writer)
    sent = 0
    while pipe.send(Message(0, 1, Told.CLAIMED, sent, 0, 0)):
        sent += 1
    assert sent > 100
    assert [message.position for message in pipe.receive()] == list(range(sent))
    assert pipe.send(Message(0, 1, Told.SIZED, 0, 0, 0))
    reader.close()
    assert pipe.send(Message(0, 1, Told.SIZED, 0, 0, 0)), "nobody is left to be told"
    writer.close()
