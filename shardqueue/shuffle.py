"""A seeded shuffle that is computed place by place, never stored.

A `Permutation` puts `rows` rows into an order that depends on (rows, seed, epoch) alone: every process, machine
and version of Python or numpy computes the same one, and any stretch of it costs only the rows asked for. Nothing
here touches a random generator.

Method: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002): their generalised Feistel
network on a x b places, with a and b close to the square root of `rows`, and cycle walking for the fewer than a
places beyond the last row. A round adds words of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom
Number Generators", 2014); its keys are a BLAKE2b digest. Tables of up to 1,024 rows are sorted by such words
instead: uniform whatever their size, where a network would be biased below 100 rows and would miss every odd
permutation where a and b are odd.

Eight rounds: over 4 million keys the differences of two images show a bias with 8 x 8 places up to 8 rounds, with
16 x 16 up to 7, with 32 x 32 and 64 x 64 up to 5. The network is used beyond 32 x 32. It is a shuffle, not a cipher:
do not hide secrets behind it.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from shardqueue.units import check_int

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGEST_SEED = 2**63 - 1

_ROUNDS = 8  # a digest of BLAKE2b is 8 words long
_SORTED_ROWS = 2**10  # up to here the order is kept, 8 KiB
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_1, _27, _30, _31 = np.uint64(1), np.uint64(27), np.uint64(30), np.uint64(31)


def _words(key: np.uint64, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Words number `indices` of the SplitMix64 stream of this key; no two words of a stream are equal."""
    words = (indices + _1) * _GAMMA + key
    words = (words ^ (words >> _30)) * _MIX_1
    words = (words ^ (words >> _27)) * _MIX_2
    return words ^ (words >> _31)


class Permutation:
    """An order of the rows 0 to `rows - 1`: `at(0, rows)` would have each of them once.

    Pickles as its arguments.

    Args:
        rows: how many, from 1 to 2**53.
        seed: from 0 to 2**63 - 1.
        epoch: from 0 to 2**53; each epoch has an order of its own, as unrelated as those of two seeds.

    Raises:
        InvalidInputError: an argument is not an int, or out of range.
    """

    __slots__ = ("_arguments", "_keys", "_order", "_sides")

    def __init__(self, rows: int, seed: int, epoch: int = 0) -> None:
        rows = check_int("rows", rows, 1)
        seed = check_int("seed", seed, 0, LARGEST_SEED)
        self._arguments = rows, seed, check_int("epoch", epoch, 0)
        digest = blake2b(repr(self._arguments).encode(), digest_size=8 * _ROUNDS, person=b"shardqueue")
        self._keys = np.frombuffer(digest.digest(), "<u8").astype(np.uint64)
        side = isqrt(rows - 1) + 1
        self._sides = np.array([side, -(-rows // side)], np.uint64)
        self._order: NDArray[np.int64] | None = None
        if rows <= _SORTED_ROWS:
            words = _words(self._keys[0], np.arange(rows, dtype=np.uint64))
            self._order = np.argsort(words).astype(np.int64)

    def __len__(self) -> int:
        return self._arguments[0]

    def __repr__(self) -> str:
        rows, seed, epoch = self._arguments
        return f"Permutation(rows={rows}, seed={seed}, epoch={epoch})"

    def __reduce__(self) -> tuple[type[Permutation], tuple[int, int, int]]:
        return type(self), self._arguments

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """The rows at the places `start` to `stop - 1` of the order.

        Returns:
            int64 array of shape (stop - start,), the caller's own. Making it takes some ten times its memory.

        Raises:
            InvalidInputError: not 0 <= start <= stop <= rows.
        """
        rows = len(self)
        start = check_int("start", start, 0, rows)
        stop = check_int("stop", stop, start, rows)
        if self._order is not None:
            return self._order[start:stop].copy()
        images = self._network(np.arange(start, stop, dtype=np.uint64))
        while (beyond := images >= np.uint64(rows)).any():
            images[beyond] = self._network(images[beyond])
        return images.astype(np.int64)

    def _network(self, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass of the network over places 0 to a * b - 1; place = y * a + x."""
        a, b = self._sides
        y, x = np.divmod(places, a)
        for key_x, key_y in zip(self._keys[::2], self._keys[1::2], strict=True):
            x = (x + (_words(key_x, y) >> _1)) % a
            y = (y + (_words(key_y, x) >> _1)) % b
        images: NDArray[np.uint64] = y * a + x
        return images
