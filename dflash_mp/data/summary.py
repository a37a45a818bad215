"""What became of the rows of a data set, counted: nothing is lost silently."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_mp.data.documents import Corpus
from dflash_mp.data.sources import Dropped, Source
from dflash_mp.data.tokenize import Tokenised

EXAMPLES = 5
BUCKETS = (0, *(step << power for power in range(4, 16) for step in (2, 3)), 1 << 40)


@dataclass
class Tally:
    """What became of the rows of one set. ``rows_read == trained + dropped`` at all times."""

    rows_read: int = 0
    trained: int = 0
    repaired: int = 0
    """Those of the trained rows that had to be changed."""

    dropped: Counter[str] = field(default_factory=Counter)
    repairs: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Up to ``EXAMPLES`` of each reason, as "file:line: detail"."""

    def add(self, where: str, outcome: Tokenised | Dropped) -> None:
        """Count one row."""
        self.rows_read += 1
        if isinstance(outcome, Dropped):
            self._drop(where, outcome)
            return
        self.trained += 1
        self.repaired += bool(outcome.repairs)
        self.repairs.update(outcome.repairs)
        self.notes.update(outcome.notes)

    def withdraw(self, where: str, reason: Dropped) -> None:
        """A row that was counted as trained is dropped after all."""
        self.trained -= 1
        self._drop(where, reason)

    def merge(self, other: "Tally") -> None:
        """Add the counts of rows that come after those counted here."""
        self.rows_read += other.rows_read
        self.trained += other.trained
        self.repaired += other.repaired
        self.dropped += other.dropped
        self.repairs += other.repairs
        self.notes += other.notes
        for reason, examples in other.examples.items():
            known = self.examples.setdefault(reason, [])
            known += examples[: EXAMPLES - len(known)]

    def reasons(self) -> str:
        """Counted reasons with one example each, on one line."""
        return "; ".join(
            f"{count} {reason} ({self.examples[reason][0]})"
            for reason, count in self.dropped.most_common()
        )

    def _drop(self, where: str, outcome: Dropped) -> None:
        self.dropped[outcome.reason] += 1
        examples = self.examples.setdefault(outcome.reason, [])
        if len(examples) < EXAMPLES:
            examples.append(f"{where}: {outcome.detail}")


def describe_set(corpus: Corpus, tally: Tally, sources: list[Source]) -> dict[str, Any]:
    """Plain data for JSON: what became of the rows, and what is left of them."""
    lengths = corpus.lengths
    tokens, supervised = int(lengths.sum()), int(corpus.loss_mask.sum(dtype=np.int64))
    hashes = {hash(corpus.document(index)[0].tobytes()) for index in range(len(corpus))}
    return {
        "rows_read": tally.rows_read,
        "trained": tally.trained,
        "repaired": tally.repaired,
        "dropped": tally.dropped.total(),
        "dropped_by_reason": dict(tally.dropped.most_common()),
        "examples": tally.examples,
        "repairs": dict(tally.repairs.most_common()),
        "notes": dict(tally.notes.most_common()),
        "documents": len(corpus),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": supervised / tokens if tokens else 0.0,
        "duplicates": len(corpus) - len(hashes),
        "longest": int(lengths.max(initial=0)),
        "length_histogram": length_histogram(lengths),
        "sources": [
            {"name": s.name, "weight": s.weight, "documents": int((corpus.sources == i).sum())}
            for i, s in enumerate(sources)
        ],
    }


def length_histogram(lengths: np.ndarray) -> dict[str, int]:
    """Documents per range of lengths in tokens; empty ranges at both ends are left out."""
    counts, _ = np.histogram(lengths, BUCKETS)
    used = np.flatnonzero(counts)
    return {
        f"{BUCKETS[i]}-{BUCKETS[i + 1] - 1}" if i + 2 < len(BUCKETS) else f"{BUCKETS[i]}-": int(
            counts[i]
        )
        for i in (range(used[0], used[-1] + 1) if len(used) else ())
    }


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The short form, shown at every start."""
    lines = []
    for name in ("train", "heldout"):
        part = summary[name]
        if part["rows_read"] == 0:
            lines.append(f"data.{name}: none")
            continue
        noted = "".join(f", {count:,} {note}" for note, count in part["notes"].items())
        lines.append(
            f"data.{name}: {part['rows_read']:,} rows = {part['trained']:,} trained + "
            f"{part['dropped']:,} dropped; {part['repaired']:,} repaired{noted}; "
            f"{part['documents']:,} documents, {part['tokens']:,} tokens, "
            f"{part['supervised_share']:.0%} supervised, longest {part['longest']:,}; "
            f"{part['duplicates']:,} duplicates"
        )
        for reason, count in part["dropped_by_reason"].items():
            example = part["examples"].get(reason, [""])[0]
            lines.append(f"  dropped {count:,} {reason}, such as {example}")
    return lines
