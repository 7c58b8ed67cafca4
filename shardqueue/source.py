"""What a session knows of those it works with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shardqueue.plan import Plan
    from shardqueue.progress import Agreed
    from shardqueue.state import State
    from shardqueue.units import Step


class Source(Protocol):
    """Where the batches of one pass come from, as the session sees it: a feed, or loader workers with feeds.

    `plan`: the units, also those trained before the run. `tracked`: what reaches the loop is reported by
    `Session.track`. `manned`: somebody claims for it.
    """

    plan: Plan
    tracked: bool

    @property
    def manned(self) -> bool:
        """Whether anybody claims for this source."""
        ...

    def poke(self) -> None:
        """What the session allows has changed."""
        ...

    @property
    def committed(self) -> int:
        """Batches that are certainly ours: handed out, in hand, or of claims whose size is known."""
        ...

    @property
    def events(self) -> int:
        """Grows with every claim that is asked for, and every surplus given back."""
        ...

    @property
    def settled(self) -> bool:
        """Whether nothing that others may be waiting for is under way."""
        ...

    @property
    def ends_known(self) -> bool:
        """Whether it is known of every claim in hand where it ends, so that no surplus can come of it."""
        ...

    def took(self, step: Step, now: float, each: float | None) -> None:
        """A tracked loop took a batch at `now`; it needs `each` seconds for one, None while that is not known."""
        ...

    def trained(self, step: Step) -> None:
        """One batch that was handed out is trained."""
        ...

    def revoke(self, step: Step) -> None:
        """Others have taken over this batch and what follows it in its unit: we had been silent for too long."""
        ...

    def stop(self) -> None:
        """Claim and load no more; what that leaves is settled by `close`."""
        ...

    def replace(self) -> None:
        """Another source of this learner begins on the same pass: leave."""
        ...

    def close(self, failed: bool) -> None:
        """Leave, and give back what is not trained."""
        ...


class Together(Protocol):
    """Our place among ranks that step together (`lockstep.Lockstep`)."""

    @property
    def agreed(self) -> Agreed | None:
        """What is agreed on for the step whose batch was handed out last."""
        ...

    def complete(self, state: State, cut: tuple[str, int], plan: Plan) -> None:
        """Add to a state what the others trained up to step `cut[1]` of pass `cut[0]`."""
        ...

    def leave(self, error: BaseException | None) -> None:
        """The session is being left."""
        ...


class Attempt(Protocol):
    """One attempt at a unit: its identifier, and which claim of it."""

    identifier: str
    attempt: int
