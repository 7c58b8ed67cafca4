"""Producers claim units from the shared queue and send what they compute; consumers train on it.

Five teachers, copies of one small frozen transformer, claim batches of real text from one folder with `shared_queue`
and send `(step, bytes of text, hidden states)`. Three students learn to predict the next byte from the hidden states,
with an optimizer step an item. All are threads of one process or, with `--processes`, processes of their own.

- `round robin`: teacher i sends to student i mod 3, over three channels of capacity 8: two, two and one teachers.
- `channel`: one channel of five senders, three receivers and capacity 24. Total capacity is the same, and so are the
  plan and the speeds.

Total time is from the common start, when all models are built, to the last item trained. A consumer is idle while it
waits in `receive` between its first item and its last, as a fraction of that time: neither start-up nor the wait for
the end counts.

**What is real and what is not.** Text, forward passes, gradients, claims and hand-overs are. The speeds are set: this
is meant for few cores, which eight models would fight for, so the models are small (1 to 3 ms an item) and each
sleeps until its item has taken the time set, as if it had a GPU of its own; what it overslept is taken off its next
item. A student takes 30 ms, and the teachers together are 1.05 times as fast as the students.

Between processes a consumer also waits for the item to come over and while a tensor's memory is opened, with whatever
else the cores are busy with.

Each form checks by value, where items are trained, that every item was trained exactly once; if not, the exit code is
1. A missed reach alone is marked, and fails only with `--strict`: a busy machine can cause it.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.report import Report, Row, options
from shardqueue import Channel, shared_queue, unit_grid
from shardqueue.demo.model import ByteModel
from shardqueue.demo.text import loader, read_corpus, rows_of
from shardqueue.errors import ChannelEndedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import SpawnContext

    from shardqueue import Receiver, Sender
    from shardqueue.units import Unit

    Item = tuple[int, bytes, Tensor]
    Key = tuple[int, int]

TEACHERS, STUDENTS = 5, 3
STUDENT_SECONDS = 0.030
SURPLUS = 1.05
"""The teachers' rate together over the students'."""
TEACHER_SECONDS = STUDENT_SECONDS * TEACHERS / (STUDENTS * SURPLUS)
CAPACITY = 24
SEQUENCES, CONTEXT, WIDTH = 8, 64, 64
PATIENCE = 60.0
"""Seconds to wait for all models to be built."""


# -- the models ----------------------------------------------------------------------------------------------


class Teacher(ByteModel):
    """A transformer whose last hidden states are wanted; its weights stay as they were drawn."""

    def __init__(self) -> None:
        super().__init__(CONTEXT, WIDTH)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes `[rows, places]` to hidden states `[rows, places, width]`."""
        hidden: Tensor = self.norm(self.blocks(self.bytes(x) + self.places.weight))
        return hidden


class Student(nn.Module):
    """Predicts the next byte from the teacher's hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 256))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states `[rows, places, width]` to logits `[rows, places, 256]`."""
        logits: Tensor = self.layers(hidden)
        return logits


