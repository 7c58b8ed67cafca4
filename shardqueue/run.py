"""Which run a learner joins: one training from one start, one folder under the prefix.

The first run lives at the prefix itself, later ones under `run-2/`, `run-3/`; creating its manifest opens a run.
An independent learner joins the newest run if somebody in it is alive or nothing in it is claimed. A finished run
(somebody left because nothing was left to claim) is an error that names the remedies; one that broke off (nobody
did, and nobody is alive) is followed by the next, and that is said. A named run is always joined.

A learner that loaded a state joins the newest run if that began from the same one, or it was taken there and somebody
is alive; otherwise it opens the next, which begins from it. The manifest carries the state, so who joins needs none.

`decide` is the policy, `Opening` asks the mailbox what the policy needs to know, without I/O of its own. A claim
is never asked for before the run is agreed on, so a mistaken start leaves nothing in somebody else's run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from typing import TYPE_CHECKING

from shardqueue.asks import PATIENCE, Asks
from shardqueue.errors import PlanMismatchError, RunError, RunFinishedError, StateMismatchError
from shardqueue.learner import SILENCE, Life, judge
from shardqueue.mailbox.calls import Get, List, PutIfAbsent
from shardqueue.records import PROTOCOL, RUNS, Manifest, RunKeys
from shardqueue.remaining import remaining
from shardqueue.state import State
from shardqueue.watching import Silence, Watched

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from shardqueue.asks import Ask
    from shardqueue.claim import Owner
    from shardqueue.mailbox.calls import Answer, Call
    from shardqueue.plan import Plan
    from shardqueue.records import Process

LOOK_SOON, LOOK_EVERY = 0.02, 1.0
"""Seconds between two looks at a log that may or may not change: at first, and at most."""
TRAIN = "train"
"""The name of the training plan in a manifest."""


class Next(Enum):
    """What a learner does about the newest run."""

    JOIN = "join"
    WAIT = "wait"
    OPEN_NEXT = "open the next"
    FINISHED = "finished"
    REFUSE = "refuse"


def decide(
    lives: list[Life],
    anything_claimed: bool,
    somebody_ended: bool,
    loaded: bool = False,
    belongs: bool = True,
) -> Next:
    """Say what an independent learner does about the newest run.

    Args:
        lives: one for each process of the run's learners that keeps a log.
        anything_claimed: whether any unit of it is claimed.
        somebody_ended: whether a learner left because nothing was left to claim.
        loaded: whether the learner has loaded a state.
        belongs: whether that state belongs to the run: it was taken in it, or the run began from it.
    """
    if Life.ALIVE in lives:
        return Next.JOIN if belongs else Next.REFUSE
    if belongs and not anything_claimed:
        return Next.JOIN
    if Life.UNSURE in lives:
        return Next.WAIT
    return Next.FINISHED if somebody_ended and not loaded else Next.OPEN_NEXT


@dataclass(frozen=True)
class Joined:
    """A run that is agreed on.

    Attributes:
        keys: where it lives.
        manifest: what it was opened with.
        peers: (learner, instance) of those who were there before us.
        late: somebody has claimed before us.
        twin: another live learner has our label.
        together: its learners step together, and agree on every plan before they begin on it.
        notices: what the user should be told.
    """

    keys: RunKeys
    manifest: Manifest
    peers: frozenset[tuple[str, str]] = frozenset()
    late: bool = False
    twin: bool = False
    notices: tuple[str, ...] = ()
    together: bool = False

    @cached_property
    def start(self) -> State | None:
        """The state that the run began from."""
        return None if self.manifest.state is None else State.of(self.manifest.state)

    def left(self, plan: Plan, pass_: str) -> Plan:
        """What the run has to do of a pass."""
        return plan if self.start is None else remaining(plan, self.start.passes.get(pass_))


@dataclass(slots=True)
class _Look:
    """What is known of one run."""

    keys: RunKeys
    unanswered: int = 0
    pause: float = LOOK_SOON
    silence: Silence = field(default_factory=Silence)
    manifest: Manifest | None = None
    manifest_read: int = 0
    units_claimed: bool = False
    pass_claimed: bool = False
    processes: dict[tuple[str, str, str], Watched] = field(default_factory=dict)

    @property
    def anything_claimed(self) -> bool:
        pages = [watched.page for watched in self.processes.values()]
        return self.units_claimed or any(page is not None and page.totals.claimed > 0 for page in pages)

    @property
    def learners(self) -> frozenset[tuple[str, str]]:
        """(learner, instance) of everybody who has a log."""
        return frozenset(process[:2] for process in self.processes)


class Opening:
    """Finds or opens the run of one learner.

    Poll and report as with any machine (`asks`); it is over when `joined` is set, or `asks.error`.

    Args:
        plan: what the run hands out.
        manifest: what to create where a run must be opened.
        owner: who we are.
        wanted: the name of a run to join whatever its state, or None.
        seen: tells whether a process is seen on this machine.
        random: for the pauses between repeated calls.
        pass_: the pass that is joined.
        fresh: open the next run in any case, as a job does whose ranks step together.
        stage: the plan's name in the manifest, TRAIN if it has none.
        state: what was loaded to go on from, as is `manifest.state`.
    """

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        owner: Owner,
        wanted: str | None,
        *,
        seen: Callable[[Process], bool | None],
        random: Random,
        patience: float = PATIENCE,
        pass_: str = "",
        fresh: bool = False,
        stage: str = "",
        state: State | None = None,
    ) -> None:
        self.asks = Asks(random, patience)
        self.joined: Joined | None = None
        self._plan, self._manifest, self._owner, self._wanted = plan, manifest, owner, wanted
        self._seen, self._pass = seen, pass_
        self._fresh, self._stage, self._state = fresh, stage, state
        self._notices: list[str] = []
        self._look: _Look | None = None
        self._first = RunKeys(wanted or "1")

    def poll(self, now: float) -> list[Ask]:
        """Return the calls to make now."""
        if self._look is None and self.asks.error is None:
            self._start()
        return self.asks.poll(now)

    def wake(self, now: float) -> float | None:  # noqa: ARG002
        """When to poll again if nothing happens before."""
        return self.asks.wake()

    # -- looking -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Everything that a fresh prefix and a running one need, at once."""
        if self._state is not None:
            check_state(self._state, self._plan, self._stage)
        look = self._look_at(self._first)
        self._ask(look, PutIfAbsent(look.keys.manifest, self._manifest.encode()), self._created)
        self._ask(look, Get(look.keys.manifest), self._read_manifest)
        if self._wanted is None:
            self._ask(look, List(RUNS), self._listed_runs)

    def _look_at(self, keys: RunKeys) -> _Look:
        look = self._look = _Look(keys)
        self._ask(look, List(keys.learners), self._listed_learners)
        self._ask(look, List(keys.pass_keys().units, "", 1), self._listed_units)
        if self._pass:
            self._ask(look, List(keys.pass_keys(self._pass).units, "", 1), self._listed_pass)
        return look

    def _ask(self, look: _Look, call: Call, then: Callable[[_Look, Answer, float], None]) -> None:
        look.unanswered += 1
        self.asks.ask(call, partial(self._answered, look, then))

    def _answered(
        self, look: _Look, then: Callable[[_Look, Answer, float], None], answer: Answer, now: float
    ) -> None:
        look.unanswered -= 1
        then(look, answer, now)
        if look is self._look and not look.unanswered and self.joined is None and self.asks.error is None:
            self._consider(look, now)

    def _created(self, look: _Look, answer: Answer, now: float) -> None:  # noqa: ARG002
        if answer is True:
            look.manifest = self._manifest

    def _read_manifest(self, look: _Look, answer: Answer, now: float) -> None:  # noqa: ARG002
        if isinstance(answer, bytes) and look.manifest is not self._manifest:
            found = Manifest.decode(answer, look.keys.manifest)
            look.manifest = self._manifest if found == self._manifest else found
        look.manifest_read += 1

    def _listed_runs(self, look: _Look, answer: Answer, now: float) -> None:  # noqa: ARG002
        assert isinstance(answer, list)
        names = [key.removeprefix(RUNS).removesuffix(".json") for key in answer]
        newest = max((int(name) for name in names if is_number(name)), default=1)
        if newest > int(look.keys.run):
            newer = self._look_at(RunKeys(str(newest)))
            self._ask(newer, Get(newer.keys.manifest), self._read_manifest)

    def _listed_units(self, look: _Look, answer: Answer, now: float) -> None:  # noqa: ARG002
        look.units_claimed = bool(answer)

    def _listed_pass(self, look: _Look, answer: Answer, now: float) -> None:  # noqa: ARG002
        look.pass_claimed = bool(answer)

    def _listed_learners(self, look: _Look, answer: Answer, now: float) -> None:
        assert isinstance(answer, list)
        look.silence.looked(now)
        for key in answer:
            parsed = look.keys.parse_log(key)
            if parsed is not None:
                watched = look.processes.setdefault(parsed[:3], Watched())
                watched.key = key
        for (learner, instance, _), watched in look.processes.items():
            others = self._wanted is None or learner == self._owner.learner
            if others and instance != self._owner.instance:
                self._ask(look, Get(watched.key), partial(self._read_log, watched))

    def _read_log(self, watched: Watched, look: _Look, answer: Answer, now: float) -> None:  # noqa: ARG002
        if isinstance(answer, bytes):
            watched.read(answer, now)

    # -- deciding ----------------------------------------------------------------------------------------

    def _consider(self, look: _Look, now: float) -> None:
        if look.manifest is None:
            if look.manifest_read > 1:
                raise RunError(f"{look.keys.manifest} exists and cannot be read; use another prefix")
            self._ask(look, Get(look.keys.manifest), self._read_manifest)
            return
        if self._wanted is not None or look.manifest is self._manifest:
            self._join(look)
            return
        if self._fresh:
            self._open_next(look)
            return
        if (self._owner.learner, self._owner.instance) in look.learners:
            self._join(look)  # another process of this learner is in it
            return
        lives = [watched.life(self._seen) for watched in look.processes.values()]
        belongs = self._belongs(look)
        if not lives and (look.units_claimed or not belongs) and look.silence.seconds < SILENCE:
            lives = [Life.UNSURE]  # a first claim may land before its owner's log does, and a manifest does
        ended = any(w.page is not None and w.page.left == "end" for w in look.processes.values())
        step = decide(lives, look.anything_claimed, ended, self._state is not None, belongs)
        if step in (Next.JOIN, Next.REFUSE):
            self._join(look)
        elif step is Next.WAIT:
            look.unanswered += 1
            then = partial(self._answered, look, self._listed_learners)
            self.asks.ask_at(now + look.pause, List(look.keys.learners), then)
            look.pause = min(LOOK_EVERY, 2 * look.pause)
        elif step is Next.FINISHED:
            check_manifest(look.keys, look.manifest, self._plan, self._stage)
            self.asks.fail(self._finished(look))
        else:
            self._notices.append(self._say_next(look))
            self._open_next(look)

    def _say_next(self, look: _Look) -> str:
        following = f"opening run {int(look.keys.run) + 1}"
        if self._state is not None:
            return f"run {look.keys.run} is over; {following}, which goes on from {self._state.describe()}"
        return (
            f"run {look.keys.run} broke off: {len(look.learners)} learner(s), none alive and none at the end; "
            f"{following}, which hands out the whole plan again"
        )

    def _open_next(self, look: _Look) -> None:
        following = RunKeys(str(int(look.keys.run) + 1))
        newer = self._look_at(following)
        self._ask(newer, PutIfAbsent(newer.keys.manifest, self._manifest.encode()), self._created)

    def _join(self, look: _Look) -> None:
        assert look.manifest is not None
        check_manifest(look.keys, look.manifest, self._plan, self._stage)
        check_recovery(look.keys, look.manifest, self._manifest.reclaim_after)
        if not self._belongs(look):
            raise self._mismatch(look)
        namesakes = (w.page for (name, *_), w in look.processes.items() if name == self._owner.learner)
        pages = [page for page in namesakes if page is not None]
        twin = any(judge(page, self._seen(page.where), False, 0.0) is Life.ALIVE for page in pages)
        claimed = look.pass_claimed if self._pass else look.anything_claimed
        late = claimed and look.manifest is not self._manifest
        peers = look.learners
        self.joined = Joined(look.keys, look.manifest, peers, late, twin, tuple(self._notices))

    def _belongs(self, look: _Look) -> bool:
        """Whether the state that was loaded, if one was, was taken in this run, or the run began from it."""
        if self._state is None or look.manifest is None or look.manifest is self._manifest:
            return True
        if look.manifest.run_id == self._state.run_id:
            return True
        start = look.manifest.state
        return start is not None and State.of(start).identity == self._state.identity

    def _mismatch(self, look: _Look) -> StateMismatchError:
        assert self._state is not None
        assert look.manifest is not None
        start = look.manifest.state
        began = "from nothing" if start is None else f"from {State.of(start).describe()}"
        return StateMismatchError(
            f"the loaded {self._state.describe()}, belongs to another run than run {look.keys.run} "
            f"({look.manifest.run_id}), which began {began}; load the state that run began from or one taken in it, "
            "or end that run first, or use another prefix or run="
        )

    def _finished(self, look: _Look) -> RunFinishedError:
        run = look.keys.run
        return RunFinishedError(
            f"run {run} under this prefix is finished: all {len(self._plan)} units were handed out. "
            f'To train again, use another prefix, or name a run: pass run="again-{int(run) + 1}"; to go on from a '
            "checkpoint, load its state (Session.load_state_dict)"
        )


