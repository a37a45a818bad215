"""Measured acceptance as a table for the terminal and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Summary = dict[str, Any]


def table(summaries: Sequence[Summary]) -> list[str]:
    """Lines of text: one row per block size, then the two distributions."""
    lines = [
        "block  acceptance length   target   tokens/s  tokens/s  speed  output against plain",
        " size  pooled  per prompt  forwards  drafted     plain     up  same  tied  different",
    ]
    for one in summaries:
        lines.append(
            f"{one['block_size']:5d}  {_number(one['acceptance_length'], 6, 2)}"
            f"  {_number(one['prompt_acceptance_length'], 10, 2)}  {one['cycles']:8d}"
            f"  {_number(one['tokens_per_second'], 7, 1)}"
            f"  {_number(one['plain_tokens_per_second'], 8, 1)}  {_number(one['speedup'], 5, 2)}"
            f"  {one['same']:4d}  {one['ties']:4d}  {one['different']:9d}"
        )
    most = max(one["block_size"] for one in summaries)
    columns = "".join(f"{number:6d}" for number in range(1, most + 1))
    lines += ["", f"share of target forwards that committed so many tokens, in %\n block{columns}"]
    for one in summaries:
        total = sum(one["histogram"])
        shares = [100 * count / total if total else None for count in one["histogram"]]
        lines.append(f"{one['block_size']:6d}" + "".join(_number(s, 6, 1) for s in shares))
    lines += [
        "",
        f"acceptance of a slot once all before it are accepted, in %\n block{columns[:-6]}",
    ]
    for one in summaries:
        rates = [None if r is None else 100 * r for r in one["slot_acceptance_rate"]]
        lines.append(f"{one['block_size']:6d}" + "".join(_number(r, 6, 1) for r in rates))
    return lines


def plot(summaries: Sequence[Summary], path: Path) -> None:
    """Histogram of committed tokens, acceptance by slot, and speed, as a PNG."""
    # Slow to import, and only wanted at the end.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for index, one in enumerate(summaries):
        size, total = one["block_size"], max(1, sum(one["histogram"]))
        length = one["acceptance_length"]
        label = f"block {size}" + ("" if length is None else f": {length:.2f}")
        width = 0.8 / len(summaries)
        places = [c + (index + 0.5) * width - 0.4 for c in range(1, size + 1)]
        left.bar(places, [count / total for count in one["histogram"]], width, label=label)
        slots = [k for k, rate in enumerate(one["slot_acceptance_rate"], 1) if rate is not None]
        rates = [rate for rate in one["slot_acceptance_rate"] if rate is not None]
        middle.plot(slots, rates, marker="o", label=f"block {size}")
    left.set(
        xlabel="tokens committed", ylabel="share of target forwards", title="Acceptance length"
    )
    left.legend()
    middle.set(xlabel="slot", ylabel="rate", title="Accepted once all before are", ylim=(0, 1))
    middle.xaxis.get_major_locator().set_params(integer=True)
    names = ["plain"] + [f"block {one['block_size']}" for one in summaries]
    speeds = [summaries[0]["plain_tokens_per_second"]]
    speeds += [one["tokens_per_second"] for one in summaries]
    right.bar(names, [speed or 0.0 for speed in speeds])
    right.set(ylabel="tokens per second", title="Decoding, one prompt at a time")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"
