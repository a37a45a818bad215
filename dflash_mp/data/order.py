"""Which documents make up training micro-batch ``m``: a function of seed and lengths alone."""

from functools import lru_cache

import numpy as np

from dflash_mp.data.documents import Corpus
from dflash_mp.data.packing import pack


class Order:
    """The packs of epoch 0, then those of epoch 1, and so on, in one numbering.

    Args:
        corpus: the documents.
        budget: token slots of a micro-batch.
        seed: of the shuffle.
    """

    def __init__(self, corpus: Corpus, budget: int, seed: int) -> None:
        lengths, weights = corpus.lengths, corpus.weights
        self._epoch = lru_cache(maxsize=2)(
            lambda epoch: pack(lengths, budget, seed, epoch, weights)
        )
        self._ends: list[int] = []

    def end(self, epoch: int) -> int:
        """Micro-batches in epochs ``0..epoch``."""
        while len(self._ends) <= epoch:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + len(self._epoch(len(self._ends))))
        return self._ends[epoch]

    def epoch(self, number: int) -> int:
        """The epoch that micro-batch ``number`` belongs to."""
        epoch = 0
        while self.end(epoch) <= number:
            epoch += 1
        return epoch

    def documents(self, number: int) -> np.ndarray:
        """Document numbers of micro-batch ``number``, in row order."""
        epoch = self.epoch(number)
        first = self.end(epoch - 1) if epoch else 0
        return self._epoch(epoch)[number - first]