def new_manifest(
    plan: Plan,
    opened_by: str,
    wall: float,
    stage: str = "",
    reclaim_after: float | None = None,
    state: State | None = None,
) -> Manifest:
    """What to create where a run must be opened; its id is drawn anew at each call."""
    return Manifest(
        protocol=PROTOCOL,
        run_id=os.urandom(8).hex(),
        plans={stage or TRAIN: plan.signature()},
        opened_by=opened_by,
        wall=wall,
        state=None if state is None else state.as_dict(),
        reclaim_after=reclaim_after,
    )


def check_state(state: State, plan: Plan, stage: str = "") -> None:
    """Raise unless a state is of this plan; that of evaluation is another.

    Raises:
        PlanMismatchError: it is of another one.
    """
    if not stage and (state.plan is None or not plan.matches(state.plan)):
        raise PlanMismatchError(
            f"the loaded {state.describe()}, is of another plan: {describe_signature(state.plan)}; this learner has "
            f"{describe_signature(plan.signature())}. Train the plan that the checkpoint was made with, or load none"
        )


def check_manifest(keys: RunKeys, manifest: Manifest, plan: Plan, stage: str = "") -> None:
    """Raise unless a run with this manifest hands out this plan, as far as it says.

    A run says what is trained when it is opened; of validation, test and prediction the ranks of a job agree later.

    Raises:
        RunError: it speaks another version of the protocol.
        PlanMismatchError: it was opened with another plan.
    """
    if manifest.protocol != PROTOCOL:
        raise RunError(
            f"{keys.manifest} speaks protocol {manifest.protocol}, this version {PROTOCOL}; "
            "use one version of shardqueue on all nodes"
        )
    if not manifest.plans:
        raise RunError(
            f"run {keys.run} is being removed by `shardqueue clean`; call it again to finish, or use another prefix"
        )
    signature = manifest.plans.get(stage or TRAIN)
    if signature is None and stage:
        return
    if signature is None or not plan.matches(signature):
        raise PlanMismatchError(
            f"run {keys.run} was opened with another plan: {describe_signature(signature)}; this learner has "
            f"{describe_signature(plan.signature())}. Give every node the same plan, or use another prefix"
        )


