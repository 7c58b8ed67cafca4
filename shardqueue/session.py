"""A learner's stay in a run: what counts as trained, how fast, and the log others can read.

Owns the learner's `Book` and the thread that writes it to the mailbox every few seconds, so that neither a slow
store nor a dead one ever slows training. Feeds report what they hand out; `step()` alone makes it trained. A
feed without a session of the user's has one of its own, in which coming back for the next batch does; that one may be
left and entered again, once a pass.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections import Counter, deque
from random import Random
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from shardqueue.allowance import UNLIMITED
from shardqueue.claim import Owner
from shardqueue.clock import SystemClock
from shardqueue.entered import ENTERED
from shardqueue.errors import (
    ClosedError,
    InvalidInputError,
    LoadError,
    PassFinishedError,
    ShardQueueWarning,
)
from shardqueue.guard import Guard
from shardqueue.history import History
from shardqueue.learner import LOG_EVERY, Book, learner_label, new_instance, seat, seen_here, this_process
from shardqueue.logwriter import LogWriter
from shardqueue.mailbox import open_mailbox
from shardqueue.opening import open_run
from shardqueue.pace import Pace
from shardqueue.preemption import PreemptionNotice
from shardqueue.records import pass_number
from shardqueue.rollback import Rollback
from shardqueue.run import Opening, check_joined, new_manifest
from shardqueue.state import State
from shardqueue.throughput import Rates, Rolling
from shardqueue.units import check_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    from shardqueue.allowance import Allowance
    from shardqueue.clock import Clock
    from shardqueue.mailbox import Mailbox
    from shardqueue.plan import Plan
    from shardqueue.progress import Agreed
    from shardqueue.records import Left, LogPage
    from shardqueue.run import Joined
    from shardqueue.source import Attempt, Source, Together
    from shardqueue.tracking import Trackable
    from shardqueue.units import Step

T = TypeVar("T")

logger = logging.getLogger("shardqueue")

STEPLESS = 256
"""Batches handed out without a single `step()` after which it is taken to have been forgotten."""
LONGEST_LOG_EVERY = 86400.0
FIRST_LOG = 2.0
"""Seconds for which the first claim waits until the log says that we are here."""
FLUSH = 2.0
"""Seconds for which taking a state waits until the log says what is in it."""
FAREWELL = 10.0
"""Seconds for which leaving tries to say so in the mailbox."""


class Session:
    """What one training process does in one run.

    Use it as a context manager around the training loop; call `step` after each optimizer step:

        with Session(mailbox, "node-a") as session, shared_queue(units, mailbox, "node-a", load) as queue:
            for step, batch in queue:
                ...
                session.step(samples=len(batch))

    Args:
        mailbox: a URL, or any object with the verbs of `Mailbox`.
        learner_id: a label for people; by default host, rank and pid.
        log_every: seconds between two writes of the log.
        clock: what time it is, for tests; by default the system's.

    Raises:
        InvalidInputError: the learner id is out of grammar, or `log_every` is not positive.
        MailboxError: the mailbox cannot be opened or cannot hold a queue.
    """

    def __init__(
        self,
        mailbox: str | os.PathLike[str] | Mailbox,
        learner_id: str | None = None,
        *,
        log_every: float = LOG_EVERY,
        clock: Clock | None = None,
        _own: bool = False,
        _instance: str | None = None,
    ) -> None:
        seconds: object = log_every
        if not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_LOG_EVERY:
            bound = f"more than 0 and at most {LONGEST_LOG_EVERY:g} seconds"
            raise InvalidInputError("log_every", log_every, bound, f"pass {LOG_EVERY:g}")
        self.learner_id: str = learner_label(learner_id)
        self.instance: str = _instance or new_instance()
        self.source = mailbox
        self.mailbox: Mailbox = (
            open_mailbox(mailbox, prove=not _own) if not isinstance(mailbox, str) else open_mailbox(mailbox)
        )
        self.clock: Clock = clock or SystemClock()
        self.farewell = FAREWELL
        self.patrol: float | None = None
        self.lock: threading.RLock = threading.RLock()
        self.joined: Joined | None = None
        self._history = History()
        self._rollback: Rollback | None = None
        self._tick: tuple[str, int] | None = None
        self._gave: tuple[str, int] | None = None
        self._last_step = False
        self._book = Book(self.learner_id, self.instance, "main", this_process(), every=log_every)
        self._rolling = Rolling()
        self._untold: deque[Step] = deque()
        self.thread: int = 0
        self.log_every = log_every
        self._implicit = _own
        self.own = _own
        self._stepped = False
        self._sources: dict[str, Source] = {}
        self._finished: set[str] = set()
        self._ended: Left = "early"
        self._entered = self._closed = False
        self.pid: int = os.getpid()
        self._writer: LogWriter | None = None
        self._notice = PreemptionNotice()
        self._pace = Pace()
        self._last: dict[tuple[str, str, int], int] = {}
        self._book.rests, self._book.keep = _own, self._history.keep
        self._told_begun_before = False
        self._allowances: dict[str, Allowance] = {}
        self._units: Counter[str] = Counter()
        self._unbooked: set[str] = set()
        self._passing: list[Step] = []
        self._guard: Guard | None = None
        self._waits = False
        self.lockstep: Together | None = None

    # -- for the user ------------------------------------------------------------------------------------

    def step(self, samples: int = 0, *, global_step: int | None = None) -> None:
        """Every batch handed out so far is trained.

        Args:
            samples: how many samples those batches held, for throughput.
            global_step: the optimizer step, if the loop counts them.

        Raises:
            InvalidInputError: `samples` or `global_step` is not a whole number, or negative.
            ClosedError: the session is not entered.
        """
        samples = check_count("samples", samples)
        global_step = None if global_step is None else check_count("global_step", global_step)
        self._check_open()
        with self.lock:
            first = not self._stepped
            self._stepped, self._implicit = True, False
            self._history.global_step = global_step
            trained = self._train(samples, global_step)
        self._tell()
        if first and not (trained or self._book.batches or self.lockstep):
            self._warn_untracked()

    def state_dict(self) -> dict[str, Any]:
        """What is trained so far, to be saved with the model, and loaded again by `load_state_dict`.

        Small, plain JSON, whatever the number of processes and units. Of an independent learner it is what this one
        trained, beside what its run began from. Where ranks step together it is what all of them trained up to the
        step that this one trained last; for that it waits up to 10 s for the others' logs, so let all ranks call it.
        What cannot be known, because a rank was killed, is warned about and stored as not trained.

        May be called at any time, also in a signal handler. Before the run is joined it is what was loaded.
        """
        self.flush_log()
        with self.lock:
            me = self.learner_id, self.instance
            state = self._history.state(self._book.growing, self._book.samples, me)
            cut, plan = self._book.reached, self._history.plan
        if self.lockstep is not None and cut is not None and plan is not None:
            self.lockstep.complete(state, cut, plan)
        return state.as_dict()

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Go on from what was trained when these states were taken: only what is left is handed out.

        Independent learners load the states that all of them saved; ranks that step together load the same one.

        Args:
            states: what `state_dict` gave, in one run.

        Raises:
            InvalidInputError: one is something else.
            PlanMismatchError, StateMismatchError: they are of different plans or runs. When the run is joined, also:
                the plan is another, or somebody is alive in a run that has nothing to do with them.
            ClosedError: a run is joined already, or a queue has begun to.
        """
        if self.joined is not None or self._sources:
            raise ClosedError(
                "a state is loaded before the first batch is asked for, and before a queue is entered; make a new "
                "Session, load the state, and then iterate"
            )
        union = State.union([State.of(state) for state in states])
        self._history.loaded = None if union.empty else union

    def flush_log(self) -> None:
        """Write the log at once, as far as the mailbox answers within 2 s, for another rank that takes a state."""
        if self._writer is not None:
            self._writer.write_now(FLUSH)

    def track(
        self, loader: Iterable[T], group: object = None, uneven: Literal["repeat", "drop"] = "repeat"
    ) -> Iterator[T]:
        """Yield what `loader` yields, noting what really reached the loop.

        Goes outermost, around whatever moves or prefetches batches. Then a batch counts as handed out when it leaves
        here, not when the queue gave it to the wrapper.

        With a `group`, the ranks of that process group step together (*lockstep*), as DistributedDataParallel needs:
        of N batches each of W ranks gets exactly ceil(N / W); at the last step, who has none left gets its last batch
        again. Every rank must make the call. The job opens a run of its own.

        Args:
            loader: yields items with steps of a shared queue; with a `group`, a `DataLoader` over a
                `SharedQueueDataset`.
            group: a process group of `torch.distributed`, or `torch.distributed.group.WORLD` for all ranks.
            uneven: "repeat", or "drop" to leave out the N mod W last batches: floor(N / W) steps.

        Raises:
            LoadError: an item carries no step of a shared queue.
            InvalidInputError: the number of batches is not known, or too small to be shared out.
            AgreementError: ranks have other settings, another mailbox, or one of them is gone.
        """
        from shardqueue.tracking import dataset_of, datasets_of, steps_in  # only loops that track pay for it

        self._check_open()
        if group is not None:
            yield from dataset_of(loader, self).in_step(self, loader, group, uneven)
            return
        datasets = datasets_of(loader, self)
        for dataset in datasets:
            dataset.check_rest(loader)
        yield from self.walk(loader, datasets)
        for dataset in datasets:
            yield from self._tracked(dataset.rest(self, loader), steps_in)

    def walk(self, loader: Iterable[T], datasets: Sequence[Trackable]) -> Iterator[T]:
        """Yield what a loader yields, whose workers claim for these datasets."""
        from shardqueue.tracking import steps_in

        for key in list(self._sources):
            self._track(key)
        crews = [dataset.begin(self) for dataset in datasets]
        try:
            yield from self._tracked(iter(loader), steps_in)
        except GeneratorExit:
            for crew in crews:
                crew.stop()
            raise
        for crew in crews:
            crew.drained = True

    def _tracked(self, iterator: Iterator[T], steps_in: Callable[[object], list[Step]]) -> Iterator[T]:
        self.asks()
        while True:
            self._notice.away = False
            if self._notice.noticed:
                self.came_back()
            began = self.clock.monotonic()
            try:
                item = next(iterator)
            except StopIteration:
                self.came_back()
                return
            now = self.clock.monotonic()
            self.came_back()
            waited = now - began
            ours = 0
            for step in steps_in(item):
                source = self._track(seat(step.pass_, step.worker))
                self._in_order(step)
                if source is not None:
                    source.took(step, now, self._pace.batch(now))
                if not self.still_ours(step):
                    if source is not None:
                        source.revoke(step)
                    continue
                ours += 1
                self.handed(step, waited)
                waited = 0.0
            self._pace.handed(now)
            if not ours:
                continue
            yield item
            self._pace.asked(self.clock.monotonic())

    def received(self, step: Step, waited: float) -> None:
        """A batch reached the loop past its loader."""
        self._in_order(step)
        self.handed(step, waited)

    def _in_order(self, step: Step) -> None:
        """What is trained of a unit is known by how far it has come."""
        key = step.pass_, step.unit, step.attempt
        last = self._last.get(key)
        if last is not None and step.index != last + 1:
            raise LoadError(
                f"batch {step.index} of unit {step.unit} came after batch {last}: something inside session.track() "
                "reorders or drops batches; do that inside load, or outside track"
            )
        self._last[key] = step.index

    def _track(self, key: str) -> Source | None:
        """From now on only `track` reports what the consumer of this pass has; a wrapper holds what was taken."""
        source = self._sources.get(key)
        if source is None or not source.manned:
            self._warn_begun_before()
        elif not source.tracked:
            source.tracked = True
            with self.lock:
                self._book.unhand(key)
        return source

    def _warn_untracked(self) -> None:
        from shardqueue.tracking import datasets_of_session

        if datasets_of_session(self):
            warnings.warn(
                "session.step() found no batch: what a loader's workers hand out is seen only where the loop goes "
                "through the session; write `for step, batch in session.track(loader)`",
                ShardQueueWarning,
                stacklevel=3,
            )

    def _warn_begun_before(self) -> None:
        if self._told_begun_before:
            return
        self._told_begun_before = True
        warnings.warn(
            "a loader that began before session.track(...) claims on its own: this session can give nothing of it "
            "back; let track() begin the iteration, around a loader that is not iterated yet",
            ShardQueueWarning,
            stacklevel=4,
        )

    @property
    def start(self) -> State | None:
        """The state that was loaded."""
        return self._history.loaded

    @property
    def rates(self) -> Rates:
        """Batches, samples and seconds so far, and how fast."""
        with self.lock:
            now = self.clock.monotonic()
            elapsed = self._rolling.elapsed(now)
            batches, samples = self._rolling.recent(now)
            return Rates(
                batches=self._book.batches,
                samples=self._book.samples,
                elapsed=elapsed,
                waited=self._book.waited,
                samples_per_second=self._book.samples / elapsed if elapsed > 0 else 0.0,
                recent_samples_per_second=samples,
                recent_batches_per_second=batches,
            )

    @property
    def agreed(self) -> Agreed | None:
        """Where ranks step together: what they agreed on for the step whose batch was handed out last, else None.

        `agreed.progress` is what to set a learning rate by: the same on every rank, which a step need not be.
        """
        return None if self.lockstep is None else self.lockstep.agreed

    @property
    def loudness(self) -> int:
        """At which level it is logged that batches are left untrained: ranks that step together all leave at once."""
        return logging.WARNING if self.lockstep is None else logging.INFO

    def units_of(self, pass_: str) -> int:
        """How many units of a pass this learner was the first to claim."""
        with self.lock:
            return self._units[pass_]

    @property
    def run(self) -> str | None:
        """Name of the run, once the first batch was asked for."""
        return None if self.joined is None else self.joined.keys.run

    def __enter__(self) -> Self:
        if self.pid != os.getpid():
            raise ClosedError(
                f"this session was made in process {self.pid}; make one in each training process"
            )
        if self._entered or self._closed:
            raise ClosedError("this session was entered before; make a new Session for another stay")
        self._entered = True
        self.thread = threading.get_ident()
        if not self.own and ENTERED.find(self.learner_id, own=True) is not None:
            warnings.warn(
                f"a queue of learner id {self.learner_id!r} is entered already, without this session: step() will "
                "decide nothing for it; enter the session first: `with session, shared_queue(...) as queue`",
                ShardQueueWarning,
                stacklevel=2,
            )
        ENTERED.add(self)
        self._notice.catch()
        return self

    def replace(self) -> None:
        """Leave, because another queue of this learner begins in this process."""
        for source in list(self._sources.values()):
            source.replace()
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pid != os.getpid() or self._closed:
            return
        if self.lockstep is not None:
            self.lockstep.leave(error)
        farewell_by = self.clock.monotonic() + FAREWELL
        try:
            for source in reversed(list(self._sources.values())):
                source.close(failed=error is not None)
        finally:
            self._closed, self._entered = not self.own, False
            ENTERED.remove(self)
            # What ends a program in order (Ctrl-C, SIGTERM, `sys.exit`) is no error of it.
            self._book.left = "error" if isinstance(error, Exception) else self._ended
            if self._rollback is not None:
                self._rollback.finish()
            if self._writer is not None:
                self._writer.finish(farewell_by)
                self._writer = None
            self._notice.release()
        if error is None:
            self._notice.leave_if_noticed()

    # -- for datasets ------------------------------------------------------------------------------------

    def count_remainder(self) -> None:
        """Another iteration begins: what is in hand counts as trained.

        The loop may have accumulated gradients of it, which its next `step` covers. It must not go to others too.
        """
        with self.lock:
            if self._stepped or self._implicit:
                self._train(0)
        self._tell()

    def adopt(self, instance: str) -> None:
        """Loader workers of this process claim already: be the same learner as they, unless the log has begun."""
        if self.joined is None:
            self.instance = self._book.instance = instance

    def open(
        self,
        plan: Plan,
        run: str | None,
        pass_: str,
        stage: str = "",
        reclaim_after: float | None = None,
    ) -> Joined:
        """Agree on the run before anybody claims in it, and begin the log.

        Raises:
            RunError: the run cannot be joined.
            MailboxError: the mailbox did not answer.
        """
        self._check_open()
        if not stage:
            self._history.plan = plan
        if self.joined is not None:
            check_joined(self.joined, plan, run, stage, reclaim_after)
            return self.joined
        joined = self.find_run(plan, run, pass_, stage, reclaim_after=reclaim_after)
        for notice in joined.notices:
            logger.warning("%s", notice)
        if joined.twin:
            warn_twin(self.learner_id)
        self.enter_run(joined)
        return joined

    def find_run(
        self,
        plan: Plan,
        run: str | None,
        pass_: str = "",
        stage: str = "",
        fresh: bool = False,
        reclaim_after: float | None = None,
    ) -> Joined:
        """Find or open a run, without being in it yet; `fresh`: open the next one in any case.

        Raises:
            RunError: the run cannot be joined.
            MailboxError: the mailbox did not answer.
        """
        machine = Opening(
            plan,
            new_manifest(plan, self.learner_id, self.clock.wall(), stage, reclaim_after, self.start),
            Owner(self.learner_id, self.instance),
            run,
            seen=seen_here,
            random=Random(os.urandom(16)),
            pass_=pass_,
            fresh=fresh,
            stage=stage,
            state=self.start,
        )
        return open_run(machine, self.mailbox, self.clock)

    def enter_run(self, joined: Joined) -> None:
        """Be in this run from now on: the log begins, before anything is claimed."""
        written = threading.Event()
        if not self.attach(joined, written.set):
            written.wait(FIRST_LOG)

    # -- for feeds ---------------------------------------------------------------------------------------

    def source_on(self, key: str) -> Source | None:
        """The source of batches on a seat, if there is one."""
        return self._sources.get(key)

    def allow(self, key: str, allowance: Allowance) -> None:
        """From now on the source on this seat may take so much, whether it has begun or not."""
        self._allowances[key] = allowance
        source = self._sources.get(key)
        if source is not None:
            source.poke()

    def allowance(self, key: str) -> Allowance:
        """How many batches the source on a seat may take, as of now."""
        return self._allowances.get(key, UNLIMITED)

    def admit(self, source: Source, key: str) -> None:
        """A source of batches begins on a seat; an older one of ours is closed."""
        self._check_open()
        older = self._sources.get(key)
        if older is not None:
            older.replace()
        if key in self._finished:
            raise PassFinishedError(
                f"learner {self.learner_id!r} has already iterated {key or 'this pass'} of run {self.run} to "
                "its end; to train the plan again, set another epoch (dataset.set_epoch), or use another mailbox "
                'prefix, or run="a-name"'
            )
        self._sources[key] = source
        if pass_number(key.partition("~")[0]) is not None:
            self._history.plan = source.plan

    def dismiss(self, source: Source, key: str, ended: bool) -> None:
        """A source is over; `ended` because nothing was left to claim."""
        if self._sources.get(key) is source:
            del self._sources[key]
            self._allowances.pop(key, None)
        with self.lock:
            self._book.drop(key)
        self._ended = "end" if ended else "early"
        if ended:
            self._finished.add(key)

    def attach(self, joined: Joined, logged: Callable[[], None]) -> bool:
        """The run is agreed on: the log begins.

        Returns:
            Whether the log is written already; if not, `logged` is called from another thread once it was tried.
        """
        with self.lock:
            if self._writer is None:
                self.joined = self._history.joined = joined
                self._book.run_id, self._book.left = joined.manifest.run_id, None
                writer = LogWriter(self, self.mailbox, joined.keys, self.log_every, self.clock)
                self._writer = writer
                after = joined.manifest.reclaim_after
                if after is not None:
                    keys, clock = joined.keys, self.clock
                    self._guard = Guard(
                        self.learner_id, self.mailbox, keys, after, lambda: writer.landed, clock
                    )
                self._roll_back(joined)
            if self._rollback is not None and not self._rollback.is_over(logged):
                self._writer.start(_nothing)
                return False
            return self._writer.start(logged)

    def _roll_back(self, joined: Joined) -> None:
        """A state that was loaded may be older than what an earlier instance of ours did in this run."""
        state, plan = self.start, self._history.plan
        if state is not None and plan is not None and state.run_id == joined.manifest.run_id:
            owner = Owner(self.learner_id, self.instance)
            self._rollback = Rollback(joined, state, plan, owner, self.mailbox, self.clock)

    def asked(self, pass_: str, claim: Attempt) -> None:
        """An attempt at a unit is about to be asked for."""

    def lost(self, pass_: str, claim: Attempt) -> None:
        """An attempt that was asked for is somebody else's."""

    def claimed(self, pass_: str, claim: Attempt) -> None:
        """An attempt at a unit is ours."""
        with self.lock:
            self._book.claim((pass_, claim.identifier, claim.attempt))
            if self._guard is not None:
                self._guard.claimed((pass_, claim.identifier, claim.attempt))
            self._units[pass_] += claim.attempt == 0

    def cut(self, pass_: str, claim: Attempt) -> None:
        """An attempt of ours ends before its unit."""

    def given(self, pass_: str, claim: Attempt) -> None:
        """What is behind that end can be taken by others."""

    def sized(self, pass_: str, claim: Attempt) -> None:
        """The loader gave the whole unit: its size is known."""

    def released(self, pass_: str, claim: Attempt, whole_at: int | None = None) -> None:
        """An attempt is over: given back, or trained up to the unit's end, its batch `whole_at`."""
        whole_at = None if pass_ in self._unbooked else whole_at
        with self.lock:
            self._book.release((pass_, claim.identifier, claim.attempt), whole_at, self.clock.wall())
            self._last.pop((pass_, claim.identifier, claim.attempt), None)
            if self._guard is not None:
                self._guard.released((pass_, claim.identifier, claim.attempt))
        self._tell_those_who_wait()

    # -- being given up, and giving others up ------------------------------------------------------------

    @property
    def late(self) -> bool:
        """Whether our log is so old that others may soon take us for silent: then nothing is claimed."""
        return self._guard is not None and self._guard.late

    @property
    def landed(self) -> float | None:
        """Until when, by the clock, our log is known to be in the mailbox; None without `reclaim_after`."""
        return None if self._guard is None or self._writer is None else self._writer.landed

    def still_ours(self, step: Step) -> bool:
        """Whether a batch that is about to be handed out is still ours; may read the mailbox.

        Raises:
            MailboxError: it had to be read and could not be.
        """
        if self._guard is None:
            return True
        repeated = self._guard.repeated
        ours = self._guard.owns(step)
        with self.lock:
            self._book.repeated += self._guard.repeated - repeated
        return ours

    def reclaimed(self, attempts: int) -> None:
        """We ended so many attempts of silent learners."""
        with self.lock:
            self._book.reclaimed += attempts

    def waits(self) -> None:
        """Nothing is left to claim; from now on others wait for what our log says."""
        self._waits = True
        self._tell_those_who_wait()

    def _tell_those_who_wait(self) -> None:
        writer = self._writer
        if self._waits and writer is not None and not self._book.held:
            writer.wake()

    # -- for feeds, of what is trained -------------------------------------------------------------------

    def leave_it_to_step(self) -> None:
        """Nothing but `step` makes a batch trained, also before its first call."""
        self._stepped = True

    def unbook(self, pass_: str) -> None:
        """What is done of this pass need not be known later: coming back is enough, and the log is silent on it."""
        self._unbooked.add(pass_)

    def at(self, pass_: str, step: int) -> None:
        """The next batches are handed out for this step of a pass of ranks that step together."""
        self._tick = pass_, step

    def gave(self, pass_: str, step: int, last: bool) -> None:
        """The loop gets all of this step now, which is the pass's last one or not."""
        self._gave, self._last_step = (pass_, step), last

    def handed(self, step: Step, waited: float) -> None:
        """A batch reached the loop, which had waited for it."""
        self._notice.away = True
        if step.pass_ in self._unbooked:
            self._passing.append(step)
            return
        with self.lock:
            at = self._tick
            tick = at[1] if at is not None and at[0] == step.pass_ else None
            self._book.hand(step, waited, self.clock.wall(), tick)

    def waited(self, seconds: float) -> None:
        """The loop waited so long for data, elsewhere than in `track`."""
        with self.lock:
            self._book.waited += seconds

    def asks(self) -> None:
        """The loop asks for a batch; with the first one its clock starts."""
        with self.lock:
            self._rolling.start(self.clock.monotonic())

    def came_back(self) -> None:
        """The loop asks for the next batch, and is done with the one before."""
        forgotten = False
        self._untold += self._passing
        self._passing = []
        with self.lock:
            self._rolling.start(self.clock.monotonic())
            if not self._implicit and not self._stepped and len(self._book.in_hand) >= STEPLESS:
                self._implicit = forgotten = True
            steps = self._train(0) if self._implicit else []
        self._tell()
        if forgotten:
            _warn_stepless(len(steps))
        self._notice.away = False
        self._notice.leave_if_noticed()

    def settle(self, failed: bool, ended: bool) -> None:
        """A feed is being left, at its end or before: decide about the batches still with its consumer.

        With `session.step()` it said what is trained. Without, coming to the end means that the loop's body is done;
        leaving before, by an exception or in a window of accumulated gradients, means that nobody knows.
        """
        with self.lock:
            counts = not failed and (self._implicit or (ended and not self._stepped))
            steps = self._train(0) if counts else []
            forgotten = bool(steps) and not self._implicit
            left = self._book.in_hand if (ended or not self._stepped) and not failed else []
        self._tell()
        if forgotten:
            _warn_stepless(len(steps))
        if left:
            _warn_unstepped(left)

    def in_hand(self, key: str) -> list[Step]:
        """Batches of a seat that are with the consumer and not known to be trained."""
        with self.lock:
            return [step for step in self._book.in_hand if seat(step.pass_, step.worker) == key]

    def taken(self) -> tuple[int, int, float, float] | None:
        """What a loop behind a loader took; a session's feeds see their consumer themselves."""
        return None

    def over(self) -> str:
        """Why a feed must end though its consumer has not left it; never here."""
        return ""

    def quiet(self, ended: bool, yielded: bool, promised: int) -> None:
        """A feed claims no more."""

    @property
    def counts_coming_back(self) -> bool:
        """Whether what is in hand may be trained though nobody said so, and must not be offered again."""
        return self._implicit and self._guard is None

    def pages(self) -> list[LogPage]:
        """The log's pages that have to be written now, the current one last."""
        with self.lock:
            now = self.clock.monotonic()
            return self._book.pages(
                self.clock.wall(), self._rolling.elapsed(now), self._rolling.recent(now)[1]
            )

    def wrote(self, page: LogPage, clear: bool) -> None:
        """The page was written, or it is not clear whether it was."""
        with self.lock:
            self._book.wrote(page, clear)

    def landed_after(self, gap: float) -> None:
        """A page is written, `gap` seconds newer than what was known to be written before."""
        with self.lock:
            if self._guard is not None:
                self._guard.landed_after(gap, self._book.held)

    # -- inside ------------------------------------------------------------------------------------------

    def _train(self, samples: int, global_step: int | None = None) -> list[Step]:
        """What is in hand is trained; to be told to the feeds once the lock is released.

        A feed holds its own lock while it reports to the session, so the session never calls one under its lock.
        """
        steps = self._book.train(samples, self.clock.wall(), global_step)
        if self._gave is not None:
            self._book.reached = self._gave
            if self._last_step:
                self._history.over.add(self._gave[0])
        self._untold += steps
        self._rolling.add(self.clock.monotonic(), len(steps), samples)
        return steps

    def _tell(self) -> None:
        while self._untold:  # what a signal interrupts here is told when the feed is left
            step = self._untold[0]
            source = self._sources.get(seat(step.pass_, step.worker))
            if source is not None:
                source.trained(step)
            self._untold.popleft()

    def _check_open(self) -> None:
        if self.pid != os.getpid():
            raise ClosedError(
                f"this session belongs to process {self.pid}; make one in each training process"
            )
        if not self._entered or self._closed:
            raise ClosedError("this session is not entered; use it in a `with` block")


def _nothing() -> None:
    """Nobody waits for it."""


def warn_twin(learner: str) -> None:
    """Say that two live learners have one label."""
    warnings.warn(
        f"learner id {learner!r} is live twice; both work, and their logs stay apart, but reports will show one "
        "name for two: give each training process its own learner_id",
        ShardQueueWarning,
        stacklevel=4,
    )


def _warn_stepless(batches: int) -> None:
    warnings.warn(
        f"session.step() was never called for {batches} batches: taking each as trained when the loop comes back; "
        "call session.step(samples=...) after each optimizer step",
        ShardQueueWarning,
        stacklevel=4,
    )


def _warn_unstepped(left: list[Step]) -> None:
    names = ", ".join(sorted({step.unit for step in left})[:8])
    warnings.warn(
        f"{len(left)} batches (of {names}) were handed out and never followed by session.step(): they count as not "
        "trained, and were given back; call it after the last optimizer step, before leaving the queue",
        ShardQueueWarning,
        stacklevel=4,
    )
