"""Gradients of whole jobs against a plain loss in one process, in float64, one anchor at a time."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash_mp.data.corpus import load_prepared
from dflash_mp.data.order import Order
from dflash_mp.data.packing import collate
from dflash_mp.drafter.anchors import sample_anchors
from dflash_mp.drafter.hf_config import read_config
from dflash_mp.drafter.model import DFlashDraftModel, DraftCache
from dflash_mp.features import FeatureBatch

pytestmark = pytest.mark.distributed

BETA1 = 0.9
GAMMA = 1.5
ANCHORS = 8
TOKENS = 64


def cross_entropy(logits: Tensor, target: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(logits, label)


def divergence(logits: Tensor, target: Tensor, label: Tensor) -> Tensor:
    p, q = target.softmax(-1), logits.softmax(-1)
    return (p * (p / q).log()).sum()


def plain_gradient(
    target_folder: Path, run: Path, micro_batches: int, objective: Callable[..., Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the first step, computed without packing, masks, chunks or ranks.

    Every block is drafted on its own, as in decoding, from the features of its own document run
    through the target alone.
    """
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float64).eval()
    config = read_config(json.loads((run / "export" / "config.json").read_text()))
    model = DFlashDraftModel(config)
    model.init_weights(seed=0)
    model.double()
    embedding, head = target.get_input_embeddings().weight, target.lm_head.weight
    mask_token, size = config.dflash_config["mask_token_id"], config.block_size
    data = load_prepared(next((run.parent / "cache").glob("*/train.safetensors")).parent)
    order = Order(data.train, TOKENS, seed=0, repeat=False)
    loss, weight = torch.zeros((), dtype=torch.float64), 0.0
    for number in range(micro_batches):
        documents = order.documents(number)
        packed = collate(data.train, documents, TOKENS)
        batch = FeatureBatch(number, **vars(packed), hidden_states=torch.empty(TOKENS, 0))
        anchors, valid = sample_anchors(batch, ANCHORS, seed=0)
        start = 0
        for document in documents:
            ids, mask = (torch.tensor(array) for array in data.train.document(document))
            with torch.no_grad():
                output = target(ids[None].long(), output_hidden_states=True)
            states = output.hidden_states
            features = torch.cat([states[1][0], states[3][0]], dim=-1)
            for anchor in anchors[valid].tolist():
                a = anchor - start
                if not 0 <= a < len(ids):
                    continue
                block = torch.full((size,), mask_token)
                block[0] = ids[a]
                hidden = model.draft(embedding[block].detach(), features[:a], DraftCache())
                for k in range(1, size):
                    if a + k < len(ids) and mask[a + k]:
                        w = float(torch.exp(torch.tensor(-(k - 1) / GAMMA, dtype=torch.float64)))
                        logits = hidden[k] @ head.detach().T
                        # The target's prediction of the token at a + k is made one token before.
                        predicted = output.logits[0, a + k - 1]
                        loss = loss + w * objective(logits, predicted, ids[a + k].long())
                        weight += w
            start += len(ids)
    (loss / weight).backward()
    return float(loss.detach()) / weight, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "drafters", "micro_batches", "objective"),
    [
        (2, 1, 1, cross_entropy),
        (3, 2, 2, cross_entropy),
        (3, 1, 3, cross_entropy),
        (4, 3, 4, cross_entropy),
        (2, 1, 2, divergence),
    ],
    ids=["1+1 x 1", "1+2 x 1", "2+1 x 3", "1+3 x 2, two padded", "1+1 x 2, kl"],
)
def test_the_gradient_is_that_of_a_plain_loss_over_the_whole_step(
    launch: Callable[..., object],
    tiny_target: Path,
    tmp_path: Path,
    ranks: int,
    drafters: int,
    micro_batches: int,
    objective: Callable[..., Tensor],
) -> None:
    result = launch(
        ranks,
        f"topology.drafters={drafters}",
        f"micro_batches_per_step={micro_batches}",
        "steps=1",
        f"loss={'kl' if objective is divergence else 'ce'}",
        f"loss.gamma={GAMMA}",
        f"drafter.anchors_per_batch={ANCHORS}",
        f"data.tokens_per_batch={TOKENS}",
        "optim.max_grad_norm=1e9",
        "schedule=constant",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    run = tmp_path / "run"
    loss, gradient = plain_gradient(tiny_target, run, micro_batches, objective)

    if objective is divergence:
        told = "objective: kl, labels from the target, weights exp(-(slot - 1) / 1.5)"
        assert told in result.stdout + result.stderr
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert row["train/loss"] == pytest.approx(loss, rel=1e-5)
    norm = torch.sqrt(sum(g.square().sum() for g in gradient.values()))
    assert row["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    # AdamW's first moment after one step is (1 - beta1) times the gradient it was given.
    moments = load_file(run / "checkpoints" / "step-000001" / "optimizer.safetensors")
    matrices = [name for name in gradient if gradient[name].ndim >= 2]
    names = matrices + [name for name in gradient if gradient[name].ndim < 2]
    for number, name in enumerate(names):
        given = moments[f"{number}.exp_avg"].double() / (1 - BETA1)
        scale = gradient[name].abs().max()
        torch.testing.assert_close(given, gradient[name], atol=1e-4 * float(scale), rtol=1e-3)
