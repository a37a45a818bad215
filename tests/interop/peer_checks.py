"""What the peer scripts share; needs torch and safetensors only.

A peer script prints one JSON line per check: ``{peer, case, check, ok, found}``.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file

LIMIT = 1e-5


def cases(workdir: Path) -> Iterator[tuple[Path, dict, dict]]:
    """``(folder, case, tensors)`` of everything that ``prepare.py`` left."""
    for path in sorted(workdir.glob("*/case.json")):
        tensors = load_file(path.parent / "case.safetensors")
        yield path.parent, json.loads(path.read_text()), tensors


def report(peer: str, case: dict, check: str, ok: bool, found: str) -> None:
    line = {"peer": peer, "case": case["name"], "check": check, "ok": bool(ok), "found": found}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def report_hidden(peer: str, case: dict, check: str, theirs, ours) -> None:
    """Largest difference of hidden states ``[A, B, H]``."""
    difference = float((theirs - ours).abs().max())
    report(peer, case, check, difference <= LIMIT, f"{difference:.1e}")


def report_loading(peer: str, case: dict, info: dict) -> None:
    """Strict loading: nothing missing, nothing left over, nothing of another shape."""
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    problems = [str(key) for kind in kinds for key in info[kind]]
    found = f"{len(case['tensors'])} tensors" if not problems else str(problems[:3])
    report(peer, case, "loads strictly", not problems, found)
