"""Train a drafter: ``torchrun --nproc_per_node 3 -m dflash_mp.train [key=value ...]``.

Every rank runs this file; the launcher's environment says which part it plays.
"""

import json
import logging
import shutil
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from omegaconf import OmegaConf

from dflash_mp.cast import TARGET, Cast, agree, enter, place_from_environment
from dflash_mp.command import run_command
from dflash_mp.config import TrainConfig, cache_dir, require
from dflash_mp.data.corpus import check_data, load_prepared, prepare
from dflash_mp.drafter.mask_token import pick_mask_token
from dflash_mp.job import Job, drafter_config
from dflash_mp.roles.drafter import run_drafter
from dflash_mp.roles.target import run_target
from dflash_mp.target.model import load_config, load_tokenizer
from dflash_mp.tracking import run_facts

log = logging.getLogger(__name__)

RUN_FACTS = "run.json"
KEPT_BY_OVERWRITE = (".hydra", "rank*.log")


def main() -> None:
    """Entry of every rank, under torchrun and under ``launch.spawn``."""
    run_command("train", TrainConfig, train)


def train(config: TrainConfig, hydra_folder: Path) -> None:
    """Play this rank's part in the run that ``config`` describes."""
    folder = Path(config.output_dir) if config.output_dir else hydra_folder
    mine = place_from_environment(config.topology)
    check_data(config.data)
    with enter(mine, str(folder.resolve()), config.threads) as cast:
        agree(cast, "folder", lambda: claim_folder(folder, config))
        job = make_job(cast, config, folder)
        if mine.role == TARGET:
            run_target(cast, job)
        else:
            run_drafter(cast, job)
        leave(cast)


def claim_folder(folder: Path, config: TrainConfig) -> str:
    """Make ``folder`` this run's own and write down what is being run.

    Raises:
        UserError: it holds a run already.
    """
    if (folder / RUN_FACTS).exists():
        require(
            config.overwrite,
            f"{folder} already holds a run: choose another run_name or output_dir, or say "
            "overwrite=true to delete it",
        )
        keep = {path for pattern in KEPT_BY_OVERWRITE for path in folder.glob(pattern)}
        for path in set(folder.iterdir()) - keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_FACTS).write_text(json.dumps(run_facts(), indent=2) + "\n")
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
    return ""


def make_job(cast: Cast, config: TrainConfig, folder: Path) -> Job:
    """Prepare the data on rank 0, then build the same job on every rank."""
    target_config = load_config(config.target)
    # Refused before any tokenizing: layer ids that the target does not have.
    drafter_config(
        config,
        target_config,
        0 if config.drafter.mask_token_id is None else config.drafter.mask_token_id,
    )

    def prepare_data() -> str:
        tokenizer = load_tokenizer(config.target)
        mask_token_id = pick_mask_token(tokenizer, target_config, config.drafter.mask_token_id)
        prepared = prepare(config.data, tokenizer, mask_token_id, data_cache(config))
        (folder / "data.json").write_text(json.dumps(prepared.summary, indent=2) + "\n")
        return json.dumps([mask_token_id, str(prepared.folder)])

    mask_token_id, data_folder = json.loads(agree(cast, "data", prepare_data))
    return Job(
        config=config,
        folder=folder,
        place=cast.place,
        target_config=target_config,
        drafter_config=drafter_config(config, target_config, mask_token_id),
        prepared=load_prepared(Path(data_folder)),
    )


def data_cache(config: TrainConfig) -> Path:
    """Where prepared data is kept between runs."""
    chosen = config.data.cache_dir
    return Path(chosen).expanduser() if chosen else cache_dir() / "data"


def leave(cast: Cast) -> None:
    """Wait until every rank of the job has come to its end; all ranks take part."""
    cast.store.set(f"bye/{cast.place.rank}", b"")
    ranks = range(cast.place.world_size)
    cast.store.wait([f"bye/{rank}" for rank in ranks], timedelta(days=1))


if __name__ == "__main__":
    main()
