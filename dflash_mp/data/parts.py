"""Output of a long job that may be killed at any point, written by several ranks.

Each rank appends one line per finished prompt to a file of its own in ``<output>.parts-<digest>``.
The digest is of everything that decides the result, so work done under other settings never mixes
in. The last step merges the lines, in prompt order, into ``<output>``. No collective is involved:
a rank knows what is finished, by whomever, from the files.
"""

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_mp.config import UserError, require

POLL_SECONDS = 0.5


class Parts:
    """The unfinished output of one job, as seen by one rank; a context manager.

    An entry is ``{"index": number of the prompt, "row": its output row or null,
    "skipped": the reason why a turn of it was not answered, or null}``.
    """

    def __init__(self, output: Path, digest: str, rank: int) -> None:
        """Find what earlier runs finished, and open this rank's file.

        Raises:
            UserError: the output exists, another job's parts lie beside it, or a process that is
                still alive writes this rank's file.
        """
        require(not output.exists(), f"output={output} exists: delete it, or choose another output")
        self.output = output
        self.folder = output.with_name(f"{output.name}.parts-{digest[:12]}")
        others = [p for p in output.parent.glob(f"{output.name}.parts-*") if p != self.folder]
        require(
            not others,
            f"{others[0] if others else ''} was begun with other prompts or settings: delete it, "
            "or choose another output",
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._read_up_to: dict[Path, int] = {}
        self._places: dict[int, tuple[Path, int]] = {}
        path = self.folder / f"rank{rank}.jsonl"
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UserError(
                f"{path} is being written by another process: wait for it or end it"
            ) from None
        # A kill in the middle of a write leaves a line without its end.
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)
        self.refresh()

    def __enter__(self) -> "Parts":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def finished(self, index: int) -> bool:
        """Whether the prompt of this number has its entry, as of the last ``refresh``."""
        return index in self._places

    def refresh(self) -> None:
        """Take in the complete lines that appeared in any rank's file."""
        for path in sorted(self.folder.glob("rank*.jsonl")):
            position = self._read_up_to.get(path, 0)
            with path.open("rb") as file:
                file.seek(position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._places[json.loads(line)["index"]] = (path, position)
                    position += len(line)
            self._read_up_to[path] = position

    def append(self, entries: list[dict[str, Any]]) -> None:
        """Write entries; they survive a kill, also of the machine, once this returns."""
        lines = [json.dumps(entry) + "\n" for entry in entries]
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def merge(self, count: int) -> tuple[int, list[str]]:
        """Wait until all ``count`` prompts have entries, then write the output in their order.

        For one rank only. Returns the number of rows written and the reasons of skipped prompts.

        Raises:
            UserError: every prompt was skipped, so there is nothing to write.
        """
        self.refresh()
        while len(self._places) < count:
            time.sleep(POLL_SECONDS)
            self.refresh()
        unfinished = self.output.with_name(self.output.name + ".unfinished")
        written, skipped = 0, []
        with unfinished.open("w", encoding="utf-8", newline="\n") as merged:
            for index in range(count):
                entry = self._entry(index)
                if entry["row"]:
                    merged.write(json.dumps(entry["row"]) + "\n")
                    written += 1
                if entry["skipped"]:
                    skipped.append(entry["skipped"])
            merged.flush()
            os.fsync(merged.fileno())
        if written == 0:
            unfinished.unlink()
            raise UserError(f"all {count} prompts were skipped; the first one: {skipped[0]}")
        unfinished.rename(self.output)
        shutil.rmtree(self.folder)
        return written, skipped

    def _entry(self, index: int) -> dict[str, Any]:
        path, position = self._places[index]
        with path.open("rb") as file:
            file.seek(position)
            entry: dict[str, Any] = json.loads(file.readline())
        return entry