def check_recovery(keys: RunKeys, manifest: Manifest, reclaim_after: float | None) -> None:
    """Raise unless the run hands out units again after this time: who logs less often than it asks is given up.

    Raises:
        RunError: it does so after another time, or never.
    """
    if manifest.reclaim_after != reclaim_after:
        raise RunError(
            f"run {keys.run} was opened with reclaim_after={manifest.reclaim_after}, this learner has "
            f"reclaim_after={reclaim_after}; give all learners of a run the same"
        )


def check_joined(
    joined: Joined, plan: Plan, run: str | None, stage: str = "", reclaim_after: float | None = None
) -> None:
    """Raise unless the run a session is in is the one wanted, and hands out this plan.

    Raises:
        RunError: it is another, speaks another version of the protocol, or has another `reclaim_after`.
        PlanMismatchError: it was opened with another plan.
    """
    if run not in (None, joined.keys.run):
        raise RunError(
            f"run={run!r}: the entered session is in run {joined.keys.run!r}; leave it, and enter a new Session for "
            "another run"
        )
    check_recovery(joined.keys, joined.manifest, reclaim_after)
    if joined.together and (stage or TRAIN) not in joined.manifest.plans:
        return
    check_manifest(joined.keys, joined.manifest, plan, stage)


def is_number(name: str) -> bool:
    """Whether a run has this number, rather than a name that looks like one ("007")."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name and name != "0"


def describe_signature(signature: dict[str, object] | None) -> str:
    """One short line about a plan that is known by its signature alone."""
    if signature is None:
        return "no training plan"
    arguments, agreed = signature.get("arguments"), signature.get("agreed")
    also = "".join(f", {name}={value}" for name, value in agreed.items()) if isinstance(agreed, dict) else ""
    if isinstance(arguments, dict):
        kind = arguments.get("kind", "units")
        inner = ", ".join(f"{name}={value}" for name, value in arguments.items() if name != "kind")
        return f"{kind}({inner}): {signature.get('units')} units{also}"
    return f"{signature.get('units')} units with fingerprint {str(signature.get('fingerprint'))[:12]}{also}"
