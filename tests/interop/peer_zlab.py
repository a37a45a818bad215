"""z-lab's reference package loads the export, reproduces hidden states, cycles and text."""

import sys
import time
from pathlib import Path

import dflash.model
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from peer_checks import cases, report, report_hidden, report_loading
from transformers import AutoModelForCausalLM

PEER = "dflash 0.1.0"


def main(workdir: Path) -> None:
    # Its clock waits for CUDA; cycles are only returned together with times.
    dflash.model._cuda_time = time.perf_counter
    for folder, case, tensors in cases(workdir):
        model, info = DFlashDraftModel.from_pretrained(
            folder / "export", dtype=torch.float32, attn_implementation="sdpa",
            output_loading_info=True,
        )  # fmt: skip
        model.eval()
        report_loading(PEER, case, info)
        hidden = each_anchor(model, tensors)
        report_hidden(PEER, case, "hidden states", hidden, tensors["hidden"])
        target = AutoModelForCausalLM.from_pretrained(case["target"], dtype=torch.float32).eval()
        cycles, texts = decode(model, target, case)
        pooled = sum(map(sum, cycles)) / sum(map(len, cycles))
        report(PEER, case, "cycles", cycles == case["committed"], f"acceptance length {pooled:.3f}")
        report(PEER, case, "text", texts == case["tokens"], f"{sum(map(len, texts))} tokens")


@torch.no_grad()
def each_anchor(model, tensors: dict) -> torch.Tensor:
    """Hidden states ``[A, B, H]``, one block at a time behind its own context, without a mask."""
    noise = tensors["noise"]
    rows = []
    for index, anchor in enumerate(tensors["anchors"].tolist()):
        hidden = model(
            position_ids=torch.arange(anchor + noise.shape[1])[None],
            noise_embedding=noise[index][None],
            target_hidden=tensors["hidden_states"][None, :anchor],
        )
        rows.append(hidden[0])
    return torch.stack(rows)


def decode(model, target, case: dict) -> tuple[list[list[int]], list[list[int]]]:
    cycles, texts = [], []
    budget = case["max_new_tokens"]
    for prompt in case["prompts"]:
        # It drafts smaller blocks when the budget runs out, we verify less of a whole one: the
        # extra budget keeps its blocks whole as long as ours count.
        result = dflash_generate(
            model, target, torch.tensor([prompt]), budget + case["block_size"], None, 0.0,
            return_stats=True,
        )  # fmt: skip
        kept, left = [], budget - 1
        for committed in result.acceptance_lengths:
            if left > 0:
                kept.append(min(committed, left))
                left -= kept[-1]
        cycles.append(kept)
        texts.append(result.output_ids[0, len(prompt) : len(prompt) + budget].tolist())
    return cycles, texts


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
