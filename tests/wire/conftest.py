"""Ranks as threads, with a real store and real edges."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dflash_mp.cast import Cast, LauncherStore, loopback, place
from dflash_mp.config import TopologyConfig
from launch.spawn import host_store

TIMEOUT = timedelta(seconds=20)
Cluster = Callable[..., list[object]]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """``cluster(targets, drafters, work, edge="shm")`` runs ``work(cast)`` for every rank.

    It returns their results; ``edge`` is for ``open_all``.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback())
    server = host_store()

    def run(
        targets: int, drafters: int, work: Callable[[Cast], object], edge: str = "shm"
    ) -> list[object]:
        ranks = targets + drafters
        dist.PrefixStore("test", server).set("kind of edges", edge)
        topology = TopologyConfig(targets, drafters)

        def rank(number: int) -> object:
            client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=TIMEOUT)
            store = dist.PrefixStore("test", client)
            mine = place(number, ranks, ranks, topology)
            return work(Cast(mine, torch.device("cpu"), store, LauncherStore(store, 0)))

        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(rank, range(ranks)))

    return run
