"""What the machine and its Python environment offer; nothing here joins a job."""

import contextlib
import os
import platform
import resource
import shutil
import socket
import threading
import time
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from dflash_mp.checkup.finding import OK, PROBLEM, WARNING, Finding, enough, ok

GB = 1e9
SHARED_MEMORY_BYTES = 1 << 30
"""NCCL's segments between the ranks of a node; containers often have only 64 MB."""
OPEN_FILES = 4096
SLOW_LOOKUP_S = 0.5
SHOWN = ("torch", "transformers", "accelerate", "datasets")


def versions() -> Finding:
    """Python and the packages that decide, against what this package asks for."""
    found = [f"{name} {metadata.version(name)}" for name in SHOWN]
    wrong = unmet_requirements("dflash-mp")
    return enough(
        "versions",
        f"python {platform.python_version()}, {', '.join(found)}"
        + (f"; not as needed: {', '.join(wrong)}" if wrong else ""),
        PROBLEM if wrong else OK,
        "install them in these versions",
    )


def unmet_requirements(package: str) -> list[str]:
    """Requirements of an installed package that the environment does not meet.

    Empty when the package runs from a folder and was never installed.
    """
    try:
        required = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []
    unmet = []
    for requirement in map(Requirement, required):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unmet.append(f"{requirement} (missing)")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{requirement} (found {version})")
    return unmet


def backends() -> Finding:
    """What the ranks can talk over: NCCL between GPUs, gloo between CPUs."""
    names = ["gloo"] if dist.is_gloo_available() else []
    if dist.is_nccl_available():
        names.append("nccl " + ".".join(map(str, torch.cuda.nccl.version())))
    needed = dist.is_nccl_available() if torch.cuda.is_available() else dist.is_gloo_available()
    return enough(
        "backends",
        ", ".join(names) or "none",
        OK if needed else PROBLEM,
        "install a torch that was built with NCCL and gloo",
    )


def device(local_rank: int | None) -> Finding:
    """The GPU of a rank, all GPUs outside of a launcher (None), or the processors."""
    if not torch.cuda.is_available():
        cores, ranks = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return enough(
            "device",
            f"no GPU, {cores} CPU cores, {_memory() / GB:.0f} GB of memory",
            OK if ranks <= cores else WARNING,
            f"{ranks} ranks share them: start at most {cores}",
        )
    count = torch.cuda.device_count()
    if local_rank is not None and local_rank >= count:
        return Finding(
            PROBLEM,
            "device",
            f"local rank {local_rank} has no GPU, this node has {count}",
            f"start with --nproc_per_node {count}",
        )
    numbers = range(count) if local_rank is None else [local_rank]
    return ok("device", ", ".join(_gpu(number) for number in numbers))


def _gpu(number: int) -> str:
    about = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return f"cuda:{number} {about.name} ({free / GB:.0f} of {total / GB:.0f} GB free)"


def _memory() -> int:
    """Bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def shared_memory(folder: Path, cache_bytes: float) -> Finding:
    """Room in the memory file system for NCCL, and for frames with ``features.cache=ram``.

    Without the second a run captures the frames that do not fit again.
    """
    nccl = SHARED_MEMORY_BYTES if torch.cuda.is_available() else 0
    free = shutil.disk_usage(folder).free
    return enough(
        "shared memory",
        f"{free / GB:.1f} GB free in {folder}, up to {(nccl + cache_bytes) / GB:.1f} GB wanted",
        PROBLEM if free < nccl else WARNING if free < nccl + cache_bytes else OK,
        "enlarge it (docker run --shm-size=16g, or --ipc=host), or lower features.cache_gb",
    )


def open_files() -> Finding:
    """Every connection, shard and pipe of a rank is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return enough(
        "open files",
        f"at most {soft} (could be raised to {hard})",
        OK if soft >= OPEN_FILES else WARNING,
        f"ulimit -n {OPEN_FILES} before the start",
    )


def disk(name: str, folder: Path, needed: float) -> Finding:
    """Whether ``folder`` (or its nearest existing parent) can take ``needed`` bytes."""
    path = folder.expanduser().absolute()
    exists = next(parent for parent in (path, *path.parents) if parent.exists())
    if not (exists.is_dir() and os.access(exists, os.W_OK | os.X_OK)):
        return Finding(PROBLEM, name, f"{exists} cannot be written to", "choose another folder")
    free = shutil.disk_usage(exists).free
    return enough(
        name,
        f"{free / GB:.1f} GB free for {folder}, about {needed / GB:.1f} GB needed",
        OK if free >= 2 * needed else WARNING if free >= needed else PROBLEM,
        "make room or choose another folder",
    )


def reverse_lookup() -> Finding:
    """How long the name of a loopback peer takes.

    The server of torch's store asks for it at each connection; a resolver that does not answer
    makes every one of them wait.
    """
    begin = time.monotonic()
    # In a thread, because a resolver's patience is longer than ours.
    asking = threading.Thread(target=_look_up, daemon=True)
    asking.start()
    asking.join(2 * SLOW_LOOKUP_S)
    seconds = time.monotonic() - begin
    slow = seconds > SLOW_LOOKUP_S
    more = "more than " if asking.is_alive() else ""
    return enough(
        "reverse lookup",
        f"the name of ::ffff:127.0.0.1 takes {more}{seconds:.1f} s",
        WARNING if slow else OK,
        "each connection of a rank waits for it: add the line '::ffff:127.0.0.1 localhost' to "
        "/etc/hosts, or repair the name servers in /etc/resolv.conf",
    )


def _look_up() -> None:
    # A quick "no" is as good as a name.
    with contextlib.suppress(OSError):
        socket.getnameinfo(("::ffff:127.0.0.1", 1), socket.NI_NUMERICSERV)


def torch_race() -> Finding:
    """Whether threads of the installed torch would race, and whether somebody patched it."""
    # Only here: it loads torch's compiler, which one rank a node does for all.
    from dflash_mp.diagnostics.mechanism import features
    from dflash_mp.diagnostics.untouched import patched_torch_names

    patched = patched_torch_names()
    if patched:
        return Finding(
            PROBLEM,
            "torch.compile race",
            f"torch is patched: {', '.join(patched)}",
            "this package needs no patch: find out which import does it and remove that",
        )
    kept = "per thread" if features().flag_per_thread else "once per process, so threads race"
    return ok(
        "torch.compile race",
        f"torch {torch.__version__} keeps its tracing flag {kept}; every rank is a process of "
        "its own, torch is not patched",
    )