class Training:
    """A student's own copy of the model, and its optimizer."""

    def __init__(self, model: Student) -> None:
        self._model = copy.deepcopy(model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-3)

    def step(self, rows: Tensor, hidden: Tensor) -> float:
        """Learn from one item; return its loss, in nats a byte."""
        logits = self._model(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()


class Pace:
    """Makes an item take as long as on a GPU of one's own; what a sleep overslept is taken off the next item."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = self._late = 0.0

    def begin(self) -> None:
        """An item is in hand."""
        self._end = time.monotonic() - self._late + self._seconds

    def finish(self) -> None:
        """Sleep until its time is over."""
        time.sleep(max(0.0, self._end - time.monotonic()))
        self._late = min(max(0.0, time.monotonic() - self._end), self._seconds)


# -- who takes part ------------------------------------------------------------------------------------------


class Barrier(Protocol):
    """Of threads or of processes."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """What everybody knows.

    Attributes:
        items: how many batches there are.
        text: the corpus.
        folder: where the mailboxes are.
        teacher: the model that is copied.
        student: the same.
        is_in_processes: everybody is a process, not a thread.
    """

    items: int
    text: Tensor
    folder: str
    teacher: Teacher
    student: Student
    is_in_processes: bool

    @property
    def units(self) -> dict[str, Unit]:
        """The plan: units of four items, and of fewer near the end."""
        return dict(unit_grid(self.items, 4, 1, taper=TEACHERS))

    @property
    def load(self) -> Callable[[Unit], Iterator[tuple[int, bytes]]]:
        """The reader of a unit's batches."""
        return loader(self.text, SEQUENCES, CONTEXT)

    def keys(self) -> Counter[Key]:
        """Every item that is to be trained: its step and a checksum of its tokens."""
        pairs = (pair for unit in self.units.values() for pair in self.load(unit))
        return Counter((step, zlib.crc32(batch)) for step, batch in pairs)


@dataclass(slots=True)
class Outcome:
    """What one student did in one form.

    Attributes:
        form: which.
        student: which.
        started: of the common clock, when the form began.
        first: when it received its first item.
        last: when it received its last one.
        ended: when that one was trained.
        waited: seconds it waited between the first and the last.
        trained: the items, by value.
        losses: of the items in this order.
    """

    form: str
    student: int
    started: float
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    waited: float = 0.0
    trained: list[Key] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def idle(self) -> float:
        """Share of its time between its first item and its last that it waited."""
        return self.waited / (self.last - self.first) if self.last > self.first else 0.0

    def received(self, asked: float) -> None:
        """It asked for an item, and has it now."""
        self.last = time.monotonic()
        if self.first:
            self.waited += self.last - asked
        else:
            self.first = self.last

    def was_trained(self, step: int, batch: bytes, loss: float) -> None:
        """The item's time is over."""
        self.trained.append((step, zlib.crc32(batch)))
        self.losses.append(loss)
        self.ended = time.monotonic()


def teach(number: int, work: Work, barrier: Barrier, senders: dict[str, Sender[Item]]) -> None:
    """Be teacher `number` in one form after the other."""
    torch.set_num_threads(1)
    model = copy.deepcopy(work.teacher)
    model(torch.zeros(SEQUENCES, CONTEXT, dtype=torch.long))
    for form, sender in senders.items():
        barrier.wait(PATIENCE)
        pace = Pace(TEACHER_SECONDS)
        mailbox, name = f"{work.folder}/{form}", f"teacher-{number}"
        with sender, shared_queue(work.units, mailbox, name, work.load, prefetch=2) as queue:
            for step, batch in queue:
                pace.begin()
                hidden = model(rows_of(batch, CONTEXT)[:, :-1])
                pace.finish()
                sender.send((int(step), batch, hidden))


def learn(
    number: int,
    work: Work,
    barrier: Barrier,
    receivers: dict[str, Receiver[Item]],
    results: Sender[list[Outcome]],
) -> None:
    """Be student `number` in one form after the other."""
    torch.set_num_threads(1)
    rows = torch.zeros(SEQUENCES, CONTEXT + 1, dtype=torch.long)
    Training(work.student).step(rows, torch.zeros(SEQUENCES, CONTEXT, WIDTH))
    outcomes = []
    with results:
        for form, receiver in receivers.items():
            training = Training(work.student)
            barrier.wait(PATIENCE)
            with receiver:
                outcomes.append(train(training, receiver, Outcome(form, number, time.monotonic())))
        results.send(outcomes)


def train(training: Training, receiver: Receiver[Item], outcome: Outcome) -> Outcome:
    """Train on what comes, until the stream ends."""
    pace = Pace(STUDENT_SECONDS)
    while True:
        asked = time.monotonic()
        try:
            step, batch, hidden = receiver.receive()
        except ChannelEndedError:
            return outcome
        outcome.received(asked)
        pace.begin()
        loss = training.step(rows_of(batch, CONTEXT), hidden)
        pace.finish()
        outcome.was_trained(step, batch, loss)


# -- the two forms -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Form:
    """How teachers and students are joined.

    Attributes:
        name: shown in the table.
        channels: the queues between them.
        sends: by teacher, to which of the channels.
        receives: by student, from which.
    """

    name: str
    channels: list[Channel[Item]]
    sends: list[int]
    receives: list[int]


def round_robin(context: SpawnContext | None) -> Form:
    """Teacher i to student i mod 3."""
    sends = [teacher % STUDENTS for teacher in range(TEACHERS)]
    capacity = CAPACITY // STUDENTS
    channels = [
        Channel[Any](sends.count(student), 1, capacity, context=context) for student in range(STUDENTS)
    ]
    return Form("round robin", channels, sends, list(range(STUDENTS)))


def one_channel(context: SpawnContext | None) -> Form:
    """All teachers to all students."""
    channel = Channel[Any](TEACHERS, STUDENTS, CAPACITY, context=context)
    return Form("channel", [channel], [0] * TEACHERS, [0] * STUDENTS)


def start(context: SpawnContext | None, work: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """Start a thread or a process; return what waits for its end."""
    made: Any = threading.Thread if context is None else context.Process
    going = made(target=work, args=arguments, daemon=True)
    going.start()
    join: Callable[[], None] = going.join
    return join


def run(work: Work, forms: list[Form], context: SpawnContext | None) -> list[Outcome]:
    """Run the forms one after the other, by the same threads or processes."""
    everybody = TEACHERS + STUDENTS
    barrier: Any = threading.Barrier(everybody) if context is None else context.Barrier(everybody)
    results = Channel[Any](senders=STUDENTS, receivers=1, capacity=STUDENTS, context=context)
    joins = []
    for number in range(TEACHERS):
        senders = {form.name: form.channels[form.sends[number]].sender() for form in forms}
        joins.append(start(context, teach, number, work, barrier, senders))
    for number in range(STUDENTS):
        receivers = {form.name: form.channels[form.receives[number]].receiver() for form in forms}
        joins.append(start(context, learn, number, work, barrier, receivers, results.sender()))
    with results.receiver() as receiver:
        outcomes = [outcome for each in receiver for outcome in each]
    for join in joins:
        join()
    return outcomes


# -- the rows ------------------------------------------------------------------------------------------------


def expected(form: str, items: int) -> tuple[list[float], list[float], float]:
    """Return idle fraction and items of each student and the total time, by arithmetic from the speeds."""
    teachers = [2, 2, 1] if form == "round robin" else [TEACHERS / STUDENTS] * STUDENTS
    rates = [min(1 / STUDENT_SECONDS, count / TEACHER_SECONDS) for count in teachers]
    idle = [1 - rate * STUDENT_SECONDS for rate in rates]
    return idle, [items * rate / sum(rates) for rate in rates], items / sum(rates)


def tell(report: Report, form: Form, outcomes: list[Outcome], wanted: Counter[Key]) -> float:
    """Report what came of a form; return its total time."""
    found = Counter(key for outcome in outcomes for key in outcome.trained)
    if found != wanted:
        twice, never = (found - wanted).total(), (wanted - found).total()
        report.wrong.append(
            f"{form.name}: of {wanted.total()} items {twice} trained too often, {never} not at all"
        )
    idle, items, total = expected(form.name, wanted.total())
    seconds = max(each.ended for each in outcomes) - min(each.started for each in outcomes)
    report.add(Row(f"{form.name}: total time", seconds, "s", None, f"{total:.2f} by the speeds"))
    for outcome, share, fraction in zip(outcomes, items, idle, strict=True):
        case = f"{form.name}: student {outcome.student}"
        reach, at_least = _reach(form.name, outcome.student)
        against = f"{fraction:.2f} by the speeds; the channel reports {_reported(form, outcome.student):.3f}"
        report.add(Row(f"{case}, idle", outcome.idle, "of its time", reach, against, at_least))
        count = float(len(outcome.trained))
        report.add(Row(f"{case}, trained", count, "items", None, f"{share:.0f} by the speeds"))
    first = mean(each.losses[0] for each in outcomes if each.losses)
    last = mean(loss for each in outcomes for loss in each.losses[-10:])
    report.add(
        Row(f"{form.name}: loss of the last 10 items", last, "nats/byte", None, f"at first {first:.2f}")
    )
    return seconds


def _reach(form: str, student: int) -> tuple[float | None, bool]:
    if form == "channel":
        return 0.05, False
    return (0.25, True) if student == STUDENTS - 1 else (None, False)


def _reported(form: Form, student: int) -> float:
    receivers = [end for channel in form.channels for end in channel.report().receivers]
    return receivers[student].wait_fraction


def measure(report: Report, work: Work, context: SpawnContext | None) -> None:
    """Run both forms and report them."""
    forms = [round_robin(context), one_channel(context)]
    outcomes = sorted(run(work, forms, context), key=lambda outcome: outcome.student)
    wanted, seconds = work.keys(), {}
    for form in forms:
        mine = [outcome for outcome in outcomes if outcome.form == form.name]
        seconds[form.name] = tell(report, form, mine, wanted)
        for channel in form.channels:
            print(f"{report.benchmark}: {form.name}: {channel.report().summary()}", file=sys.stderr)
    by_speeds = expected("round robin", 1)[2] / expected("channel", 1)[2]
    ratio = seconds["round robin"] / seconds["channel"]
    report.add(
        Row("total time, round robin over channel", ratio, "x", None, f"{by_speeds:.2f} by the speeds")
    )


def main(arguments: list[str] | None = None) -> int:
    parser = options(
        "teacher_student",
        "Five teachers and three students: round robin, and one channel.",
        "240 items instead of 1,500",
    )
    parser.add_argument("--processes", action="store_true", help="processes instead of threads")
    given = parser.parse_args(arguments)
    report = Report("teacher_student")
    context = torch.multiprocessing.get_context("spawn") if given.processes else None
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        items = 240 if given.quick else 1500
        work = Work(items, read_corpus().train, folder, Teacher(), Student(), given.processes)
        measure(report, work, context)
    return report.finish(given.strict)


if __name__ == "__main__":
    sys.exit(main())
