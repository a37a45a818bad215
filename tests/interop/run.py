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
from pathlib import Path

from dflash_mp.bench.peer_environments import PEERS, make_environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main(arguments: list[str]) -> int:
    workdir = ROOT / "outputs" / "interop"
    prepare = [sys.executable, HERE / "prepare.py", workdir, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(prepare, check=True, env=environment)
    rows, failed = [], []
    for peer in PEERS:
        python = make_environment(peer)
        done = subprocess.run(
            [python, HERE / f"peer_{peer.name}.py", workdir],
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


def show(rows: list[dict]) -> None:
    """A line per check, aligned."""
    heads = ("peer", "case", "check", "found")
    widths = [max(len(head), *(len(row[head]) for row in rows)) for head in heads] if rows else []
    for row in rows:
        cells = "  ".join(row[head].ljust(width) for head, width in zip(heads, widths, strict=True))
        sys.stdout.write(f"{'ok    ' if row['ok'] else 'FAILED'}  {cells}\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
