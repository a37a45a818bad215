"""The DFlash draft model: blocks attend to projected target features and to themselves.

Parameter names are z-lab/dflash's. The target's hidden states are projected once (``fc``,
``hidden_norm``); every layer makes its own context keys and values from that. Embedding and head
are the target's and live in ``frozen_head``.

Legend: S context tokens, A blocks, B block size, H hidden size, n tapped target layers,
N query heads, G key/value heads, D head size.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from dflash_mp.drafter.anchors import Blocks, select_blocks
from dflash_mp.drafter.attention import Attend, Layout, Rule, make_attend
from dflash_mp.drafter.slices import sum_over_slices

BLOCKS_PER_SLICE = 32
"""Blocks whose activations exist at a time; enough rows for matrix products at full speed."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, ``[..., D]`` fp32."""

Objective = Callable[[Tensor, Blocks, Tensor], tuple[Tensor, Tensor]]
"""``(hidden [R, H], blocks, rows [R]) -> (scalar loss with its graph, counts without)``; adds up
over blocks. ``rows`` are flat slot indices into those blocks."""


@dataclass
class DraftCache:
    """Context keys and values of one sequence while decoding; a block's own are never kept."""

    keys: list[Tensor] = field(default_factory=list)
    """Per layer ``[C, G, D]``, rotated."""

    values: list[Tensor] = field(default_factory=list)
    """Per layer ``[C, G, D]``."""

    @property
    def length(self) -> int:
        """Context tokens held so far; also the position of the next one."""
        return self.keys[0].shape[0] if self.keys else 0


class ExactRotaryEmbedding(Qwen3RotaryEmbedding):
    """Rotary frequencies that stay fp32 whatever the model is cast to.

    In bf16 they would be off by whole turns after some thousand positions.
    """

    inv_freq: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != exact.dtype:
            self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def rotation(self, position_ids: Tensor) -> Rotation:
        """Cosines and sines ``[..., D]`` in fp32 for ``position_ids [...]``."""
        frequencies = torch.empty(0, dtype=torch.float32, device=position_ids.device)
        return self(frequencies, position_ids)


