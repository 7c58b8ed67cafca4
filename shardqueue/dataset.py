"""`SharedQueueDataset`: the shared queue as the dataset of any `DataLoader(batch_size=None)`.

The loader's worker processes claim and load, in the name of the training process; without workers a thread of the
training process does. An object belongs to the process that made it, or first used it after it was pickled there; its
workers share a `Block` and a `Pipe` with that process. Iterating begins at the first item, not before.

A pass is one trip over the plan: the epoch that `set_epoch` said last, or else the next one at each iteration. Where
`Session.track` iterates the loader, the session decides which pass and which run it is before the workers start.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import sys
from contextlib import contextmanager
from itertools import count
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
from msgspec.structs import replace
from torch.utils.data import IterableDataset, get_worker_info

from shardqueue.agreement import world_size
from shardqueue.block import WORDS, WORKERS, Block, Doing, Pipe, iteration_key, pass_of
from shardqueue.crew import Crew
from shardqueue.entered import find_session, warn_of_another_session
from shardqueue.errors import ClosedError, InvalidInputError
from shardqueue.feed import Feed
from shardqueue.guard import check_log_pause, check_reclaim_after, log_pause
from shardqueue.host import Place
from shardqueue.learner import LOG_EVERY, TAIL, learner_label, new_instance
from shardqueue.loading import check_load
from shardqueue.lockstep import lockstep_of
from shardqueue.mailbox import open_mailbox
from shardqueue.plan import Plan, check_identifier
from shardqueue.records import Manifest, RunKeys, pass_name
from shardqueue.remaining import remaining
from shardqueue.rows import RowBatches, check_rows
from shardqueue.run import Joined, new_manifest
from shardqueue.session import Session
from shardqueue.supply import as_item, plain_loader
from shardqueue.tracking import register
from shardqueue.units import check_count, check_flag, check_int, unit_ranges
from shardqueue.workers import LoaderWorker, finished_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from multiprocessing.connection import Connection

    from torch.utils.data._utils.worker import WorkerInfo

    from shardqueue.loading import Load
    from shardqueue.mailbox import Mailbox
    from shardqueue.source import Source

PREFETCH = 8
"""Loaded batches that may wait where the loader has no workers; with workers its `prefetch_factor` says."""


UNTRACKED = (
    "no session tracks this loader: what is trained is not recorded, so nothing of it can be recovered or resumed; "
    "iterate session.track(loader) in an entered Session"
)

logger = logging.getLogger("shardqueue")


class SharedQueueDataset(IterableDataset[Any]):
    """The batches of the units that this training process claims.

        dataset = SharedQueueDataset(units, "s3://bucket/prefix", load)
        loader = DataLoader(dataset, batch_size=None, num_workers=4)
        with Session("s3://bucket/prefix") as session:
            for step, batch in session.track(loader):
                ...
                session.step(samples=len(batch))

    Yields `(step, batch)` as `load` yields them, the step an int that knows its unit (`Step`). `session.track` makes
    batches count as trained when `session.step` says so; without a session, what the workers handed out is never
    offered again. The loader has no length: how many batches a process gets depends on its speed.

    Where ranks step together, as in DistributedDataParallel, iterate `session.track(loader, group=...)`.

    Args:
        units: the plan, a mapping from identifier to what `load` is given.
        mailbox: a path, a URL, a `Mailbox` or any object with its verbs; no `memory://` where the loader has workers.
        load: called with a unit's value, yields `(step, batch)`. Picklable where workers are spawned.
        learner_id: a label for this training process; None for host, rank and pid.
        run: a name, to join that run whatever its state.
        batches: how many batches all units have together, where the units do not say and ranks step together.
        independent: the ranks of this process group do not step together, so each may have another number of batches.
        reclaim_after: seconds, from 1 and at least three times the session's `log_every`: `Session.track` goes on
            until every batch is trained, and what a learner holds that was silent for so long is handed out again,
            each batch at least once. The same for all learners of a run; not where ranks step together. None: what a
            dead learner held is lost, each batch at most once.

    Raises:
        InvalidInputError: an argument is out of range or grammar.
        MailboxError: the mailbox cannot be opened.
    """

    learner_id: str

    def __init__(
        self,
        units: Mapping[str, object],
        mailbox: str | os.PathLike[str] | Mailbox,
        load: Load,
        learner_id: str | None = None,
        run: str | None = None,
        *,
        batches: int | None = None,
        independent: bool = False,
        reclaim_after: float | None = None,
    ) -> None:
        check_load(load)
        self._begin_life(Plan(units), mailbox, learner_id, run, independent, reclaim_after)
        self._load: Load | RowBatches = load
        self._batches: int | None = self._check_batches(batches)

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        mailbox: str | os.PathLike[str] | Mailbox,
        batch_size: int,
        unit_batches: int = 16,
        shuffle: bool = False,
        seed: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        *,
        drop_last: bool = False,
        with_step: bool = False,
        taper: int | bool = 64,
        learner_id: str | None = None,
        run: str | None = None,
        independent: bool = False,
        reclaim_after: float | None = None,
    ) -> SharedQueueDataset:
        """Share out the batches of a map-style dataset.

        Each batch is what `DataLoader(dataset, batch_size, shuffle, drop_last=..., collate_fn=...)` would make of the
        same rows. Shuffled, the order of an epoch is a permutation that depends on the number of rows, `seed` and the
        epoch alone; it is computed, never stored. Every node must pass the same `seed` and `shuffle`.

        Args:
            dataset: has a length and `__getitem__`, or `__getitems__`, which is then given a batch's rows at once.
            mailbox: as above.
            batch_size: rows of a batch; the last of an epoch may have fewer.
            unit_batches: batches claimed at once, at most; fewer towards the end of an epoch.
            shuffle: whether each epoch has an order of its own.
            seed: of the shuffle, from 0 to 2**63 - 1.
            collate_fn: makes a batch of a list of rows; None for torch's `default_collate`.
            drop_last: leave out the last batch if it is short.
            with_step: yield `(step, batch)`, which `Session.track` needs, instead of the batch alone.
            taper: the number of learners that the end of an epoch is cut for; False for units of one size.
            learner_id, run, independent, reclaim_after: as above.

        Raises:
            InvalidInputError: the dataset has no length or no rows, or an argument is out of range.
            MailboxError: the mailbox cannot be opened.
        """
        rows = check_rows(dataset)
        batch_size = check_int("batch_size", batch_size, 1)
        unit_batches = check_int("unit_batches", unit_batches, 1, 2**53 // batch_size)
        for name, flag in (("shuffle", shuffle), ("drop_last", drop_last), ("with_step", with_step)):
            check_flag(name, flag)
        if collate_fn is not None and not callable(collate_fn):
            raise InvalidInputError("collate_fn", collate_fn, "callable or None", "pass a function")
        if drop_last:
            rows -= rows % batch_size
            if not rows:
                remedy = "pass drop_last=False or a smaller batch_size"
                raise InvalidInputError("batch_size", batch_size, f"at most {len(dataset)}, the rows", remedy)
        batches = RowBatches(dataset, rows, batch_size, shuffle, seed, collate_fn)
        units = unit_ranges(rows, unit_batches * batch_size, batch_size, taper)
        self = cls.__new__(cls)
        agreed = {"shuffle": shuffle, "seed": seed if shuffle else None}
        self._begin_life(Plan(units, agreed=agreed), mailbox, learner_id, run, independent, reclaim_after)
        self._load, self._with_step, self._batches = batches, with_step, batches.steps
        return self

    def _begin_life(
        self,
        plan: Plan,
        mailbox: str | os.PathLike[str] | Mailbox,
        learner_id: str | None,
        run: str | None,
        independent: bool,
        reclaim_after: float | None,
    ) -> None:
        if run is not None:
            check_identifier(run, "run", folders=False)
        self.stage = ""
        self._independent, self._together, self._ranks = independent, False, 1
        self._reclaim_after = check_reclaim_after(reclaim_after)
        self._plan, self._run = plan, run
        self._given_id, self.learner_id = learner_id, learner_label(learner_id)
        self._mailbox = open_mailbox(mailbox)
        self._with_step = True
        self._move_in()

    def _check_batches(self, batches: int | None) -> int | None:
        if batches is None:
            return None
        total = self._plan.total
        if total not in (None, check_int("batches", batches, 1)):
            bound = f"{total}, which is what the units say"
            raise InvalidInputError("batches", batches, bound, "leave it out")
        return batches

    def _move_in(self) -> None:
        """This process is the training process now, and knows nothing of what another one did."""
        self.learner_id = learner_label(self._given_id)
        memory: Any = torch.zeros(WORDS, dtype=torch.int64, device="cpu")
        self._memory = memory.share_memory_()
        self._ends: tuple[Connection, Connection] = multiprocessing.Pipe(duplex=False)
        self._connect()
        self._block.own(new_instance())
        self._own_session: Session | None = None
        self._source: Source | None = None
        self._rest: Feed | None = None
        self._joined_run: str | None = None
        self._joined_state: dict[str, Any] | None = None
        self._iterations = count()
        register(self)

    def _connect(self) -> None:
        self._block = Block(memoryview(self._memory.numpy()))
        self._pipe = Pipe(*self._ends)

    # -- in the training process -------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch `epoch`, from 0: units of its own, and an order of its own where shuffled.

        Call it before each epoch, or never: then iterations are counted.

        Raises:
            InvalidInputError: it is not a whole number from 0 to 2,000,000.
        """
        self._be_home()
        self._block.epoch = check_int("epoch", check_count("epoch", epoch), 0, 2_000_000)

    @property
    def plan(self) -> Plan:
        """The units."""
        return self._plan

    @property
    def with_step(self) -> bool:
        """Whether items are (step, batch), rather than the batch alone."""
        return self._with_step

    @property
    def steps(self) -> int:
        """Dataset steps of a pass: batches over the number of lanes; batches where the units do not say."""
        return self.batches or 0 if self._plan.total is None else round(self._plan.steps)

    @property
    def batches(self) -> int | None:
        """How many batches a pass has, on all ranks; None where nobody knows."""
        if self._batches is None:
            self._batches = self._plan.total
        return self._batches

    @property
    def next_pass(self) -> int:
        """The number of the pass that would be iterated next."""
        self._be_home()
        return pass_of(self._block.next_word(0))

    def start_from(self, session: Session) -> None:
        """Passes that are counted begin with the first one of which the state that was loaded has something left."""
        if session.start is not None and session.joined is None and not self.stage:
            self._be_home()
            self._block.start_at(session.start.first_pass(self._plan))

    def pass_over(self) -> None:
        """Nothing is left of the pass that would be iterated next."""
        word = self._block.next_word(iteration_key(self._block.instance, next(self._iterations)))
        self._block.begin(word)
        self._block.finish(word)

    def trained_before(self, session: Session, number: int) -> int:
        """How many batches of a pass were trained before the run; all of them, where it was over."""
        start = session.start if session.joined is None else session.joined.start
        trained = None if start is None else start.passes.get(self.pass_name(number))
        if trained is None or self.batches is None:
            return 0
        left = remaining(self._plan, trained)
        known = trained.batches if left.total is None else (self._plan.total or 0) - left.total
        return known if len(left) else self.batches

    def pass_name(self, number: int) -> str:
        """The name of a pass of this dataset."""
        return pass_name(number, self.stage)

    def load_of(self, number: int) -> Load:
        """What reads a unit in a pass."""
        return self._load.loader(number) if isinstance(self._load, RowBatches) else self._load

    def belongs_to(self, session: Session) -> bool:
        """Whether this is the session's learner, and its mailbox."""
        self._be_home()
        return session.learner_id == self.learner_id and session.mailbox == self._mailbox

    def begin(self, session: Session) -> Crew:
        """The session is about to iterate a loader of this dataset: agree on the pass and the run.

        Raises:
            PassFinishedError: the session has iterated this epoch to its end.
            RunError: the run cannot be joined.
        """
        self._be_home()
        self._refuse_ranks()
        check_log_pause(session.log_every, self._reclaim_after)
        session.count_remainder()
        self._leave(failed=False)
        self.start_from(session)
        word = self._block.next_word(iteration_key(session.instance, next(self._iterations)))
        name = self.pass_name(pass_of(word))
        if any(doing is Doing.CLAIMING for _, _, doing in self._block.workers(self._block.current)):
            session.adopt(self._block.instance)
        first = session.joined is None
        run = self._run or self._block.run
        joined = session.open(self._plan, run, name, self.stage, self._reclaim_after)
        self._block.name(session.instance)
        self._block.run = self._joined_run = joined.keys.run
        self._joined_state = joined.manifest.state
        crew = Crew(joined.left(self._plan, name), session, self._block, self._pipe, word, name)
        session.admit(crew, name)
        crew.poke()
        self._source = crew
        self._block.landed = None  # until the crew tells it
        self._block.expect(word, fresh=first and not joined.late)
        return crew

    def check_rest(self, loader: object) -> None:
        """Refuse a loader of which nobody knows what it would make of `rest`.

        Raises:
            InvalidInputError: with `reclaim_after`, it is no plain `DataLoader`, nor one in a progress bar.
        """
        if self._reclaim_after is not None and plain_loader(loader) is None:
            bound = (
                "the DataLoader itself where reclaim_after is given: at the end batches come past its workers"
            )
            raise InvalidInputError(
                "loader", loader, bound, "wrap what track gives instead of what it is given"
            )

    def rest(self, session: Session, loader: object) -> Iterator[Any]:
        """What is left of the pass when the loader has ended: what was given back or is others', once they are gone.

        A loader's workers never wait for others, since a loader takes from each in turn; this process does.
        """
        if self._reclaim_after is None:
            return
        number = pass_of(self._block.current)
        place = Place(
            pass_=self.pass_name(number),
            worker=TAIL,
            stage=self.stage,
            reclaim_after=self._reclaim_after,
        )
        feed = self._rest = Feed(self._plan, session, self.load_of(number), PREFETCH, None, place)
        feed.tracked = True
        feed.start()
        for pair in self._items(feed):
            yield as_item(plain_loader(loader), pair)

    def in_step(self, session: Session, loader: Iterable[Any], group: Any, uneven: str) -> Iterator[Any]:
        """The items of the loader, as many on each rank of the group; see `Session.track`.

        Raises:
            InvalidInputError: it is to hand out the units of a silent learner again, which ends ranks that step
                together.
        """
        self.refuse_to_reclaim()
        yield from lockstep_of(session, group).train(self, loader, uneven=uneven)

    def refuse_to_reclaim(self) -> None:
        """Ranks that step together end where one is gone.

        Raises:
            InvalidInputError: the units of a silent learner are to be handed out again.
        """
        if self._reclaim_after is not None:
            remedy = (
                "leave it out: a rank that is gone ends the others, and the job goes on from its last state"
            )
            raise InvalidInputError(
                "reclaim_after", self._reclaim_after, "None where ranks step together", remedy
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """While ranks step together, they may iterate."""
        self._together = True
        try:
            yield
        finally:
            self._together = False

    def _refuse_ranks(self) -> None:
        """Ranks that step together without our knowing would wait for each other at the end, for ever."""
        ranks = max(self._ranks, world_size())
        if ranks > 1 and not (self._together or self._independent):
            raise InvalidInputError(
                "world_size",
                ranks,
                "1 for a DataLoader over SharedQueueDataset: ranks get as many batches as they are fast, so "
                "DistributedDataParallel would hang at the end",
                "use shardqueue.lightning.SharedQueueDataModule, or iterate session.track(loader, group=...); pass "
                "independent=True if these ranks do not step together",
            )

    def _be_home(self) -> None:
        if self._block.owner != os.getpid() and get_worker_info() is None:
            self._move_in()

    def _leave(self, failed: bool, source: Source | None = None) -> None:
        """End the iteration in progress, if there is one; if `source` is given, only when it is that one."""
        current = self._source
        if current is None or source not in (None, current):
            return
        self._source = None
        rest, self._rest = self._rest, None
        try:
            if rest is not None:
                rest.close(failed)
            current.close(failed)
        finally:
            if self._own_session is not None:
                self._own_session.__exit__(None, None, None)

    def __iter__(self) -> Iterator[Any]:
        """Claim and load until nothing is left to claim.

        Raises:
            InvalidInputError: the loader batches by itself; pass it `batch_size=None`.
            PassFinishedError, RunError, MailboxError, LoadError: at the first item, or later.
        """
        _refuse_batching()
        info = get_worker_info()
        return self._items_of_process() if info is None else self._items_of_worker(info)

    def _items_of_process(self) -> Iterator[Any]:
        self._refuse_ranks()
        self._be_home()
        entered = find_session(self.learner_id, own=False)
        if entered is not None:
            entered.count_remainder()
            self.start_from(entered)
        self._leave(failed=False)
        word = self._block.next_word(iteration_key(self._block.instance, next(self._iterations)))
        if self._block.finished_before(word):
            raise finished_pass(self.learner_id, pass_of(word))
        self._block.begin(word)
        session = self._session()
        check_log_pause(session.log_every, self._reclaim_after)
        place = Place(
            pass_=self.pass_name(pass_of(word)),
            stage=self.stage,
            reclaim_after=self._reclaim_after,
        )
        run = self._run or (None if session.joined else self._block.run)
        feed = Feed(self._plan, session, self.load_of(pass_of(word)), PREFETCH, run, place)
        feed.tracked = self._together
        self._source = feed
        failed = True
        try:
            feed.start()
            yield from self._items(feed)
            failed = False
            self._block.finish(word)
        finally:
            # In a forked child the feed and its locks are somebody else's.
            if self._block.owner == os.getpid():
                if session.run is not None:
                    self._block.run = session.run
                if session is self._own_session:
                    self._leave(failed, feed)
                elif failed:
                    feed.stop()

    def _session(self) -> Session:
        """The entered session of this learner, or one of our own."""
        session = find_session(self.learner_id, own=False)
        if session is None:
            warn_of_another_session(self.learner_id)
            if self._own_session is None:
                self._own_session = Session(
                    self._mailbox,
                    self.learner_id,
                    log_every=log_pause(LOG_EVERY, self._reclaim_after),
                    _own=True,
                    _instance=self._block.instance,
                )
            return self._own_session.__enter__()
        if session.mailbox != self._mailbox:
            bound = f"the mailbox of the entered session of {self.learner_id!r}"
            remedy = "give the dataset and the session the same mailbox, or different learner ids"
            raise InvalidInputError("mailbox", self._mailbox, bound, remedy)
        return session

    def _items(self, feed: Feed) -> Iterator[Any]:
        process = os.getpid()
        while True:
            if os.getpid() != process:
                raise ClosedError(
                    f"this iteration belongs to process {process}; iterate the dataset anew in each process"
                )
            try:
                step, batch = feed.take()
            except StopIteration:
                return
            yield (step, batch) if self._with_step else batch

    # -- in a worker -------------------------------------------------------------------------------------

    def _items_of_worker(self, info: WorkerInfo) -> Iterator[Any]:
        """Where iterations begin, and number themselves, in each worker alike."""
        gc.freeze()  # what was inherited is not ours to finalise, such as a process group without its threads
        key = iteration_key(info.seed - info.id, next(self._iterations))
        return self._work(info, key)

    def _work(self, info: WorkerInfo, key: int) -> Iterator[Any]:
        self._refuse_ranks()
        self._check_worker(info)
        mailbox = open_mailbox(self._mailbox, prove=False)
        worker = LoaderWorker(
            *(self._block, self._pipe, mailbox, self.learner_id, info.id, info.num_workers, key, self.stage),
            reclaim_after=self._reclaim_after,
        )
        if self._together:  # others may have had all there was
            worker.loudness = logging.INFO
        if self._reclaim_after is not None and not worker.tracked:
            raise InvalidInputError(
                "reclaim_after",
                self._reclaim_after,
                "None where no session tracks the loader, so that nobody knows what is trained",
                "iterate session.track(loader) in an entered Session",
            )
        place = Place(
            pass_=worker.pass_,
            worker=str(info.id),
            part=info.id,
            parts=info.num_workers,
            inline=True,
            offers=not worker.tracked,
            fresh=self._block.fresh,
            stage=self.stage,
            reclaim_after=self._reclaim_after,
        )
        if not (worker.tracked or info.id or worker.pass_):
            logger.warning("%s: %s", self.learner_id, UNTRACKED)
        run = self._run or self._block.run
        if worker.tracked and run is None:
            # By name, for which the block has no room; no worker is older than the run.
            run = self._joined_run
        if worker.tracked and run is not None:
            worker.joined = self._agreed_on(RunKeys(run), worker)
        feed = Feed(self._plan, worker, self.load_of(pass_of(worker.word)), 1, run, place)
        failed = True
        try:
            feed.start()
            yield from self._items(feed)
            failed = False
        finally:
            feed.close(failed)

    def _agreed_on(self, keys: RunKeys, worker: LoaderWorker) -> Joined:
        """The run that the training process is in, which has checked it."""
        state = self._joined_state
        if keys.run != self._joined_run:  # this worker is older than the run
            data = worker.mailbox.get(keys.manifest)
            state = None if data is None else Manifest.decode(data, keys.manifest).state
        wall, after = worker.clock.wall(), self._reclaim_after
        manifest = new_manifest(self._plan, self.learner_id, wall, self.stage, after)
        return Joined(keys, replace(manifest, state=state))

    def _check_worker(self, info: WorkerInfo) -> None:
        if info.num_workers > WORKERS:
            raise InvalidInputError("num_workers", info.num_workers, f"at most {WORKERS}", "pass fewer")
        parent = multiprocessing.parent_process()
        if parent is None or parent.pid != self._block.owner:
            raise ClosedError(
                f"this dataset was made in process {self._block.owner}, and the loader's process never used it "
                "itself; make the dataset in the process that iterates the loader"
            )

    # -- pickling ----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self._be_home()
        state = self.__dict__.copy()
        for name in ("_block", "_pipe", "_own_session", "_source", "_iterations"):
            del state[name]
        if get_spawning_popen() is None:
            del state["_memory"], state["_ends"]
        else:
            state["_ranks"] = world_size()
            _check_picklable("load", self._load)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_memory" not in state:
            self._move_in()
            return
        self._own_session, self._source, self._iterations = None, None, count()
        self._connect()
        register(self)


def _refuse_batching() -> None:
    """Refuse a loader that would make batches of our batches; nothing but its own frames tells."""
    if sys._getframe(2).f_locals.get("auto_collation") is True:
        raise InvalidInputError(
            "batch_size",
            "set on the DataLoader",
            "None there, since the dataset yields whole batches",
            "write DataLoader(dataset, batch_size=None, ...)",
        )


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


class _Trial(ForkingPickler):
    """Pickles to nowhere, without what is large and known to pickle."""

    def reducer_override(self, thing: object) -> Any:
        if isinstance(thing, torch.Tensor) or type(thing).__module__ == "numpy":
            return int, ()
        return NotImplemented


def _check_picklable(name: str, thing: object) -> None:
    try:
        _Trial(cast("BinaryIO", _Nowhere()), pickle.HIGHEST_PROTOCOL).dump(thing)
    except Exception as error:
        raise InvalidInputError(
            name,
            thing,
            f"picklable where the loader spawns its workers ({error})",
            'define it at the top of a module, or pass the DataLoader multiprocessing_context="fork"',
        ) from error
