"""What every implementation trains on in ``bench.step``: weights, rows, anchors, as files.

The drafter has the shape of SmolLM2-135M's: a random one, since the time of a step does not
depend on the values. Rows hold a prompt without supervision, then supervised tokens, then the rest.

Legend: B rows, S tokens of a row, N anchors of a row, H hidden size, n tapped layers, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from dflash_mp.config import DrafterConfig
from dflash_mp.drafter.checkpoint_format import save_drafter
from dflash_mp.drafter.hf_config import make_drafter_config
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.speculators_format import write_speculators

BLOCK_SIZE = 16
LAYERS = 5
LAYER_IDS = [1, 7, 14, 20, 26]
MASK_TOKEN = 16
PROMPT = 128
GAMMA = 7.0
DRAFTER = DrafterConfig(
    layers=LAYERS,
    block_size=BLOCK_SIZE,
    tapped_layers=len(LAYER_IDS),
    sliding_layers=0,
    sliding_window=2048,
    mask_token_id=MASK_TOKEN,
    anchors_per_batch=1,
    attention="sdpa",
    precision="float32",
)


@dataclass(frozen=True)
class Shape:
    """The drafter's sizes; those of SmolLM2-135M unless said otherwise."""

    hidden: int = 576
    heads: int = 9
    shared_heads: int = 3
    intermediate: int = 1536
    vocabulary: int = 49152


@dataclass(frozen=True)
class Case:
    """One micro-batch.

    Args:
        anchors: ``N``, drawn per row; rows with fewer candidates are padded as SpecForge does.
        supervision: ``full`` or ``ragged``, a name for ``supervised``.
        length: ``S``.
        supervised: supervised tokens of each row, behind the prompt.
    """

    anchors: int
    supervision: str
    length: int
    supervised: tuple[int, ...]

    @property
    def name(self) -> str:
        """How results call it."""
        return f"{self.anchors}-{self.supervision}"


# One row of 1024 at 512 anchors: a row of 512 has no 512 candidates, and a peer's logits of two
# such rows would be 10 GB. Blocks end inside the supervised span's row: peers differ behind it.
CASES = (
    Case(32, "full", 512, (368, 368)),
    Case(32, "ragged", 512, (368, 14)),
    Case(128, "full", 512, (368, 368)),
    Case(128, "ragged", 512, (368, 56)),
    Case(512, "full", 1024, (880,)),
    Case(512, "ragged", 1024, (224,)),
)


def write_models(folder: Path, shape: Shape) -> None:
    """``drafter/`` and ``speculators/`` with the same weights, ``target/`` with the frozen ends."""
    target = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=30,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.shared_heads,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = DFlashDraftModel(make_drafter_config(target, DRAFTER, LAYER_IDS, MASK_TOKEN))
    model.init_weights(seed=0)
    save_drafter(model, folder / "drafter")
    target.save_pretrained(folder / "target")
    write_speculators(folder / "speculators", model, target, str(folder / "target"))
    generator = torch.Generator().manual_seed(1)
    frozen = {
        f"{name}.weight": torch.randn(shape.vocabulary, shape.hidden, generator=generator)
        for name in ("model.embed_tokens", "lm_head")
    }
    # Of the size that a trained target's head has: the loss starts near log V.
    frozen["lm_head.weight"] *= 0.05
    frozen["model.norm.weight"] = torch.ones(shape.hidden)
    save_file(frozen, folder / "target" / "model.safetensors", {"format": "pt"})


def make_tensors(case: Case, shape: Shape, head: Tensor) -> dict[str, Tensor]:
    """The micro-batch of a case.

    Args:
        case: which one.
        shape: of the drafter.
        head: ``[V, H]`` LM head.

    Returns:
        ``input_ids``, ``loss_mask`` ``[B, S]``; ``hidden_states`` ``[B, S, n * H]``;
        ``final_hidden`` ``[B, S, H]``, from which ``head`` predicts just the next token, so that a
        loss on the target's choice has the labels of a loss on the data; ``anchors`` ``[B, N]``
        ascending and ``keep`` ``[B, N]`` bool.
    """
    generator = torch.Generator().manual_seed(2)
    rows = len(case.supervised)
    ids = torch.randint(MASK_TOKEN + 1, shape.vocabulary, (rows, case.length), generator=generator)
    loss_mask = torch.zeros(rows, case.length, dtype=torch.int64)
    drawn = []
    for row, count in enumerate(case.supervised):
        loss_mask[row, PROMPT : PROMPT + count] = 1
        order = torch.randperm(count - 1, generator=generator)
        drawn.append(PROMPT + order[: case.anchors].sort().values)
    anchors = torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True)
    sizes = torch.tensor([len(one) for one in drawn])
    return {
        "input_ids": ids,
        "loss_mask": loss_mask,
        "hidden_states": torch.randn(
            rows, case.length, len(LAYER_IDS) * shape.hidden, generator=generator
        ),
        "final_hidden": head[ids.roll(-1, 1)],
        "anchors": anchors,
        "keep": torch.arange(anchors.shape[1]) < sizes[:, None],
    }


def useful_flops(case: Case, shape: Shape, tensors: dict[str, Tensor]) -> float:
    """Floating-point operations that no implementation can do without: forward and backward."""
    return product_flops(case, shape, tensors) + attention_flops(shape, tensors)


def product_flops(case: Case, shape: Shape, tensors: dict[str, Tensor]) -> float:
    """Those of the products with weights.

    Only kept blocks; in the last layer, behind attention, and through the frozen head only
    supervised slots; two passes over the head; the context up to the last anchor.
    """
    anchors, keep = tensors["anchors"], tensors["keep"]
    slot = torch.arange(1, BLOCK_SIZE)
    labels = (anchors[:, :, None] + slot).clamp(max=case.length - 1).flatten(1)  # [B, N * 15]
    in_loss = tensors["loss_mask"].gather(1, labels).view(*anchors.shape, -1) * keep[:, :, None]
    rows, slots = int(in_loss.sum()), int(keep.sum()) * BLOCK_SIZE
    context = int((anchors * keep).amax(dim=1).sum())
    size = shape.hidden // shape.heads
    wide, narrow = shape.heads * size, shape.shared_heads * size
    keys_values = 2 * shape.hidden * narrow
    behind = shape.hidden * wide + 3 * shape.hidden * shape.intermediate
    before = shape.hidden * wide + keys_values
    blocks = 6 * (LAYERS * slots * before + ((LAYERS - 1) * slots + rows) * behind)
    # The target's features need no gradient.
    project = 4 * context * len(LAYER_IDS) * shape.hidden**2
    head = 4 * rows * shape.vocabulary * shape.hidden
    return float(blocks + project + 6 * LAYERS * context * keys_values + head)


def attention_flops(shape: Shape, tensors: dict[str, Tensor]) -> float:
    """Those of exactly the visible keys.

    Two products in the forward and five in the backward, as in every kernel that keeps no scores.
    """
    anchors, keep = tensors["anchors"], tensors["keep"]
    visible = int(((anchors + BLOCK_SIZE) * keep).sum()) * BLOCK_SIZE
    return float(14 * LAYERS * visible * shape.hidden)
