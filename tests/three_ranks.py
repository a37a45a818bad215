"""Two targets and a drafter as a sentinel sees them: who they are and what they told."""

import json
import time
from dataclasses import asdict, replace

import torch.distributed as dist

from dflash_mp.cast import place
from dflash_mp.config import FailureConfig, TopologyConfig
from dflash_mp.peers import Beat, Hello, Peers, start_time

LIMITS = FailureConfig(
    beat_s=1,
    silent_s=90,
    gil_s=60,
    setup_s=1800,
    step_s=300,
    save_s=1800,
    wait_s=400,
    stop_s=25,
    max_skips=5,
)
PLACES = [place(rank, 3, 3, TopologyConfig(2, 1)) for rank in range(3)]


def hello(rank: int, pid: int = 0, report: str | None = None) -> Hello:
    who = Hello.mine(PLACES[rank], stuck_s=30)
    pid = pid or who.pid
    return replace(who, pid=pid, started=start_time(pid), report=report)


def beat(phase: str, over: bool = True, frame: str | None = None) -> Beat:
    waits = phase.startswith("wait")
    return Beat(1, time.time(), phase, 1, waits, over, frame)


def peers_of(rank: int, everyone: list[Hello]) -> Peers:
    store = dist.HashStore()
    for one in everyone:
        store.set(f"hello/{one.rank}", json.dumps(asdict(one)))
    peers = Peers(store, PLACES[rank], everyone[rank])
    peers.refresh()
    return peers


def tell(peers: Peers, rank: int, sign: Beat) -> None:
    peers.store.set(f"beat/{rank}", json.dumps(asdict(sign)))
