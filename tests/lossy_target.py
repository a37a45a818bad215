"""``dflash_mp.train`` with a target that forgets to send its fifth frame."""

from dflash_mp import train
from dflash_mp.wire.stream import Sender

if __name__ == "__main__":
    submit = Sender.submit

    def lossy(self: Sender, slot: object, frame: object, *more: object) -> None:
        if frame.k == 4:
            self._free.put(slot)
        else:
            submit(self, slot, frame, *more)

    Sender.submit = lossy
    train.main()
