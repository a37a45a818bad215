"""Every document once an epoch, in one numbering, with and without repeated packs."""

import numpy as np
import pytest

from dflash_mp.data.documents import Corpus
from dflash_mp.data.order import Order

LENGTHS = np.random.default_rng(0).integers(2, 60, size=101)


def corpus() -> Corpus:
    offsets = np.concatenate([[0], LENGTHS.cumsum()])
    total = int(offsets[-1])
    return Corpus(
        input_ids=np.zeros(total, np.int32),
        loss_mask=np.ones(total, np.uint8),
        offsets=offsets,
        sources=np.zeros(len(LENGTHS), np.int32),
        rows=np.arange(len(LENGTHS)),
    )


@pytest.mark.parametrize("repeat", [False, True])
def test_an_epoch_holds_every_document_once(repeat: bool) -> None:
    order = Order(corpus(), budget=64, seed=3, repeat=repeat)
    for epoch in range(3):
        start = order.end(epoch - 1) if epoch else 0
        seen = np.concatenate([order.documents(m) for m in range(start, order.end(epoch))])
        assert sorted(seen) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("repeat", [False, True])
def test_epochs_grow_by_the_same_amount_with_each_micro_batch_of_one(repeat: bool) -> None:
    order = Order(corpus(), budget=64, seed=3, repeat=repeat)
    assert order.epochs(0) == 0
    for epoch in range(3):
        start, end = order.end(epoch - 1) if epoch else 0, order.end(epoch)
        grown = [order.epochs(done) - epoch for done in range(start + 1, end + 1)]
        assert grown == pytest.approx(np.linspace(0, 1, end - start + 1)[1:])


def test_repeated_packs_come_whole_in_another_order() -> None:
    order = Order(corpus(), budget=64, seed=3, repeat=True)
    size = order.end(0)
    first = {order.place(m)[1]: order.documents(m).tolist() for m in range(size)}
    again = [order.place(m)[1] for m in range(size, 2 * size)]
    assert sorted(again) == sorted(first)
    assert again != list(range(size))
    for m in range(size, 2 * size):
        assert order.documents(m).tolist() == first[order.place(m)[1]]


def test_without_repeat_the_packs_differ_between_epochs() -> None:
    order = Order(corpus(), budget=64, seed=3, repeat=False)
    epochs = [
        {tuple(order.documents(m)) for m in range(order.end(e - 1) if e else 0, order.end(e))}
        for e in range(2)
    ]
    assert len(epochs[0] & epochs[1]) < len(epochs[0]) / 2
