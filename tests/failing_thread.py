"""``dflash_mp.train`` with a second drafter that fails in its third micro-batch."""

from dflash_mp import train
from dflash_mp.roles import step

if __name__ == "__main__":
    loss_of = step.batch_loss

    def failing(model: object, head: object, batch: object, *rest: object) -> object:
        if batch.number == 3:
            raise ValueError("a fault of purpose")
        return loss_of(model, head, batch, *rest)

    step.batch_loss = failing
    train.main()
