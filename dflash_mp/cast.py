"""From the launcher's environment to this rank's part: role, role world, store, device.

torchrun and ``launch.spawn`` set the same variables; ``enter`` is the only reader. Both roles get
a default process group of their own (two worlds, both with a rank 0), so Accelerate on the
drafters works unmodified. Nothing here spans the roles but the launcher's store.
"""

import gc
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dflash_mp.config import TopologyConfig, TrainConfig, UserError, require
from dflash_mp.heap import keep_freed_memory

STORE_TIMEOUT = timedelta(minutes=60)
CONNECT_TIMEOUT = timedelta(seconds=30)
TARGET = "target"
DRAFTER = "drafter"
CURRENT_JOB = "dflash_mp/job"
LAUNCHER = "DFLASH_MP_LAUNCHER"
"""Environment variable in which ``launch.spawn`` says that it is the launcher."""


@dataclass(frozen=True)
class Place:
    """Where one rank stands. Role ranks count over all nodes, node by node."""

    rank: int
    world_size: int
    node: int
    nodes: int
    role: str
    role_rank: int
    targets_per_node: int
    drafters_per_node: int

    @property
    def drafters(self) -> int:
        """Drafter ranks of the whole job."""
        return self.drafters_per_node * self.nodes

    @property
    def targets(self) -> int:
        """Target ranks of the whole job."""
        return self.targets_per_node * self.nodes

    @property
    def role_size(self) -> int:
        """Ranks that share this rank's role."""
        return self.targets if self.role == TARGET else self.drafters

    @property
    def name(self) -> str:
        """``target3`` or ``drafter0``: how logs and errors call this rank."""
        return f"{self.role}{self.role_rank}"

    @property
    def is_main(self) -> bool:
        """The one rank that logs, saves and shows progress: the first drafter."""
        return self.role == DRAFTER and self.role_rank == 0


@dataclass(frozen=True)
class Cast:
    """A rank's place together with what it needs to play its part.

    ``store`` is for the main thread only: whoever waits holds the connection.
    """

    place: Place
    device: torch.device
    store: dist.Store
    launcher: "LauncherStore"

    def client(self) -> dist.Store:
        """A connection of its own for another thread, or for a process group and its threads."""
        return connection(self.store)


@dataclass(frozen=True)
class LauncherStore:
    """The launcher's store, which outlives the ranks: torchrun may start them several times."""

    job: dist.Store
    attempt: int

    def this_attempt(self) -> dist.Store:
        """The namespace of the ranks that run now."""
        return dist.PrefixStore(str(self.attempt), self.job)

    @property
    def restarted(self) -> bool:
        """Whether an earlier attempt came as far as ``claimed``."""
        return self.attempt > 0 and self.job.check(["claimed"])

    def claimed(self) -> None:
        """From here on, another attempt continues this one."""
        self.job.set("claimed", "")


def connection(store: dist.Store) -> dist.Store:
    """A connection of one's own to where ``store`` leads, in the same namespace."""
    return store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs


def split(ranks: int, topology: TopologyConfig) -> tuple[int, int]:
    """``(targets, drafters)`` for a node of ``ranks`` processes.

    What is not stated follows; with nothing stated three eighths of the ranks (rounded down, at
    least one) are drafters: 5 + 3 at 8 ranks, 2 + 1 at 3.

    Raises:
        UserError: the numbers do not add up to ``ranks``.
    """
    require(
        ranks >= 2,
        f"{ranks} rank was started, but a target and a drafter need at least 2: "
        "torchrun --nproc_per_node 2 -m dflash_mp.train ...",
    )
    targets, drafters = topology.targets, topology.drafters
    if targets is None and drafters is None:
        drafters = max(1, ranks * 3 // 8)
    if targets is None:
        assert drafters is not None
        targets = ranks - drafters
    if drafters is None:
        drafters = ranks - targets
    require(
        targets >= 1 and drafters >= 1 and targets + drafters == ranks,
        f"topology.targets={topology.targets} and topology.drafters={topology.drafters} need "
        f"{max(targets, 1) + max(drafters, 1)} ranks a node, but the launcher started {ranks}: "
        "change one of them or the number of processes",
    )
    return targets, drafters


def place(rank: int, world_size: int, local_world_size: int, topology: TopologyConfig) -> Place:
    """The part of world rank ``rank``: on every node targets come first, then drafters."""
    targets, drafters = split(local_world_size, topology)
    require(
        world_size % local_world_size == 0,
        f"{world_size} ranks on nodes of {local_world_size}: every node must have the same number",
    )
    node, local = divmod(rank, local_world_size)
    is_target = local < targets
    return Place(
        rank=rank,
        world_size=world_size,
        node=node,
        nodes=world_size // local_world_size,
        role=TARGET if is_target else DRAFTER,
        role_rank=node * targets + local if is_target else node * drafters + local - targets,
        targets_per_node=targets,
        drafters_per_node=drafters,
    )


def check_elastic(topology: TopologyConfig) -> None:
    """Refuse ``topology.elastic`` where a job cannot go on without one of its ranks."""
    if not topology.elastic:
        return
    require(
        os.environ.get(LAUNCHER) == "spawn",
        "topology.elastic=true needs python -m launch.spawn: torchrun ends all ranks as soon as "
        "one of them dies; there, --max-restarts continues from the last checkpoint",
    )
    require(
        not torch.cuda.is_available(),
        "topology.elastic=true needs CPU ranks: a frame that a killed target was sending keeps "
        "NCCL's kernel on the drafter's GPU waiting for ever; use checkpoints and resume=auto",
    )


def place_from_environment(topology: TopologyConfig) -> Place:
    """``place`` for this process; raises ``UserError`` outside of a launcher."""
    require(
        "RANK" in os.environ,
        "this command needs several processes: start it as torchrun --nproc_per_node 3 "
        "-m dflash_mp.train ... or python -m launch.spawn --nproc 3 ...",
    )
    check_elastic(topology)
    world_size = int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return place(int(os.environ["RANK"]), world_size, local_world_size, topology)


def role_timeout(config: TrainConfig) -> timedelta:
    """How long a collective of one role may wait: for all that may keep another rank from it.

    Another drafter may load, restore, wait for a frame, do a step and save. What takes too long of
    these the sentinel or the wire names; NCCL would abort the innocent rank that waits.
    """
    limits = config.failure
    seconds = 2 * limits.setup_s + config.wire.timeout_s + limits.step_s + limits.save_s
    return timedelta(seconds=seconds)


@contextmanager
def enter(
    mine: Place,
    launcher: LauncherStore,
    threads: int | None,
    timeout: timedelta,
) -> Iterator[Cast]:
    """Join the job as ``mine``: connect the store, choose the device, enter the role's world.

    Args:
        mine: this rank's place.
        launcher: the launcher's store, as ``launcher_store`` gives it.
        threads: torch threads of this process; ``None`` leaves torch's default on a GPU and gives
            one thread on a CPU, where several processes share the cores.
        timeout: of joining the role's world and of its collectives.

    Leaving restores the environment and destroys the role's process group. After an exception
    nothing is torn down: other ranks may never answer, and the process is about to end.
    """
    store = launcher.this_attempt()
    device = choose_device(threads)
    if mine.nodes == 1:
        # One node needs no open port: the data plane listens on loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback())
    saved = {key: os.environ[key] for key in ("RANK", "WORLD_SIZE")}
    # Accelerate reads these two; inside a role they describe the role's world.
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(mine.role_rank), str(mine.role_size)
    # Collective of this role's ranks only.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"world/{mine.role}", connection(store)),
        rank=mine.role_rank,
        world_size=mine.role_size,
        timeout=timeout,
    )
    # DDP's reducer also holds the group. Were it the last one to do so, it would destroy the group
    # with the interpreter's lock held, waiting for gloo's threads, which may need that lock.
    group = dist.group.WORLD
    yield Cast(mine, device, store, launcher)
    # Accelerate, when it ends its trackers, ends this as well.
    if dist.is_initialized():
        dist.destroy_process_group()
    # A wrapped drafter that is only kept by a cycle of references goes first.
    gc.collect()
    del group
    os.environ.update(saved)


def connect(job: str) -> dist.Store:
    """A client of the launcher's store, in a namespace of this job and this attempt at it."""
    return launcher_store(job).this_attempt()


def launcher_store(job: str) -> LauncherStore:
    """A client of the launcher's store, in a namespace of this job.

    Args:
        job: a name that differs between the jobs of a sweep: they share one store.

    Raises:
        UserError: the launcher hosts no store.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE", "True") != "True":
        raise UserError(
            "the launcher's store is switched off (TORCHELASTIC_USE_AGENT_STORE=False): unset "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE, the roles meet there"
        )
    # It is there before its ranks are; one that cannot be reached was killed.
    store = dist.TCPStore(
        env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=CONNECT_TIMEOUT
    )
    store.set_timeout(STORE_TIMEOUT)
    attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    name = f"dflash_mp/{env.get('TORCHELASTIC_RUN_ID', '')}/{job}"
    store.set(CURRENT_JOB, json.dumps([name, attempt]))
    return LauncherStore(dist.PrefixStore(name, store), attempt)


def current_job(store: dist.Store) -> dist.Store | None:
    """For the launcher itself: the namespace of the ranks that run now."""
    if not store.check([CURRENT_JOB]):
        return None
    name, attempt = json.loads(store.get(CURRENT_JOB))
    return LauncherStore(dist.PrefixStore(name, store), attempt).this_attempt()


def choose_device(threads: int | None) -> torch.device:
    """The GPU of this local rank, or the CPU; sets the process's threads and, there, its heap."""
    if torch.cuda.is_available():
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        require(
            local < gpus,
            f"local rank {local} has no GPU: this node shows {gpus} (CUDA_VISIBLE_DEVICES); start "
            f"at most {gpus} processes a node, or CUDA_VISIBLE_DEVICES= to use the CPU",
        )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        threads = threads or 1
        keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    return device


def cpu_has_bfloat16() -> bool:
    """Whether this processor multiplies matrices in bfloat16 natively."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def loopback() -> str:
    """Name of the loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def agree(cast: Cast, key: str, work: Callable[[], str]) -> str:
    """World rank 0 does ``work`` and tells every other rank its result, or that it failed.

    Waiting on the store cannot trip a collective's timeout, however long the work takes.

    Raises:
        UserError: on the other ranks, with no text, when rank 0 failed: it has spoken already.
    """
    if cast.place.rank == 0:
        try:
            result = work()
        except BaseException:
            cast.store.set(key, "failed")
            raise
        cast.store.set(key, "ok " + result)
        return result
    cast.store.wait([key], timedelta(days=7))
    word, _, result = cast.store.get(key).decode().partition(" ")
    if word == "failed":
        raise UserError("")
    return result
