"""The gradients of one step, summed over ranks that took different numbers of micro-batches.

A rank calls plain `loss.backward()` for each of its micro-batches, of a mean loss. What every rank finds in `.grad`
at the end of the step is sum(weight_i * gradient_i) / sum(weight_i) over all its micro-batches, wherever they ran:
what one process would have accumulated.

Meanwhile `.grad` is kept in units of the newest weight, so that micro-batches of one size cost nothing. It is summed
in buckets, in reverse order of the parameters, as DistributedDataParallel does; half precision is summed in float32.
In a rank's last backward a bucket's sum begins once its gradients are in; buckets begin in one order on all ranks, so
that collectives match. Where other parameters than before require a gradient, nothing begins until the flags (below)
have shown that all ranks agree on them. A rank without a micro-batch adds zeros. Buckets are kept between steps.

A parameter without a gradient on any rank has none afterwards, and one with a gradient somewhere has it everywhere:
the *flags*, summed over ranks with whatever else they tell each other, say which.

Buffers are brought together after that, see `buffers`.
"""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardqueue.buffers import Buffers
from shardqueue.errors import AgreementError, ClosedError, InvalidInputError
from shardqueue.flat import BUCKET_BYTES, Flat, fingerprint, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.utils.hooks import RemovableHandle


