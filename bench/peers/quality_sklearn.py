"""Logistic regression over hashed one-hot categories, by scikit-learn. The seed only changes the hash."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from real_rows import Rows, contest, number_floats, number_words

BITS = 20


@dataclass(frozen=True)
class Setting:
    numbers: str
    c: float  # the inverse of L2


SETTINGS = [Setting(numbers, c) for numbers in ("log1p", "buckets") for c in (0.03, 0.1, 0.3, 1.0)]


def hashed(words_NF: np.ndarray, seed: int) -> np.ndarray:
    """A column among 2^20 for each value of each field."""
    if words_NF.dtype.kind == "S":
        words_NF = np.ascontiguousarray(words_NF)
        if words_NF.dtype.itemsize == 8:
            words_NF = words_NF.view(np.uint64)
        else:  # a number for each text
            words_NF = np.unique(words_NF, return_inverse=True)[1].reshape(words_NF.shape)
    hash_NF = words_NF.astype(np.uint64) + np.arange(words_NF.shape[1], dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53 + 2 * seed):
        hash_NF = (hash_NF ^ (hash_NF >> np.uint64(33))) * np.uint64(factor)
    return (hash_NF >> np.uint64(64 - BITS)).astype(np.int32)


def learn(rows: Rows, setting: Setting, known: int, scored: slice, seed: int) -> Iterator[np.ndarray]:
    columns_NF = hashed(rows.words_NS, seed)
    if setting.numbers == "buckets":
        own_ND = hashed(number_words(rows.numbers_ND) + (1 << 40), seed)
        columns_NF = np.concatenate((columns_NF, own_ND), axis=1)
    count, fields = columns_NF.shape
    ones = np.ones(columns_NF.size, np.float32)
    starts = np.arange(count + 1) * fields
    inputs = sparse.csr_matrix((ones, columns_NF.reshape(-1), starts), shape=(count, 1 << BITS))
    if setting.numbers == "log1p":
        floats_ND = number_floats(rows.numbers_ND, known)
        inputs = sparse.hstack((inputs, sparse.csr_matrix(floats_ND)), format="csr")
    model = LogisticRegression(C=setting.c, max_iter=500).fit(inputs[:known], rows.label_N[:known])
    yield model.predict_proba(inputs[scored])[:, 1]


contest(SETTINGS, learn)
