"""Clicks by score in bounded memory: exact while the distinct scores fit, else a q-digest.

A score in [0, 1] is a float32, and non-negative floats sort like their bits, so scores are the leaves of a binary tree
over 30-bit keys. A node of the digest is a leaf, or an inner node that stands for several leaves below it. When there
are more than `limit` nodes, neighbours with less than a given share of the clicks *and* of the non-clicks are joined
in their lowest common ancestor (Shrivastava et al., "Medians and Beyond", 2004). A heavy score is never joined, so
real ties stay ties, and later rows enter as leaves again, whatever was joined before. The pairs whose order is no
longer known are counted, which gives `Bins.unordered`, a bound that holds for any input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clickline.numba_cache import njit

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# A node's moments: sums over its rows, where a row is `clicks` = label * weight and `others` = the rest.
CLICKS, OTHERS, CLICKS_SQUARED, OTHERS_SQUARED, CLICKS_OTHERS, SCORES = range(6)
MOMENTS = 6

_KEY_BITS = 30  # the float32 1.0 is 0x3F800000, below 2**30
_RADIX_BITS = 10
_LEVEL_BITS = 5


@dataclass(frozen=True)
class Bins:
    """The contents of a digest, in ascending order of score."""

    score_N: Doubles  # weighted mean of the scores in the bin
    clicks_N: Doubles
    others_N: Doubles  # impressions without a click
    clicks_squared_N: Doubles  # these three are sums over rows, for the variance between rows
    others_squared_N: Doubles
    clicks_others_N: Doubles
    unordered: float  # bound on click/non-click pairs in the wrong order; 0: exact

    @property
    def impressions_N(self) -> Doubles:
        return self.clicks_N + self.others_N

    @property
    def row_weight(self) -> float:
        """The weight of a typical row, that is of one more observation."""
        squares = self.clicks_squared_N.sum() + 2 * self.clicks_others_N.sum() + self.others_squared_N.sum()
        impressions = self.impressions_N.sum()
        return float(squares / impressions) if impressions > 0 else 1.0


class ScoreDigest:
    """Accumulates clicks and non-clicks by score. The state does not depend on how rows are batched, to the bit."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self.limit = limit
        self._codes_N = np.empty(0, dtype=np.uint64)  # in post-order: a joined node follows its parts
        self._moments_NM = np.empty((0, MOMENTS), dtype=np.float64)
        self._pending_3B = np.empty((3, 0), dtype=np.float32)  # label, weight, score of rows not yet inserted
        self._pending_rows = 0

    def add(self, label_B: Floats, weight_B: Floats, score_B: Floats) -> None:
        """Add rows; the caller has checked that labels and scores are in [0, 1] and weights are not negative."""
        start, rows = 0, len(score_B)
        while start < rows:
            self._make_room(rows - start)
            count = min(rows - start, self._pending_3B.shape[1] - self._pending_rows)
            target, source = (
                slice(self._pending_rows, self._pending_rows + count),
                slice(start, start + count),
            )
            self._pending_3B[0, target] = label_B[source]
            self._pending_3B[1, target] = weight_B[source]
            self._pending_3B[2, target] = score_B[source]
            self._pending_rows += count
            start += count
            if self._pending_rows == 2 * self.limit:
                self._flush()

    def merge(self, other: ScoreDigest) -> None:
        """Add the counts of another digest, which is not changed."""
        self._flush()
        self._insert(other._codes_N, other._moments_NM)
        self._insert(*_leaves(*other._pending_3B[:, : other._pending_rows]))

    def bins(self) -> Bins:
        """The counts so far. The state is not changed."""
        leaves = _leaves(*self._pending_3B[:, : self._pending_rows])
        codes_N, moments_NM = _merge_nodes(self._codes_N, self._moments_NM, *leaves)
        impressions_N = moments_NM[:, CLICKS] + moments_NM[:, OTHERS]
        score_N = moments_NM[:, SCORES] / impressions_N
        order_N = np.argsort(score_N, kind="stable")
        lines_MN = moments_NM[order_N].T.copy()
        return Bins(
            score_N[order_N],
            lines_MN[CLICKS],
            lines_MN[OTHERS],
            lines_MN[CLICKS_SQUARED],
            lines_MN[OTHERS_SQUARED],
            lines_MN[CLICKS_OTHERS],
            float(_unordered_pairs(codes_N, moments_NM)),
        )

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """The whole state, for a checkpoint: a restored digest gives bit-identical results."""
        return {
            "codes": self._codes_N.copy(),
            "moments": self._moments_NM.copy(),
            "pending": self._pending_3B[:, : self._pending_rows].copy(),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]], limit: int = 1 << 16) -> ScoreDigest:
        digest = cls(limit)
        digest._codes_N = np.asarray(arrays["codes"], dtype=np.uint64)
        digest._moments_NM = np.asarray(arrays["moments"], dtype=np.float64).reshape(-1, MOMENTS)
        digest.add(*np.asarray(arrays["pending"], dtype=np.float32))
        return digest

    def _make_room(self, wanted: int) -> None:
        """Grow the buffer on demand, up to twice `limit` rows: most hours and slices are small."""
        capacity = self._pending_3B.shape[1]
        limit = 2 * self.limit
        needed = min(limit, self._pending_rows + wanted)
        if needed > capacity:
            grown_3B = np.empty((3, min(limit, max(needed, 2 * capacity))), dtype=np.float32)
            grown_3B[:, : self._pending_rows] = self._pending_3B[:, : self._pending_rows]
            self._pending_3B = grown_3B

    def _flush(self) -> None:
        if self._pending_rows:
            codes_N, moments_NM = _leaves(*self._pending_3B[:, : self._pending_rows])
            self._pending_rows = 0
            self._insert(codes_N, moments_NM)

    def _insert(self, codes_N: NDArray[np.uint64], moments_NM: Doubles) -> None:
        codes_N, moments_NM = _merge_nodes(self._codes_N, self._moments_NM, codes_N, moments_NM)
        parts = 2 * self.limit // 5
        while len(codes_N) > self.limit:
            clicks, others = moments_NM[:, CLICKS].sum(), moments_NM[:, OTHERS].sum()
            count = _join_light_nodes(codes_N, moments_NM, clicks / parts, others / parts)
            codes_N, moments_NM = codes_N[:count], moments_NM[:count]
            parts = max(1, 3 * parts // 4)
        self._codes_N, self._moments_NM = (
            codes_N.copy(),
            moments_NM.copy(),
        )  # free the unused rest of the arrays


# ── kernels ────────────────────────────────────────────────────────────────────────────────────
# A node of level v covers 2**v keys, the last of them `high`. Its code is high * 32 + v: in order of codes, every node
# follows all nodes inside it, and left precedes right.


@njit(cache=True, nogil=True)
def _leaves(
    label_B: Floats, weight_B: Floats, score_B: Floats
) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    """Convert rows to leaves: sorted by score, equal scores summed, rows without weight omitted."""
    rows = score_B.size
    keys_B = (score_B + np.float32(0)).view(np.uint32)  # + 0 turns -0.0 into 0.0
    order_B = np.empty(rows, dtype=np.uint64)  # key and row in one word, for the radix sort
    other_B = np.empty(rows, dtype=np.uint64)
    for b in range(rows):
        order_B[b] = (np.uint64(keys_B[b]) << np.uint64(32)) | np.uint64(b)
    mask = np.uint64((1 << _RADIX_BITS) - 1)
    places = np.empty((1 << _RADIX_BITS) + 1, dtype=np.int64)
    for bits in range(0, _KEY_BITS, _RADIX_BITS):
        shift = np.uint64(32 + bits)
        places[:] = 0
        for b in range(rows):
            places[((order_B[b] >> shift) & mask) + np.uint64(1)] += 1
        for digit in range(1, places.size):
            places[digit] += places[digit - 1]
        for b in range(rows):
            digit = (order_B[b] >> shift) & mask
            other_B[places[digit]] = order_B[b]
            places[digit] += 1
        order_B, other_B = other_B, order_B

    codes_N = np.empty(rows, dtype=np.uint64)
    moments_NM = np.zeros((rows, MOMENTS))
    count = 0
    for i in range(rows):
        row = np.int64(order_B[i] & np.uint64(0xFFFFFFFF))
        weight = np.float64(weight_B[row])
        if weight == 0:
            continue
        code = (order_B[i] >> np.uint64(32)) << np.uint64(_LEVEL_BITS)
        if count == 0 or codes_N[count - 1] != code:
            codes_N[count] = code
            count += 1
        clicks = np.float64(label_B[row]) * weight
        others = weight - clicks
        sums_M = moments_NM[count - 1]
        sums_M[CLICKS] += clicks
        sums_M[OTHERS] += others
        sums_M[CLICKS_SQUARED] += clicks * clicks
        sums_M[OTHERS_SQUARED] += others * others
        sums_M[CLICKS_OTHERS] += clicks * others
        sums_M[SCORES] += weight * np.float64(score_B[row])
    return codes_N[:count], moments_NM[:count]


@njit(cache=True, nogil=True)
def _merge_nodes(
    left_codes: NDArray[np.uint64], left_NM: Doubles, right_codes: NDArray[np.uint64], right_NM: Doubles
) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    """Two sorted lists of nodes as one; a node that is in both is summed."""
    total = left_codes.size + right_codes.size
    codes_N = np.empty(total, dtype=np.uint64)
    moments_NM = np.empty((total, MOMENTS))
    end = np.uint64(1 << 63)  # above every code
    i = j = count = 0
    while i < left_codes.size or j < right_codes.size:
        left = left_codes[i] if i < left_codes.size else end
        right = right_codes[j] if j < right_codes.size else end
        codes_N[count] = min(left, right)
        for m in range(MOMENTS):
            if left < right:
                moments_NM[count, m] = left_NM[i, m]
            elif right < left:
                moments_NM[count, m] = right_NM[j, m]
            else:
                moments_NM[count, m] = left_NM[i, m] + right_NM[j, m]
        if left <= right:
            i += 1
        if right <= left:
            j += 1
        count += 1
    return codes_N[:count], moments_NM[:count]


@njit(cache=True, nogil=True)
def _fewer_bits(a: int, b: int) -> bool:
    """Whether `a` has fewer binary digits than `b`."""
    return a < b and a < a ^ b


@njit(cache=True, nogil=True)
def _join_light_nodes(
    codes_N: NDArray[np.uint64], moments_NM: Doubles, max_clicks: float, max_others: float
) -> int:
    """Join light neighbours, in place and in order; returns the number of remaining nodes.

    Two nodes are joined in their lowest common ancestor if the result has at most `max_clicks` and `max_others`. A
    joined node absorbs later nodes inside it up to twice that weight, so that evenly growing nodes are not split by
    chance.

    One bottom-up pass. The nodes read so far form a sequence of groups that have not met their right neighbour yet:
    open (a single node that may be joined) or closed (it has a part that is too heavy).
    """
    key_G = np.empty(2 * _KEY_BITS + 4, dtype=np.int64)  # any key of the group
    open_G = np.empty(2 * _KEY_BITS + 4, dtype=np.bool_)
    groups = count = 0  # each open group at the end has one of the last nodes
    for n in range(codes_N.size + 1):
        last = n == codes_N.size
        if not last:
            code = codes_N[n]
            high = np.int64(code >> np.uint64(_LEVEL_BITS))
            width = np.int64(1) << np.int64(code & np.uint64((1 << _LEVEL_BITS) - 1))
        # Finish the groups whose common ancestor is below the one with this node.
        while groups >= 2:
            difference = key_G[groups - 2] ^ key_G[groups - 1]
            if not last and not (2 * difference < width or _fewer_bits(difference, key_G[groups - 1] ^ high)):
                break
            a, b = moments_NM[count - 2], moments_NM[count - 1]
            if (
                open_G[groups - 2]
                and open_G[groups - 1]
                and a[CLICKS] + b[CLICKS] <= max_clicks
                and a[OTHERS] + b[OTHERS] <= max_others
            ):
                for m in range(MOMENTS):
                    a[m] += b[m]
                level = math.frexp(np.float64(difference))[1]
                top = key_G[groups - 1] | ((np.int64(1) << level) - 1)
                codes_N[count - 2] = np.uint64((top << _LEVEL_BITS) | level)
                count -= 1
            else:
                open_G[groups - 2] = False
            groups -= 1
        if last:
            break
        # At most two of the remaining groups are inside this node, one in each half.
        clicks, others = moments_NM[n, CLICKS], moments_NM[n, OTHERS]
        inside = 0
        all_open = True
        while inside < groups and key_G[groups - 1 - inside] ^ high < width:
            inside += 1
            if open_G[groups - inside] and all_open:
                clicks += moments_NM[count - inside, CLICKS]
                others += moments_NM[count - inside, OTHERS]
            else:
                all_open = False
        if inside > 0 and all_open and clicks <= 2 * max_clicks and others <= 2 * max_others:
            count -= inside
            for m in range(MOMENTS):
                value = moments_NM[n, m]
                for k in range(inside):
                    value += moments_NM[count + k, m]
                moments_NM[count, m] = value
        else:
            all_open = inside == 0
            for m in range(MOMENTS):
                moments_NM[count, m] = moments_NM[n, m]
        codes_N[count] = code
        count += 1
        groups -= inside
        key_G[groups] = high
        open_G[groups] = all_open
        groups += 1
    return count


@njit(cache=True, nogil=True)
def _unordered_pairs(codes_N: NDArray[np.uint64], moments_NM: Doubles) -> float:
    """A bound on the click/non-click pairs that the order of the bins gets wrong.

    Within a joined node all pairs count as ties, so at most half of each is wrong. A node and one that covers it may
    be in either order, so there the whole pair may be wrong.
    """
    low_S = np.empty(_KEY_BITS + 2, dtype=np.int64)
    clicks_S = np.zeros(_KEY_BITS + 2)
    others_S = np.zeros(_KEY_BITS + 2)
    size = 0
    pairs = 0.0
    for n in range(codes_N.size - 1, -1, -1):
        high = np.int64(codes_N[n] >> np.uint64(_LEVEL_BITS))
        level = np.int64(codes_N[n] & np.uint64((1 << _LEVEL_BITS) - 1))
        while size > 0 and low_S[size - 1] > high:
            size -= 1
        clicks, others = moments_NM[n, CLICKS], moments_NM[n, OTHERS]
        above_clicks = clicks_S[size - 1] if size > 0 else 0.0
        above_others = others_S[size - 1] if size > 0 else 0.0
        pairs += clicks * above_others + others * above_clicks
        if level > 0:
            pairs += clicks * others / 2
        low_S[size] = high - (np.int64(1) << level) + 1
        clicks_S[size] = above_clicks + clicks
        others_S[size] = above_others + others
        size += 1
    return pairs
