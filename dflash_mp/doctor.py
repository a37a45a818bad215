"""Look whether this machine and a run fit together; takes the keys of the training.

    python -m dflash_mp.doctor target=qwen3_8b data.train=my.jsonl
    torchrun --nproc_per_node 8 -m dflash_mp.doctor target=qwen3_8b

Each line says ok, warning or problem, and the fix. Problems end with exit code 2.

target=smollm2         also checks its tokenizer and chat template, a file of conf/target
data.train=...         also looks whether the files are there
topology.drafters=...  the roles that the ranks would get
wire.edge=...          what would carry the frames
features.cache=...     the room that kept frames need

Under a launcher (also python -m launch.spawn --nproc 3 --module dflash_mp.doctor) the ranks connect
as for training and measure every edge between a target and a drafter.
"""

import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dflash_mp.cast import enter, launcher_store, place_from_environment
from dflash_mp.checkup import machine
from dflash_mp.checkup.edges import CONNECT, measure_edges, measure_role
from dflash_mp.checkup.finding import PROBLEM, WARNING, Finding
from dflash_mp.command import run_command
from dflash_mp.config import TrainConfig, UserError, cache_dir
from dflash_mp.target.frame_cache import MEMORY

ANSWER = timedelta(seconds=90)
"""How long a rank waits for the findings of another one."""
CPU_RANKS = 3
"""What the documents start on a machine without GPUs."""
CACHE_BYTES = 1e9
"""For the converted default target and some tokenised data."""


def doctor(config: TrainConfig, folder: Path) -> None:
    """Print all findings; raises ``UserError``, naming them, when there are problems."""
    if "RANK" not in os.environ:
        found = examine(config)
        show(merged([("", item) for item in found]))
        conclude(found)
        return
    place = place_from_environment(config.topology)
    launcher = launcher_store(f"doctor {folder.resolve()}")
    store = launcher.this_attempt()
    # Shown before the ranks connect, which may fail in ways that end the process.
    found = collect(store, "alone", place.rank, place.world_size, examine(config))
    # A rank without a GPU, or with edges that cannot be, does not join: the others would wait.
    alone = {"device", "rank", "edge"}
    if not announced(store, "cannot join", place.rank, problems(found) & alone):
        try:
            with enter(place, launcher, None, CONNECT) as cast:
                together = [*measure_edges(cast, config.wire.edge), *measure_role(cast)]
        except RuntimeError as error:
            together = [unreachable(error)]
        found += collect(store, "together", place.rank, place.world_size, together)
    store.set(f"bye/{place.rank}", "")
    bad = announced(store, "problems", place.rank, problems(found))
    if place.rank == 0:
        conclude(found)
    elif bad:
        # Rank 0 says which; all leave with the same exit code.
        raise UserError("")


def announced(store: dist.Store, key: str, rank: int, names: set[str]) -> bool:
    """Whether rank 0 has ``names`` in its set; every rank learns the same."""
    if rank == 0:
        store.set(key, " ".join(names))
    store.wait([key], ANSWER * int(os.environ["WORLD_SIZE"]))
    return bool(store.get(key))


def problems(found: list[Finding]) -> set[str]:
    """Names of the findings that are problems."""
    return {finding.name for finding in found if finding.level == PROBLEM}


def examine(config: TrainConfig) -> list[Finding]:
    """What this rank can see by itself: all of it on rank 0, the machine on a node's first rank."""
    env = os.environ
    rank, local_rank = int(env.get("RANK", "0")), env.get("LOCAL_RANK")
    found = [machine.device(None if local_rank is None else int(local_rank))]
    if local_rank in (None, "0"):
        ram = config.features.cache_gb * machine.GB if config.features.cache == "ram" else 0
        found += [
            machine.versions(),
            machine.backends(),
            machine.torch_race(),
            machine.shared_memory(MEMORY, ram),
            machine.open_files(),
            machine.reverse_lookup(),
            machine.disk("cache folder", data_folder(config), cache_bytes(config)),
        ]
    if rank == 0:
        # Only here: the other ranks need neither transformers nor datasets.
        from dflash_mp.checkup.run import check_run

        about, checkpoints = check_run(config, *size())
        found += [*about, machine.disk("run folder", run_folder(config), checkpoints)]
    return found


def unreachable(error: RuntimeError) -> Finding:
    """What torch says when ranks cannot connect."""
    return Finding(
        PROBLEM,
        "connection",
        str(error).splitlines()[0],
        "name the network between the nodes in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, and let "
        "its ports through the firewall",
    )


def size() -> tuple[int, int]:
    """Ranks of a node, and nodes; outside of a launcher what this machine would be started with."""
    if "RANK" not in os.environ:
        return torch.cuda.device_count() if torch.cuda.device_count() > 1 else CPU_RANKS, 1
    ranks = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return local, ranks // local


def run_folder(config: TrainConfig) -> Path:
    """Where the run would be written."""
    return Path(config.output_dir or Path("outputs") / config.run_name)


def data_folder(config: TrainConfig) -> Path:
    """Where prepared data and kept frames would be."""
    return Path(config.data.cache_dir or cache_dir())


def cache_bytes(config: TrainConfig) -> float:
    """What prepared data and frames kept on disk may take."""
    return (config.features.cache_gb * machine.GB if config.features.cache == "disk" else 0) + (
        CACHE_BYTES
    )


def collect(
    store: dist.Store, key: str, rank: int, ranks: int, mine: list[Finding]
) -> list[Finding]:
    """Bring the findings of all ranks to rank 0, which prints them and returns them all."""
    if rank > 0:
        store.set(f"{key}/{rank}", json.dumps([asdict(finding) for finding in mine]))
        return mine
    found = [("rank 0", finding) for finding in mine]
    for other in range(1, ranks):
        try:
            store.wait([f"{key}/{other}"], ANSWER)
        except dist.DistStoreError:
            silent = f"said nothing for {ANSWER.total_seconds():g} s"
            found.append((f"rank {other}", Finding(PROBLEM, "rank", silent, "see its log")))
            continue
        said = json.loads(store.get(f"{key}/{other}"))
        found += [(f"rank {other}", Finding(**finding)) for finding in said]
    show(merged(found))
    return [finding for _, finding in found]


def merged(found: list[tuple[str, Finding]]) -> list[str]:
    """One line per different finding, with the ranks that have it if another one differs."""
    where: dict[Finding, list[str]] = {}
    for rank, finding in found:
        where.setdefault(finding, []).append(rank)
    names = [finding.name for finding in where]
    return [
        finding.line(", ".join(ranks) if names.count(finding.name) > 1 else "")
        for finding, ranks in where.items()
    ]


def show(lines: list[str]) -> None:
    """Print a part of the report."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def conclude(found: list[Finding]) -> None:
    """The last line; raises ``UserError`` when there are problems."""
    bad = sorted(problems(found))
    if bad:
        raise UserError(f"{len(bad)} problem(s): {', '.join(bad)}")
    warnings = {finding for finding in found if finding.level == WARNING}
    show([f"no problems, {len(warnings)} warning(s)"])


if __name__ == "__main__":
    run_command("doctor", TrainConfig, doctor)
