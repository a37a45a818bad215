"""A plan as a table for the terminal."""

from typing import Any

from dflash_mp.plan.scaling import Scale


def table(plan: dict[str, Any]) -> list[str]:
    """Lines of text for what ``make_plan`` gives."""
    return [*models(plan), "", *memory(plan), "", *splits(plan), "", *costs(plan)]


def models(plan: dict[str, Any]) -> list[str]:
    """Work of a token on each side, and what one rank does in a second."""
    lines = ["         parameters    layers   GFLOP/token   MB/token   tokens/s of one rank"]
    for role in ("target", "drafter"):
        one = plan[role]
        layers = f"{one.get('layers_run', one['layers'])}/{one['layers']}"
        lines.append(
            f"{role:8}{one['parameters'] / 1e9:10.3f} G{layers:>10}"
            f"{one['flops_per_token'] / 1e9:14.2f}{one['bytes_per_token'] / 1e6:11.2f}"
            f"{one['rate']:23,.0f}"
        )
    return lines


def memory(plan: dict[str, Any]) -> list[str]:
    """GB of a rank of each role by part."""
    has = plan["machine"]["memory"]
    lines = [f"memory of a rank in GB (has {has / 1e9:.1f})"]
    for role, parts in plan["memory"].items():
        listed = "  ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
        lines.append(f"{role:8}{sum(parts.values()) / 1e9:8.2f} = {listed}")
    return lines


def splits(plan: dict[str, Any]) -> list[str]:
    """Every way to share a node's ranks."""
    best, usual = plan["best"], plan["default"]
    asked = plan["costs"]["per_step"]
    lines = ["targets + drafters   tokens/s   targets busy   drafters busy"]
    for one in plan["splits"]:
        notes = ["best"] * (one == best) + ["default"] * (one == usual)
        if one["step_tokens"] > asked * plan["costs"]["tokens"]:
            notes.append(f"needs micro_batches_per_step={one['drafters'] * one['nodes']}")
        lines.append(
            f"{one['targets']:7d} + {one['drafters']:<8d}{one['rate']:11,.0f}"
            f"{one['target_busy']:15.0%}{one['drafter_busy']:16.0%}   {', '.join(notes)}".rstrip()
        )
    return lines


def costs(plan: dict[str, Any]) -> list[str]:
    """Wire, time and disk of the best split."""
    best, wire, disk = plan["best"], plan["wire"], plan["disk"]
    lines = [
        f"step     {best['step_tokens']:,} tokens in "
        f"{best['step_tokens'] / best['rate']:.2f} s, all-reduce {best['all_reduce_s'] * 1e3:.1f} "
        f"ms, of which {best['exposed_s'] * 1e3:.1f} are waited for and the rest is hidden behind "
        "the backward",
        f"wire     a target sends {wire['target_sends'] / 1e9:.3f} GB/s, a drafter receives "
        f"{wire['drafter_receives'] / 1e9:.3f}: {wire['share_of_link']:.1%} of the link, "
        f"{wire['share_of_host']:.1%} of PCIe if it had to go through the host",
    ]
    if best["nodes"] > 1:
        lines.append(
            f"network  a drafter exchanges {wire['drafter_exchanges_between_nodes'] / 1e9:.3f} "
            f"GB/s with other nodes: {wire['share_of_network']:.1%} of its adapter"
        )
    lines += [
        f"time     {plan['hours']:,.2f} hours, {plan['gpu_hours']:,.0f} GPU-hours, "
        f"{plan['steps']:,} steps",
        f"disk     checkpoint {disk['checkpoint'] / 1e9:.1f} GB, at most "
        f"{disk['checkpoints'] / 1e9:.1f} GB of them, export {disk['export'] / 1e9:.1f} GB",
    ]
    return lines


def scaling(scales: list[Scale]) -> list[str]:
    """Rates and efficiency against nodes."""
    lines = ["nodes   tokens/s (a store on each node)   efficiency   with one store"]
    for one in scales:
        lines.append(
            f"{one.nodes:5d}{one.node_stores:34,.0f}{one.efficiency_node_stores:13.1%}"
            f"{one.efficiency_one_store:17.1%}"
        )
    return lines
