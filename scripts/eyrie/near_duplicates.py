"""Texts that say nearly the same, found without comparing each with each.

Two texts are near duplicates when they share a given part of their shingles, runs of a few words (Jaccard
similarity). MinHash signatures, cut into bands, propose the pairs; the similarity itself is then computed
exactly, so nothing below the threshold is ever taken for a repetition, and of pairs just at it fewer than one
in a thousand is missed. The hashes are fixed: equal texts in equal order give equal answers anywhere.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from eyrie.words import words_of

_HASHES = 128
_LEAST_RECALL = 0.999
# Shingles hashed at once, so that a long text takes no more memory than a short one.
_PIECE = 4096

Hashes = NDArray[np.uint64]


class NearDuplicates:
    """Remembers texts, and recognises one that nearly repeats an earlier one; about 8 kB a text."""

    def __init__(self, threshold: float, words: int) -> None:
        """threshold: least Jaccard similarity of a repetition. words: length of a shingle."""
        self._threshold = threshold
        self._words = words
        self._rows = _rows_of_a_band(threshold)
        self._factors = _mixed(np.arange(_HASHES, dtype=np.uint64)) | np.uint64(1)
        self._known: list[Hashes] = []
        self._bands: defaultdict[bytes, list[int]] = defaultdict(list)

    def repeats(self, text: str) -> bool:
        """Whether the text nearly repeats a remembered one; if not, it is remembered itself."""
        shingles = self._shingles(text)
        bands = self._bands_of(shingles)
        candidates = sorted({number for band in bands for number in self._bands.get(band, ())})
        if any(_similarity(shingles, self._known[number]) >= self._threshold for number in candidates):
            return True
        for band in bands:
            self._bands[band].append(len(self._known))
        self._known.append(shingles)
        return False

    def _shingles(self, text: str) -> Hashes:
        """The different shingles' hashes in rising order; a text shorter than a shingle is one by itself."""
        words = words_of(text) or [text]
        hashes = np.array([zlib.crc32(word.encode()) for word in words], dtype=np.uint64)
        length = min(self._words, len(words))
        mixed = np.zeros(len(words) - length + 1, dtype=np.uint64)
        for place in range(length):
            mixed = _mixed(mixed ^ hashes[place : len(words) - length + 1 + place])
        return np.unique(mixed)

    def _bands_of(self, shingles: Hashes) -> list[bytes]:
        """The signature in pieces, each with its place in it: two texts that share one are compared."""
        signature = np.full(_HASHES, np.iinfo(np.uint64).max, dtype=np.uint64)
        for start in range(0, len(shingles), _PIECE):
            hashed = shingles[start : start + _PIECE, None] * self._factors
            signature = np.minimum(signature, hashed.min(axis=0))
        return [
            start.to_bytes(1, "big") + signature[start : start + self._rows].tobytes()
            for start in range(0, _HASHES - self._rows + 1, self._rows)
        ]


def _rows_of_a_band(threshold: float) -> int:
    """The most hashes a band may have so that nearly every pair at the threshold shares a band."""
    for rows in range(_HASHES, 1, -1):
        if 1 - (1 - threshold**rows) ** (_HASHES // rows) >= _LEAST_RECALL:
            return rows
    return 1


def _mixed(values: Hashes) -> Hashes:
    """Each value's bits spread over all 64 (the finaliser of SplitMix64); no two values give the same."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _similarity(one: Hashes, other: Hashes) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)
