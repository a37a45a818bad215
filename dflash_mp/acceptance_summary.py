"""What rows of real decoding add up to; needs no torch.

The acceptance length is the number of tokens that one target forward commits: the accepted drafts
plus the target's own token, between 1 and the block size. The token of the prefill is not counted.
"""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def merge_results(rows: Sequence[Row]) -> dict[str, Any]:
    """What rows of one block size, from any number of ranks, add up to; JSON-ready.

    ``acceptance_length`` is pooled over cycles, ``prompt_acceptance_length`` the mean over prompts
    of each prompt's mean, which weighs short answers more. ``histogram[c - 1]`` counts cycles that
    committed ``c`` tokens. ``slot_acceptance_rate[k - 1]`` is the share of cycles whose slot ``k``
    was accepted among those that accepted all slots before it and put ``k`` to the test. Rates and
    lengths over nothing are ``None``. ``same``, ``ties`` and ``different`` count prompts by how
    their text compares with plain decoding. Tokens per second leave the prefill out.
    """
    sizes = {row["block_size"] for row in rows}
    assert len(sizes) <= 1, f"rows of several block sizes: {sizes}"
    slots = max(sizes, default=1)
    committed = [count for row in rows for count in row["committed"]]
    cycles = [pair for row in rows for pair in zip(row["accepted"], row["proposed"], strict=True)]
    means = [_ratio(sum(row["committed"]), len(row["committed"])) for row in rows]
    known = [mean for mean in means if mean is not None]
    timed = [row for row in rows if row["plain_seconds"] is not None]
    speed = _ratio(sum(committed), sum(row["decode_seconds"] for row in rows))
    plain_speed = _ratio(
        sum(row["plain_tokens"] - 1 for row in timed), sum(row["plain_seconds"] for row in timed)
    )
    verdicts = [row["verdict"] for row in rows]
    return {
        "block_size": slots,
        "prompts": len(rows),
        "cycles": len(committed),
        "tokens": sum(len(row["tokens"]) for row in rows),
        "acceptance_length": _ratio(sum(committed), len(committed)),
        "prompt_acceptance_length": _ratio(sum(known), len(known)),
        "histogram": [committed.count(size) for size in range(1, slots + 1)],
        "slot_acceptance_rate": [
            _ratio(
                sum(accepted >= slot for accepted, _ in cycles),
                sum(accepted >= slot - 1 and proposed >= slot for accepted, proposed in cycles),
            )
            for slot in range(1, slots)
        ],
        "same": verdicts.count("same"),
        "ties": verdicts.count("tie"),
        "different": verdicts.count("different"),
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain_speed,
        "speedup": None if speed is None or plain_speed is None else speed / plain_speed,
    }


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None
