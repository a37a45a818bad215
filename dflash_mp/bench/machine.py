"""What a result was measured on, and where results lie."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def about() -> dict[str, Any]:
    """Processor, cores, versions and commit; nothing that names the machine."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }


def cpu_model() -> str:
    """The processor's name and its newest number format, as the kernel tells them."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    flags = fields.get("flags", "").split()
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(wide)})"


def commit() -> str:
    """Short hash of the checkout, with a plus behind it if files but results differ from it."""
    git = ["git", "-C", str(RESULTS.parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=10", "HEAD"], check=True, capture_output=True, text=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", ":/", f":!{RESULTS.name}"],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def write_result(path: Path, found: dict[str, Any]) -> None:
    """``found`` as JSON together with ``about()``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about(), **found}, indent=1) + "\n")
