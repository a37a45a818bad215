"""What each ``wire.dtype`` does to hidden states, and to a drafter that reads them.

    python -m dflash_mp.bench.wire_dtype outputs/smollm2_narrow/export

The default target runs over the default run's held-out text. Errors are relative to the float32
hidden states of a token and tapped layer: their mean, that without the channels more than 20 times
the median, and the worst token's; then the walk of the drafter in the folder, which was trained
with another type.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from dflash_mp.config import TrainConfig, config_dir, to_config
from dflash_mp.data.corpus import prepare
from dflash_mp.data.packing import collate, pack
from dflash_mp.drafter.checkpoint_format import load_drafter
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.features import FeatureBatch
from dflash_mp.metrics import empty_counts
from dflash_mp.roles.drafter import heldout_values
from dflash_mp.roles.setup import frozen_head
from dflash_mp.roles.target import copy_tokens
from dflash_mp.simulate import simulate
from dflash_mp.target.model import FeatureExtractor, load_target, load_tokenizer
from dflash_mp.wire.frame import DTYPES, Layout, decode

CPU = torch.device("cpu")
OUTLIER = 20.0


def main(arguments: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mp.bench.wire_dtype",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("drafter", type=Path, help="an export folder of a drafter for it")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with initialize_config_dir(config_dir(), version_base="1.3"):
        config = to_config(compose("train"), TrainConfig)
    drafter = load_drafter(parsed.drafter)
    found: dict[str, list[FeatureBatch]] = {kind: [] for kind in DTYPES}
    frame_bytes = {}
    for layout, batches in captured(config, drafter):
        for kind, batch in batches.items():
            found[kind].append(batch)
            frame_bytes[kind] = layout[kind].nbytes
    taps = len(drafter.config.dflash_config["target_layer_ids"])
    say("| wire.dtype | MB a frame | error | without outliers | worst token | walk | loss |")
    say("|---|---|---|---|---|---|---|")
    for kind, batches_of in found.items():
        mean, inner, worst = errors(batches_of, found["float32"], taps)
        walked = walk(config, drafter, batches_of)
        say(
            f"| {kind} | {frame_bytes[kind] / 1e6:.2f} | {mean:.2%} | {inner:.2%} | {worst:.1%} | "
            f"{walked['eval/acceptance_length']:.3f} | {walked['eval/loss']:.4f} |"
        )


def captured(
    config: TrainConfig, drafter: DFlashDraftModel
) -> Iterator[tuple[dict[str, Layout], dict[str, FeatureBatch]]]:
    """Each held-out micro-batch as it comes out of a wire of each type."""
    layer_ids = list(drafter.config.dflash_config["target_layer_ids"])
    model = load_target(config.target, CPU)
    extractor = FeatureExtractor(model, layer_ids)
    mask = int(drafter.config.dflash_config["mask_token_id"])
    heldout = prepare(config.data, load_tokenizer(config.target), mask).heldout
    tokens = config.data.tokens_per_batch
    width = model.config.hidden_size * len(layer_ids)
    layouts = {
        kind: Layout(tokens, len(layer_ids), width, 0, dtype) for kind, dtype in DTYPES.items()
    }
    packs = pack(heldout.lengths[: config.evaluate.max_rows], tokens, 0, 0)
    for number, documents in enumerate(packs):
        batches = {}
        for kind, layout in layouts.items():
            sent = layout.view(layout.allocate(CPU), number)
            copy_tokens(collate(heldout, documents, tokens), sent)
            extractor.fill(sent)
            plain = layout.plain
            batches[kind] = decode(sent, plain.view(plain.allocate(CPU), number))
        yield layouts, batches


def errors(
    batches: list[FeatureBatch], exact: list[FeatureBatch], taps: int
) -> tuple[float, float, float]:
    """Relative errors of a token and layer: mean, mean without outlying channels, largest."""
    value, truth = rows(batches, taps), rows(exact, taps)  # [T, n, H]
    error = value - truth
    share = error.norm(dim=-1) / truth.norm(dim=-1)
    size = truth.abs()
    common = size <= OUTLIER * size.median(-1, keepdim=True).values
    inner = (error * common).norm(dim=-1) / (truth * common).norm(dim=-1)
    return float(share.mean()), float(inner.mean()), float(inner.max())


def rows(batches: list[FeatureBatch], taps: int) -> Tensor:
    """All hidden states of tokens: ``[T, n, H]`` float64."""
    kept = [batch.hidden_states[batch.document_ids >= 0] for batch in batches]
    return torch.cat(kept).double().unflatten(-1, (taps, -1))


def walk(
    config: TrainConfig, drafter: DFlashDraftModel, batches: list[FeatureBatch]
) -> dict[str, float]:
    """What the drafter would get accepted, from these hidden states."""
    head = frozen_head(config, torch.float32, CPU)
    counts = empty_counts(drafter.config.block_size)
    for batch in batches:
        anchors, chunk = config.drafter.anchors_per_batch, config.loss.rows_per_chunk
        counts += simulate(batch, drafter, head, anchors, chunk)[0]
    return heldout_values(counts)


def say(line: str) -> None:
    """One line on the terminal."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
