"""``dflash_mp.train`` in which every target makes a frame: the first one waits for the others."""

from collections.abc import Iterator

from dflash_mp import train
from dflash_mp.wire.plan import Frame
from dflash_mp.wire.stream import Sender

if __name__ == "__main__":
    claims = Sender.claims

    def shared(self: Sender) -> Iterator[Frame]:
        for count, frame in enumerate(claims(self)):
            if count == 0:
                self._claims.set(f"begun/{self.place.role_rank}", "")
                everyone = range(self.place.targets_per_node)
                self._claims.wait([f"begun/{target}" for target in everyone])
            yield frame

    Sender.claims = shared
    train.main()
