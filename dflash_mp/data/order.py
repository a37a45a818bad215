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
        repeat: pack once and only shuffle the packs in later epochs, so that a micro-batch comes
            again as it was (for kept frames); otherwise every epoch is packed anew.
    """

    def __init__(self, corpus: Corpus, budget: int, seed: int, repeat: bool) -> None:
        self.repeat = repeat

        @lru_cache(maxsize=3)
        def packs(epoch: int) -> list[np.ndarray]:
            return pack(corpus.lengths, budget, seed, epoch, corpus.weights)

        @lru_cache(maxsize=3)
        def shuffled(epoch: int) -> np.ndarray:
            return np.random.default_rng([seed, epoch]).permutation(len(packs(0)))

        self._packs, self._shuffled = packs, shuffled
        self._ends: list[int] = []

    def end(self, epoch: int) -> int:
        """Micro-batches in epochs ``0..epoch``."""
        while len(self._ends) <= epoch:
            before = self._ends[-1] if self._ends else 0
            source = 0 if self.repeat else len(self._ends)
            self._ends.append(before + len(self._packs(source)))
        return self._ends[epoch]

    def place(self, number: int) -> tuple[int, int]:
        """``(epoch, pack)`` of micro-batch ``number``; with ``repeat`` equal packs are equal."""
        epoch = 0
        while self.end(epoch) <= number:
            epoch += 1
        index = number - (self.end(epoch - 1) if epoch else 0)
        return epoch, int(self._shuffled(epoch)[index]) if self.repeat and epoch else index

    def epochs(self, done: int) -> float:
        """Epochs, the last one usually a fraction, in the first ``done`` micro-batches."""
        if not done:
            return 0.0
        epoch, _ = self.place(done - 1)
        begun = self.end(epoch - 1) if epoch else 0
        return epoch + (done - begun) / (self.end(epoch) - begun)

    def documents(self, number: int) -> np.ndarray:
        """Document numbers of micro-batch ``number``, in row order."""
        epoch, index = self.place(number)
        return self._packs(0 if self.repeat else epoch)[index]