class DraftAttention(nn.Module):
    """Block queries over context and block keys; q and k are normed per head, then rotated."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_dim, config.attention_bias
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = size
        self.q_proj = nn.Linear(hidden, heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, shared * size, bias=bias)
        self.v_proj = nn.Linear(hidden, shared * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, hidden, bias=bias)
        self.q_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)

    def keys_values(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """``hidden [..., H]`` to rotated keys and values, each ``[..., G, D]``."""
        value = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        key = self.k_norm(self.k_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        return rotate(key, rotation).to(value.dtype), value

    def forward(
        self,
        hidden: Tensor,
        context: tuple[Tensor, Tensor],
        rotation: Rotation,
        attend: Attend,
    ) -> Tensor:
        """``hidden [A, B, H]``, context keys and values ``[S, G, D]`` -> ``[A, B, N * D]``.

        The caller applies ``o_proj``.
        """
        key, value = self.keys_values(hidden, rotation)  # [A, B, G, D]
        query = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        query = rotate(query, rotation).to(value.dtype)  # [A, B, N, D]
        return attend(query, *context, key, value).flatten(-2)


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP over the block; the context is read, never updated."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        context: tuple[Tensor, Tensor],
        rotation: Rotation,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """``hidden [A, B, H]`` -> ``[A, B, H]``, or ``[R, H]`` for flat slot indices ``rows [R]``.

        What follows attention works row by row, so only the rows that are asked for are computed.
        """
        attended = self.self_attn(self.input_layernorm(hidden), context, rotation, attend)
        if rows is not None:
            attended, hidden = (t.flatten(0, 1).index_select(0, rows) for t in (attended, hidden))
        hidden = hidden + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashDraftModel(nn.Module):
    """A small block-diffusion drafter in z-lab's layout.

    Args:
        config: from ``hf_config.make_drafter_config`` or ``hf_config.read_config``.
        attention: ``sdpa`` (default), ``flex`` (CUDA) or ``eager`` (reference).
        recompute: whether the backward makes each layer's activations again from the layer's
            input, instead of having kept them.
    """

    def __init__(
        self, config: Qwen3Config, attention: str = "sdpa", recompute: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.recompute = recompute
        taps = len(config.dflash_config["target_layer_ids"])
        layers = [DraftLayer(config) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = ExactRotaryEmbedding(config)
        self.rules = layer_rules(config)

    def forward(
        self,
        noise_embedding: Tensor,
        hidden_states: Tensor,
        context_position_ids: Tensor,
        blocks: Blocks,
        rows: Tensor | None = None,
        objective: Objective | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Hidden states of block slots, after the final norm, or an objective of them.

        Every parameter is in the graph of the result.

        Args:
            noise_embedding: ``[A, B, H]`` target embeddings of ``blocks.input_ids``.
            hidden_states: ``[S, n * H]`` tapped target features of the packed row.
            context_position_ids: ``[S]`` positions inside each document.
            blocks: where the blocks are.
            rows: ``[A, B]`` bool, the slots that are needed; values in padded blocks mean nothing.
                For an objective, flex takes every slot but the anchors' instead, so that shapes
                are fixed and the host need not wait for the device to know them.
            objective: of the ``rows``; called with some of the blocks at a time.

        Returns:
            ``[A, B, H]`` with zeros in padded blocks; with ``rows`` just those ``[R, H]`` in
            order, for which the last layer's row-wise work is done; with ``objective`` the sums of
            its loss and counts.
        """
        wanted = blocks.valid if rows is None else blocks.valid | rows.any(dim=1)  # [A]
        kept, low, high = self._extent(blocks, wanted, hidden_states.shape[0])
        whole = select_blocks(blocks, kept)
        own = None if rows is None else rows[kept]

        def share() -> list[Tensor]:
            context = self.project(hidden_states[low:high])  # [S, H]
            rotation = self.rotary_emb.rotation(context_position_ids[low:high])
            pairs = [layer.self_attn.keys_values(context, rotation) for layer, _ in self._layers()]
            return [tensor for pair in pairs for tensor in pair]

        def run(part: slice, shared: list[Tensor]) -> tuple[Tensor, Tensor]:
            assert objective is not None
            assert own is not None
            some = select_blocks(whole, part)
            noise = noise_embedding[kept[part]]
            picked = self._pick(own[part])
            hidden = self._blocks(noise, some, picked, shared, low)
            return objective(hidden, some, picked)

        if objective is None:
            picked = None if own is None else own.flatten().nonzero().flatten()
            hidden = self._blocks(noise_embedding[kept], whole, picked, share(), low)
            if rows is not None:
                return hidden
            hidden = torch.where(whole.valid[:, None, None], hidden, 0.0)
            return hidden.new_zeros(noise_embedding.shape).index_copy(0, kept, hidden)
        if self.attention == "flex" or not torch.is_grad_enabled():
            return run(slice(None), share())
        starts = range(0, len(kept), BLOCKS_PER_SLICE)
        slices = [slice(start, start + BLOCKS_PER_SLICE) for start in starts]
        return sum_over_slices(share, run, slices, list(self.parameters()))

    def _blocks(
        self,
        noise_embedding: Tensor,
        blocks: Blocks,
        rows: Tensor | None,
        shared: list[Tensor],
        low: int,
    ) -> Tensor:
        """All layers over some blocks.

        Args:
            noise_embedding: ``[A, B, H]``.
            blocks: those blocks.
            rows: ``[R]`` flat slot indices, or None for all.
            shared: context keys and values ``[S, G, D]``, layer by layer.
            low: row index of the context's first token.

        Returns:
            ``[A, B, H]``, or ``[R, H]`` with ``rows``.
        """
        layout = Layout(
            anchors=blocks.anchors - low,
            context_start=blocks.context_start - low,
            valid=blocks.valid,
            block_size=blocks.input_ids.shape[1],
            context_length=shared[0].shape[0],
        )
        rotation = self.rotary_emb.rotation(blocks.position_ids)
        attends = {rule: make_attend(self.attention, layout, rule) for rule in set(self.rules)}
        hidden = noise_embedding.to(self.fc.weight.dtype)  # fp32 residual under autocast
        last = len(self.rules) - 1
        for i, (layer, rule) in enumerate(self._layers()):
            only = rows if i == last else None
            pair = (shared[2 * i], shared[2 * i + 1])
            given = (hidden, pair, rotation, attends[rule], only)
            if self.recompute and torch.is_grad_enabled():
                # Nothing in a layer is random.
                hidden = checkpoint(layer, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(*given)
        return self.norm(hidden)

    def _pick(self, rows: Tensor) -> Tensor:
        """Flat indices ``[R]`` of the slots in ``rows [A, B]``; for flex, of all but slot 0."""
        if self.attention != "flex":
            return rows.flatten().nonzero().flatten()
        slots = torch.arange(rows.numel(), device=rows.device).view(rows.shape)
        return slots[:, 1:].flatten()

    def _extent(self, blocks: Blocks, wanted: Tensor, length: int) -> tuple[Tensor, int, int]:
        """Blocks to compute and the slice of the row they can see.

        Flex works on fixed shapes, so it gets everything. The others get the ``wanted [A]``
        blocks; if there are none, one is kept, so that every parameter still gets a gradient.
        """
        device = wanted.device
        if self.attention == "flex":
            return torch.arange(wanted.numel(), device=device), 0, length
        kept = wanted.nonzero().flatten()  # [kept]
        if kept.numel() == 0:
            return torch.zeros(1, dtype=torch.int64, device=device), 0, 0
        return kept, int(blocks.context_start[kept].min()), int(blocks.anchors[kept].max())

    def _layers(self) -> Iterator[tuple[DraftLayer, Rule]]:
        return zip(cast(Iterable[DraftLayer], self.layers), self.rules, strict=True)

    def project(self, hidden_states: Tensor) -> Tensor:
        """Context features: ``[S, n * H]`` target hidden states -> ``[S, H]``."""
        if not torch.is_autocast_enabled(hidden_states.device.type):
            hidden_states = hidden_states.to(self.fc.weight.dtype)
        return self.hidden_norm(self.fc(hidden_states))

    def draft(
        self, noise_embedding: Tensor, new_hidden_states: Tensor, cache: DraftCache
    ) -> Tensor:
        """One block while decoding; equals ``forward`` with the whole context given at once.

        Args:
            noise_embedding: ``[B, H]`` embeddings of the last committed token and the masks.
            new_hidden_states: ``[C, n * H]`` target features of the tokens committed since the
                last call, the last committed token excluded (it has none yet).
            cache: updated in place with those ``C`` tokens.

        Returns:
            ``[B, H]`` after the final norm.
        """
        device = noise_embedding.device
        start = cache.length
        end = start + new_hidden_states.shape[0]
        context = self.project(new_hidden_states)  # [C, H]
        size = noise_embedding.shape[0]
        position = torch.arange(start, end + size, device=device)
        new_rotation = self.rotary_emb.rotation(position[: end - start])
        rotation = self.rotary_emb.rotation(position[None, end - start :])
        layout = Layout(
            anchors=torch.full((1,), end, device=device),
            context_start=torch.zeros(1, dtype=torch.int64, device=device),
            valid=torch.ones(1, dtype=torch.bool, device=device),
            block_size=size,
            context_length=end,
        )
        backend = "eager" if self.attention == "eager" else "sdpa"
        attends = {rule: make_attend(backend, layout, rule) for rule in set(self.rules)}
        hidden = noise_embedding[None].to(self.fc.weight.dtype)  # [1, B, H]
        for i, (layer, rule) in enumerate(self._layers()):
            key, value = layer.self_attn.keys_values(context, new_rotation)
            if start:
                key = torch.cat([cache.keys[i], key])
                value = torch.cat([cache.values[i], value])
                cache.keys[i], cache.values[i] = key, value
            else:
                cache.keys[i:], cache.values[i:] = [key], [value]
            hidden = layer(hidden, (key, value), rotation, attends[rule])
        return self.norm(hidden)[0]

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Matrices from N(0, ``initializer_range``), norms 1, biases 0; same on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif parameter.dim() == 1:
                parameter.zero_()
            else:
                drawn = torch.empty(parameter.shape).normal_(
                    0.0, self.config.initializer_range, generator=generator
                )
                parameter.copy_(drawn)


def rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """Apply rotary position embedding in fp32 to ``states [..., heads, D]``."""
    cos, sin = rotation[0].unsqueeze(-2), rotation[1].unsqueeze(-2)
    return states.float() * cos + rotate_half(states.float()) * sin


def layer_rules(config: Qwen3Config) -> list[Rule]:
    """Visibility of each layer: full ones bidirectional, sliding ones causal.

    ``config.is_causal``, where a published drafter sets it, decides causality for all layers.
    """
    rules = []
    for kind in config.layer_types:
        slides = kind == "sliding_attention"
        causal = slides if config.is_causal is None else config.is_causal
        rules.append(Rule(window=config.sliding_window if slides else None, causal=causal))
    return rules
