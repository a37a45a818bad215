"""Train a drafter for a frozen target; start one rank per GPU (on a CPU at least two).

    torchrun --nproc_per_node 8 -m dflash_mp.train target=qwen3_8b data.train=my.jsonl

target=smollm2         the frozen model, a file of conf/target; any other one is
                       target=hub target.name=<hub name or folder>
data.train=...         conversations: a file, a folder, a hub dataset, narrow or mixed
data.heldout=...       conversations that acceptance is measured on, never trained on
drafter.layers=... drafter.block_size=...  shape of the drafter; defaults follow the target
loss=ce                ce, dpace, kl, tv or ce+kl
epochs=... steps=...   length of the run; steps, if set, wins
optim.lr=...           peak learning rate
topology.drafters=...  drafter ranks of a node; three eighths of the ranks by default
run_name=...           the run folder is outputs/<run_name>
resume=auto            continue from the newest checkpoint of the run folder
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
