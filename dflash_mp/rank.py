"""One rank of a training: what all ranks do together before each plays its role.

The launcher's environment says which role that is.
"""

import json
import logging
import os
import threading
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from dflash_mp.cast import (
    TARGET,
    Cast,
    agree,
    enter,
    launcher_store,
    place_from_environment,
    role_timeout,
)
from dflash_mp.checkpoint import Start
from dflash_mp.config import TrainConfig, cache_dir, flat, require
from dflash_mp.data.corpus import check_data, load_prepared, prepare
from dflash_mp.data.summary import summary_lines
from dflash_mp.diagnostics.untouched import patched_torch_names
from dflash_mp.drafter.hf_config import config_json
from dflash_mp.drafter.mask_token import pick_mask_token
from dflash_mp.drafter.step import describe_objective
from dflash_mp.job import Job, drafter_config
from dflash_mp.profiling import recording
from dflash_mp.published import adopt_shape, naming_source
from dflash_mp.report.run_files import changes
from dflash_mp.resume import refuse_other_data
from dflash_mp.roles.drafter import run_drafter
from dflash_mp.roles.means import PROCESSES
from dflash_mp.roles.target import run_target
from dflash_mp.run_folder import claim_folder
from dflash_mp.sentinel import UNLIMITED, guard
from dflash_mp.target.model import check_target, load_config, load_tokenizer
from dflash_mp.tracking import check_trackers
from dflash_mp.warn_once import share_warnings
from dflash_mp.wire.connect import choose_edge

log = logging.getLogger(__name__)


def play(config: TrainConfig, hydra_folder: Path) -> None:
    """Play this rank's part in the run that ``config`` describes."""
    refuse_patched_torch()
    # Before CUDA starts: a drafter's dozen streams do not fit into the default of 8 queues.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    mine = place_from_environment(config.topology)
    folder, config = check(config, hydra_folder)
    launcher = launcher_store(str(folder.resolve()))
    with (
        guard(mine, launcher.this_attempt(), config.failure) as sentinel,
        enter(mine, launcher, config.threads, role_timeout(config)) as cast,
    ):
        share_warnings(cast.client())
        if config.topology.elastic:
            # For the launcher, which decides what becomes of a job that has lost a rank.
            cast.store.set("elastic", "")
        if mine.rank == 0:
            sentinel.phase("prepare", UNLIMITED)
        else:
            sentinel.wait("rank 0, which prepares")
        job = make_job(cast, config, folder, begin(cast, config, folder))
        # Every rank's log has it; on the console it is rank 0's.
        block_size = job.drafter_config.block_size
        log.info("objective: %s", describe_objective(config.loss, block_size))
        with recording(cast, job, sentinel):
            if mine.role == TARGET:
                run_target(cast, job, sentinel, PROCESSES)
            else:
                run_drafter(cast, job, sentinel, PROCESSES)
        sentinel.bye()


def refuse_patched_torch() -> None:
    """With processes there is nothing to patch in torch; whatever did so was loaded before."""
    patched = patched_torch_names()
    require(
        not patched,
        f"something has replaced {', '.join(patched)} in this process: isolation=processes needs "
        "torch as it was installed; look for what patches it at import (sitecustomize, a plugin)",
    )


def check(config: TrainConfig, hydra_folder: Path) -> tuple[Path, TrainConfig]:
    """Refuse what can be seen before anything is loaded; the run folder and what to train."""
    check_data(config.data)
    check_trackers(config.trackers)
    check_target(config.target)
    choose_edge(config.wire.edge, torch.cuda.is_available())
    # Its own is a semaphore of the system, which a process that ends at once would leave behind.
    tqdm.set_lock(threading.RLock())
    return Path(config.output_dir) if config.output_dir else hydra_folder, adopt_shape(config)


def begin(cast: Cast, config: TrainConfig, folder: Path) -> Start:
    """Claim the run folder on rank 0; every rank learns where the run begins."""

    def claim() -> str:
        changed = ", ".join(changes(flat(asdict(config)))) or "none"
        log.info("settings that differ from the defaults: %s", changed)
        start = claim_folder(folder, config, cast.launcher.restarted)
        cast.launcher.claimed()
        path = start.checkpoint
        return json.dumps([path and str(path.resolve()), start.step, start.batches])

    path, step, batches = json.loads(agree(cast, "folder", claim))
    return Start(path and Path(path), step, batches)


def make_job(cast: Cast, config: TrainConfig, folder: Path, start: Start) -> Job:
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
        with naming_source(config):
            mask_token_id = pick_mask_token(tokenizer, target_config, config.drafter.mask_token_id)
        prepared = prepare(config.data, tokenizer, mask_token_id, data_cache(config))
        (folder / "data.json").write_text(json.dumps(prepared.summary, indent=2) + "\n")
        for line in summary_lines(prepared.summary):
            log.info("%s", line)
        return json.dumps([mask_token_id, str(prepared.folder)])

    mask_token_id, data_folder = json.loads(agree(cast, "data", prepare_data))
    job = Job(
        config=config,
        folder=folder,
        place=cast.place,
        target_config=target_config,
        drafter_config=drafter_config(config, target_config, mask_token_id),
        prepared=load_prepared(Path(data_folder)),
        start=start,
    )
    if start.checkpoint is not None:
        shape = config_json(job.drafter_config)
        refuse_other_data(start.checkpoint, job.prepared.folder.name, shape)
    return job


def data_cache(config: TrainConfig) -> Path:
    """Where prepared data is kept between runs."""
    chosen = config.data.cache_dir
    return Path(chosen).expanduser() if chosen else cache_dir() / "data"
