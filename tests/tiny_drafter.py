"""A tiny drafter, what it trains on, and how, for tests that call its step."""

import torch

from dflash_mp.config import DrafterConfig, LossConfig
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.hf_config import read_config
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.features import FeatureBatch

WIDTH, VOCAB, BLOCK, MASK, TAPS, ANCHORS = 16, 41, 5, 40, 2, 6
LENGTHS, PADDING = (13, 11), 4
GAMMA, ALPHA = 2.5, 0.3
DRAFTER = DrafterConfig(
    layers=2,
    block_size=BLOCK,
    tapped_layers=TAPS,
    sliding_layers=0,
    sliding_window=64,
    mask_token_id=MASK,
    anchors_per_batch=ANCHORS,
    attention="sdpa",
    precision="float32",
)


def loss_config(kind: str, labels: str, decay: bool, gamma: float | None = GAMMA) -> LossConfig:
    return LossConfig(kind, labels, decay, gamma, dpace_alpha=ALPHA, rows_per_chunk=7)


def make_batch() -> FeatureBatch:
    """Two documents and padding; some response tokens are not supervised."""
    generator = torch.Generator().manual_seed(3)
    size = sum(LENGTHS) + PADDING
    draw = lambda width: torch.randn(size, width, generator=generator)  # noqa: E731
    mask = torch.rand(size, generator=generator) < 0.8
    mask[sum(LENGTHS) :] = False
    padded = [*LENGTHS, PADDING]
    return FeatureBatch(
        number=1,
        input_ids=torch.randint(0, MASK, (size,), generator=generator, dtype=torch.int32),
        position_ids=torch.cat([torch.arange(n, dtype=torch.int32) for n in padded]),
        document_ids=torch.tensor([0, 1, -1], dtype=torch.int32).repeat_interleave(
            torch.tensor(padded)
        ),
        loss_mask=mask.to(torch.uint8),
        hidden_states=draw(TAPS * WIDTH),
        final_hidden=draw(WIDTH),
    )


def make_model(attention: str = "sdpa", **more: object) -> DFlashDraftModel:
    """Two layers; ``more`` is of their configuration."""
    config = read_config(
        {
            "hidden_size": WIDTH,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "num_hidden_layers": 2,
            "vocab_size": VOCAB,
            "num_target_layers": 4,
            "initializer_range": 0.3,
            "block_size": BLOCK,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
            **more,
        }
    )
    return DFlashDraftModel(config, attention)


def make_head(softcap: float | None) -> FrozenHead:
    generator = torch.Generator().manual_seed(5)
    embedding, weight = (torch.randn(VOCAB, WIDTH, generator=generator) for _ in range(2))
    return FrozenHead(embedding, weight, softcap=softcap)
