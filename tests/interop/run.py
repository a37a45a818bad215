"""Let the peers' own packages judge our exports.

``python tests/interop/run.py [<export folder> [<target> [<prompts>]]]``: the golden drafter always,
and the export of a run if one is named (for the default target and prompts unless those are named,
too). Every peer gets an environment of its own under ``.venvs/``, made on first use. Prints a
table, peer by check, and exits with 1 on any mismatch.
"""

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Peer:
    """What is installed for one peer, and the script that lets it judge."""

    name: str
    script: str
    packages: tuple[str, ...]
    alone: tuple[str, ...]
    """Installed without their dependencies, most of which a CPU run does not touch."""


COMMON = (TORCH, "numpy", "safetensors")
PEERS = (
    Peer("zlab", "peer_zlab.py", (*COMMON, "transformers==5.15.0"), ("dflash==0.1.0",)),
    Peer(
        "specforge",
        "peer_specforge.py",
        (*COMMON, "transformers==5.8.1", "pydantic", "pyyaml"),
        ("specforge==0.2.0",),
    ),
    Peer(
        "speculators",
        "peer_speculators.py",
        (
            *(*COMMON, "transformers==5.15.0", "datasets==5.1.0", "aiohttp", "loguru", "openai"),
            *("protobuf", "psutil", "pydantic-settings", "rich", "typer"),
        ),
        ("speculators==0.9.0", "hs-connectors==0.9.0"),
    ),
)


def main(arguments: list[str]) -> int:
    workdir = ROOT / "outputs" / "interop"
    prepare = [sys.executable, HERE / "prepare.py", workdir, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(prepare, check=True, env=environment)
    rows, failed = [], []
    for peer in PEERS:
        python = make_environment(peer)
        done = subprocess.run(
            [python, HERE / peer.script, workdir],
            check=False, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode:
            failed.append(peer.name)
    show(rows)
    for name in failed:
        sys.stdout.write(f"FAILED  {name} ended with an error, see above\n")
    good = sum(row["ok"] for row in rows)
    sys.stdout.write(f"\n{good} passed, {len(rows) - good + len(failed)} failed\n")
    return 0 if good == len(rows) > 0 and not failed else 1


def make_environment(peer: Peer) -> Path:
    """The python of a peer's environment; made unless its packages are those installed."""
    folder = Path(os.environ.get("INTEROP_VENVS", ROOT / ".venvs")) / peer.name
    python = folder / "bin" / "python"
    wanted = "\n".join([*peer.packages, *peer.alone])
    stamp = folder / "interop-packages"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    venv.create(folder, clear=True, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *peer.packages], check=True)
    subprocess.run([*pip, "--no-deps", *peer.alone], check=True)
    stamp.write_text(wanted)
    return python


def show(rows: list[dict]) -> None:
    """A line per check, aligned."""
    heads = ("peer", "case", "check", "found")
    widths = [max(len(head), *(len(row[head]) for row in rows)) for head in heads] if rows else []
    for row in rows:
        cells = "  ".join(row[head].ljust(width) for head, width in zip(heads, widths, strict=True))
        sys.stdout.write(f"{'ok    ' if row['ok'] else 'FAILED'}  {cells}\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
