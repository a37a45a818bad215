"""Held-out documents that training gives away: the same prompt, or nearly the same response.

The rule: a held-out response is a near copy when at least ``threshold`` of its distinct runs of
eight tokens are found in one single training response. A response shorter than eight tokens is a
near copy when a training response is identical.
"""

from collections.abc import Iterator

import numpy as np

from dflash_mp.data.documents import Corpus

GRAM = 8
DOCUMENTS_AT_ONCE = 4096
# Odd multipliers of a polynomial hash over 64-bit integers.
BASE, FINAL = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


def shared_prompts(heldout: Corpus, train: Corpus) -> np.ndarray:
    """``[D_heldout]`` bool: the same prompt ids occur in ``train``."""
    prompts = {heldout.prompt(index).tobytes() for index in range(len(heldout))}
    seen = set()
    for index in range(len(train)) if prompts else ():
        prompt = train.prompt(index).tobytes()
        if prompt in prompts:
            seen.add(prompt)
    return np.array([heldout.prompt(i).tobytes() in seen for i in range(len(heldout))], bool)


def copied_share(heldout: Corpus, train: Corpus) -> np.ndarray:
    """``[D_heldout]`` float64: largest share of each response found in one training response.

    The held-out runs form an inverted index; ``train`` streams past it, so the cost grows with
    the number of training tokens and of matches, not with the product of the sets.
    """
    share = np.zeros(len(heldout))
    if len(heldout) == 0:
        return share
    grams, owners, first = _index(heldout)
    totals = np.bincount(owners, minlength=len(heldout))
    for hashes, documents in _grams_in_batches(train):
        at = np.searchsorted(grams, hashes)
        found = np.flatnonzero(grams[np.minimum(at, len(grams) - 1)] == hashes)
        at = at[found]
        counts = first[at + 1] - first[at]
        # One line per (held-out document, training document, gram) that match.
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        held = owners[np.repeat(first[at], counts) + within]
        pair = held * DOCUMENTS_AT_ONCE + np.repeat(documents[found], counts)
        pairs, matches = np.unique(pair, return_counts=True)
        held = pairs // DOCUMENTS_AT_ONCE
        np.maximum.at(share, held, matches / totals[held])
    return share


def _index(heldout: Corpus) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorted distinct hashes, the documents that hold them, and where those of a hash start."""
    parts = [(h, d + at) for at, (h, d) in _numbered(_grams_in_batches(heldout))]
    hashes = np.concatenate([h for h, _ in parts])
    owners = np.concatenate([d for _, d in parts])
    order = np.argsort(hashes, kind="stable")
    hashes, owners = hashes[order], owners[order]
    grams, first = np.unique(hashes, return_index=True)
    return grams, owners, np.append(first, len(hashes))


def _numbered(
    batches: Iterator[tuple[np.ndarray, np.ndarray]],
) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
    for number, batch in enumerate(batches):
        yield number * DOCUMENTS_AT_ONCE, batch


def _grams_in_batches(corpus: Corpus) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Distinct (hash, document) pairs per batch; document numbers count from 0 in the batch."""
    for start in range(0, len(corpus), DOCUMENTS_AT_ONCE):
        stop = min(start + DOCUMENTS_AT_ONCE, len(corpus))
        hashes, documents = [], []
        for index in range(start, stop):
            found = np.unique(gram_hashes(corpus.response(index)))
            hashes.append(found)
            documents.append(np.full(len(found), index - start, np.int64))
        yield np.concatenate(hashes), np.concatenate(documents)


def gram_hashes(response: np.ndarray) -> np.ndarray:
    """``[max(1, n - 7)]`` uint64 hash of every run of eight tokens; of the whole when shorter."""
    width = min(GRAM, len(response))
    tokens = response.astype(np.uint64) + np.uint64(1)
    # The width is part of the hash, so that a short response matches a whole one only.
    hashes = np.full(len(response) - width + 1, np.uint64(width))
    for offset in range(width):
        hashes = (hashes ^ tokens[offset : offset + len(hashes)]) * BASE
        hashes ^= hashes >> np.uint64(29)
    return hashes * FINAL
