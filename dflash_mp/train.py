"""Train a drafter: ``torchrun --nproc_per_node 3 -m dflash_mp.train [key=value ...]``.

Every rank runs this file.
"""

from pathlib import Path

from dflash_mp.command import run_command
from dflash_mp.config import TrainConfig


def main() -> None:
    """Entry of every rank, under torchrun and under ``launch.spawn``."""
    run_command("train", TrainConfig, train)


def train(config: TrainConfig, hydra_folder: Path) -> None:
    """Play this rank's part in the run that ``config`` describes."""
    # Only now: a mistake in the configuration is said before torch is loaded, at once.
    if config.isolation == "threads":
        from dflash_mp.threads.play import play
    else:
        from dflash_mp.rank import play

    play(config, hydra_folder)


if __name__ == "__main__":
    main()