class Gradients:
    """The gradients and buffers of a module, of which each rank has a replica.

    One step: `begin`; `weigh` and a backward for each micro-batch of this rank; `launch`; `flags`, to be summed over
    ranks; `finish`. All ranks of the group go through the same steps.

    Args:
        module: the same on all ranks, see `broadcast_module`. Parameters may be frozen and unfrozen between steps, on
            all ranks alike.
        group: the process group; None for a process on its own.
        bucket_bytes: size of a bucket, in bytes.

    Attributes:
        last: asked once in each backward, at its first gradient: whether nothing more is added on this rank in this
            step, so that sums may begin. A module on several devices is summed at `launch`, whatever it says.
    """

    def __init__(
        self, module: Module, group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.last: Callable[[], bool] = lambda: False
        self._module, self._group, self._bucket_bytes = module, group, bucket_bytes
        self._size = 1 if group is None else dist.get_world_size(group)
        self._buffers = Buffers(module, group)
        self._parameters: list[Parameter] = []
        self._layout: list[object] = []
        self._fingerprint, self._agreed = 0.0, False
        self._buckets: list[Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._weight: float | None = None
        self._asks = self._overlaps = False

    def begin(self) -> None:
        """A step begins; gradients of the one before are to be zeroed or unset before its first backward.

        Raises:
            ClosedError: the step before was not finished.
        """
        if any(bucket.work is not None for bucket in self._buckets):
            raise ClosedError(
                "a step begins while sums of the one before are under way: call finish first, or close"
            )
        self._weight = None
        self._lay_out()
        self._buffers.begin()

    @torch.no_grad()
    def check_zeroed(self) -> None:
        """Refuse what lies in `.grad` before a step's first micro-batch: it would be averaged over ranks once more.

        Raises:
            ClosedError: a gradient is there, and is not zero.
        """
        left = [p.grad for bucket in self._buckets for p in bucket.parameters if p.grad is not None]
        if left and any(norm != 0 for norm in torch._foreach_norm(left)):
            raise ClosedError(
                "gradients are there before the first micro-batch of a step: call optimizer.zero_grad() before the "
                "loop over its micro-batches; add a penalty to the loss of each, and to accumulate over more of "
                "them make a step of more"
            )

    def weigh(self, weight: float) -> None:
        """The backward that follows counts so much.

        Args:
            weight: what the micro-batch's loss is a mean of: samples, or tokens.

        Raises:
            InvalidInputError: it is not a finite number above 0.
            ClosedError: it is another one, and nothing was added since the last time.
        """
        if not 0 < weight < math.inf:
            raise InvalidInputError(
                *("weight", weight, "a finite number above 0"),
                "give the samples or tokens of the micro-batch, and leave out one that has none",
            )
        if self._weight is not None and weight != self._weight:
            if self._asks:
                raise ClosedError(
                    f"a micro-batch of weight {weight:g} was taken before the backward of the one before, which "
                    f"weighs {self._weight:g}: take it afterwards, or make them weigh the same; to leave one out, "
                    "call (0 * loss).backward()"
                )
            self._scale(self._weight / weight)
        self._weight = weight
        self._asks = True

    def launch(self) -> None:
        """Nothing more is added on this rank in this step: begin all sums that are not under way."""
        self._asks = self._overlaps = False
        if self._size > 1 and self._agreed:
            for bucket in self._buckets:
                if bucket.work is None:
                    bucket.start(self._weight, self._group)

    @property
    def flags(self) -> list[float]:
        """What this rank has: 1.0 for each parameter with a gradient, and for each buffer that changed in this step.

        A number more tells whether the ranks' parameters are alike. The length is the same in every step.
        """
        here = self._weight is not None
        present = [float(here and p.requires_grad and p.grad is not None) for p in self._parameters]
        return [*present, *self._buffers.flags(), self._fingerprint]

    def finish(self, flags: Sequence[float], weight: float, count: int, counts: int) -> None:
        """Wait for the sums, and put what they say into `.grad` and the buffers.

        Args:
            flags: the sum of all ranks' `flags`.
            weight: of all micro-batches of the step together.
            count: micro-batches of this rank.
            counts: micro-batches of all ranks.

        Raises:
            AgreementError: the ranks have other parameters, or froze others.
        """
        if self._size == 1:
            self._asks = False
            if self._weight is not None:
                self._scale(self._weight / weight)
            return
        if flags[-1] != self._size * self._fingerprint:
            raise AgreementError(
                "the parameters that require a gradient differ between ranks, in number, shape or type: build "
                "the same module on all ranks, and freeze and unfreeze the same parameters before the same step"
            )
        self._agreed = True
        self.launch()
        self._buffers.start(flags[len(self._parameters) : -1], count)
        anywhere = {p for p, flag in zip(self._parameters, flags, strict=False) if flag}
        for bucket in self._buckets:
            bucket.finish(weight, anywhere)
        self._buffers.finish(counts)

    def close(self) -> None:
        """Leave the module as it was, and forget the buckets; sums under way are not waited for."""
        for hook in self._hooks:
            hook.remove()
        self._layout, self._buckets, self._hooks = [], [], []
        self._asks = self._overlaps = False
        self._buffers.forget()

    def _lay_out(self) -> None:
        """Make the buckets and hooks anew if other parameters require a gradient than before, or they moved."""
        parameters = list(self._module.parameters())
        layout: list[object] = [(id(p), p.requires_grad, p.device, p.dtype) for p in parameters]
        if layout == self._layout:
            return
        self.close()
        self._parameters, self._layout = parameters, layout
        self._fingerprint = float(fingerprint((p, p.requires_grad) for p in parameters))
        self._agreed = False
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        for piece in pieces([p for p in reversed(parameters) if p.requires_grad], self._bucket_bytes):
            bucket = Bucket(piece)
            self._buckets.append(bucket)
            for parameter in piece:
                arrived = partial(self._arrived, bucket, names[parameter])
                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        for bucket in self._buckets:
            gradients = [p.grad for p in bucket.parameters if p.grad is not None]
            if gradients and factor != 1:
                torch._foreach_mul_(gradients, factor)

    def _arrived(self, bucket: Bucket, name: str, parameter: Parameter) -> None:
        """A backward has added to the parameter's gradient."""
        gradient = parameter.grad
        if gradient is None:
            raise InvalidInputError(
                *(f"{name}.grad", None, "kept until the step's end, when the ranks add it up"),
                "step the optimizer after that, not in a hook of backward",
            )
        if gradient.is_sparse:
            raise InvalidInputError(
                *(f"{name}.grad", gradient.layout, "dense, to be summed over ranks"),
                "make the embedding with sparse=False",
            )
        if gradient.is_conj():  # lazily so, which nothing in place can be done to in a list
            parameter.grad = gradient.resolve_conj()
        if bucket.work is not None:
            raise ClosedError(
                f"parameter {name} got another gradient in the last backward of a step, after its sum over ranks "
                "began: take a micro-batch only when the backward of the one before is done, call backward once for "
                "each, and checkpoint with use_reentrant=False; or pass overlap=False to Elastic"
            )
        if self._asks:
            self._asks = False
            self._overlaps = self.last() and self._may_overlap
            for one in self._buckets:
                one.missing = set(one.parameters)
        if self._overlaps:
            bucket.missing.discard(parameter)
            if not bucket.missing:
                self._start_complete()

    @property
    def _may_overlap(self) -> bool:
        return self._size > 1 and self._agreed and len({bucket.device for bucket in self._buckets}) == 1

    def _start_complete(self) -> None:
        """Begin the sums of complete buckets, but none before its turn: that is how those of all ranks match."""
        for bucket in self._buckets:
            if bucket.missing:
                return
            if bucket.work is None:
                bucket.start(self._weight, self._group)


class Bucket:
    """Gradients that are summed in one piece, of parameters of one device and type.

    Attributes:
        parameters: in the order in which their gradients are expected.
        missing: those whose gradient the backward under way has not given yet.
        work: the sum that is under way.
    """

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = parameters
        self.missing: set[Parameter] = set()
        self.work: dist.Work | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0].device

    @cached_property
    def flat(self) -> Flat:
        """Room for the gradients, taken when they are first summed."""
        return Flat(self.parameters)

    @torch.no_grad()
    def start(self, weight: float | None, group: dist.ProcessGroup | None) -> None:
        """Begin to sum gradients of that weight; None for a rank that has none."""
        pairs = list(zip(self.flat.parts, self.parameters, strict=True))
        here = [] if weight is None else [(part, p.grad) for part, p in pairs if p.grad is not None]
        if len(here) < len(pairs):
            self.flat.whole.zero_()
        if here and weight is not None:
            torch._foreach_copy_([part for part, _ in here], [gradient for _, gradient in here])
            if weight != 1:
                self.flat.whole.mul_(weight)
        self.work = dist.all_reduce(self.flat.whole, group=group, async_op=True)

    @torch.no_grad()
    def finish(self, weight: float, anywhere: set[Parameter]) -> None:
        """Wait for the sum, and give each parameter with a gradient anywhere its share of the total weight."""
        if self.work is not None:
            self.work.wait()
        self.work = None
        self.flat.whole.div_(weight)
        parts: list[Tensor] = []
        gradients: list[Tensor] = []
        for part, parameter in zip(self.flat.parts, self.parameters, strict=True):
            if parameter not in anywhere:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parts.append(part)
            gradients.append(parameter.grad)
        if parts:
            torch._foreach_copy_(gradients, parts)
