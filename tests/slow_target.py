"""``dflash_mp.train`` with targets that take a random time for every frame."""

import os
import random
import time

from dflash_mp import train
from dflash_mp.target.model import FeatureExtractor

if __name__ == "__main__":
    fill = FeatureExtractor.fill
    generator = random.Random(int(os.environ["RANK"]))

    def delayed(self: FeatureExtractor, *arguments: object) -> None:
        time.sleep(generator.uniform(0.0, 0.3))
        fill(self, *arguments)

    FeatureExtractor.fill = delayed
    train.main()
