"""What a model must be where ranks run unequal numbers of forwards: whole, and alike on all of them."""

from __future__ import annotations

import hashlib
import json

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardqueue.errors import InvalidInputError


def refuse_model(model: torch.nn.Module) -> None:
    """Refuse what communicates in forward or backward: the ranks run as many of those as they are fast.

    Raises:
        InvalidInputError: naming it, and what to use instead.
    """
    for name, module in model.named_modules():
        what = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, DistributedDataParallel):
            remedy = "pass the module inside; elastic steps add up the gradients themselves"
            raise InvalidInputError("model", what, "not wrapped by DistributedDataParallel", remedy)
        if isinstance(module, torch.nn.SyncBatchNorm):
            bound = "without SyncBatchNorm, which waits for all ranks in each forward, and they run unequal numbers"
            remedy = "use BatchNorm (its buffers are averaged over the micro-batches), GroupNorm or LayerNorm"
            raise InvalidInputError("model", what, bound, remedy)
        sharded = isinstance(module, FullyShardedDataParallel | FSDPModule)
        if sharded or any(isinstance(one, DTensor) for one in module.parameters(recurse=False)):
            bound = "whole on every rank: shards are gathered in each forward, and ranks run unequal numbers"
            lockstep = "FSDPStrategy with SharedQueueDataModule, or session.track(loader, group=...)"
            remedy = f"train it in lockstep: {lockstep}"
            raise InvalidInputError("model", what, bound, remedy)


def signature(model: torch.nn.Module) -> str:
    """The same for models whose gradients can be added up."""
    said = [
        (name, str(tensor.dtype), list(tensor.shape), getattr(tensor, "requires_grad", False))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    digest = hashlib.blake2b(json.dumps(said).encode(), digest_size=6).hexdigest()
    return f"{len(said)} tensors ({digest})"
