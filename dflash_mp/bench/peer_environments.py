"""The other public implementations, each in an environment of its own, made on first use.

Used by ``make bench`` and ``make interop``. Nothing of this project is installed there; what runs
in them needs torch and safetensors only.
"""

import os
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Peer:
    """One implementation and what is installed for it."""

    name: str
    packages: tuple[str, ...]
    alone: tuple[str, ...]
    """Installed without their dependencies, most of which a CPU run does not touch."""

    @property
    def release(self) -> str:
        """Its own package with the version, as ``name==version``."""
        return self.alone[0]


COMMON = (TORCH, "numpy", "safetensors")
PEERS = (
    Peer("zlab", (*COMMON, "transformers==5.15.0"), ("dflash==0.1.0",)),
    Peer(
        "specforge",
        (*COMMON, "transformers==5.8.1", "pydantic", "pyyaml"),
        ("specforge==0.2.0",),
    ),
    Peer(
        "speculators",
        (
            *(*COMMON, "transformers==5.15.0", "datasets==5.1.0", "aiohttp", "loguru", "openai"),
            *("protobuf", "psutil", "pydantic-settings", "rich", "typer"),
        ),
        ("speculators==0.9.0", "hs-connectors==0.9.0"),
    ),
)


def make_environment(peer: Peer) -> Path:
    """The python of a peer's environment; made unless its packages are those installed.

    Environments lie in ``.venvs/`` of the checkout, or where ``INTEROP_VENVS`` says.
    """
    folder = Path(os.environ.get("INTEROP_VENVS", ROOT / ".venvs")) / peer.name
    python = folder / "bin" / "python"
    wanted = "\n".join([*peer.packages, *peer.alone])
    stamp = folder / "interop-packages"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    venv.create(folder, clear=True, with_pip=True)
    pip = (str(python), "-m", "pip", "install", "--quiet")
    subprocess.run([*pip, *peer.packages], check=True)
    subprocess.run([*pip, "--no-deps", *peer.alone], check=True)
    stamp.write_text(wanted)
    return python
