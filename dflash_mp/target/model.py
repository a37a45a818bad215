"""The frozen target: loading it, and the hidden states of its tapped layers.

The forward runs up to the deepest tapped layer and stops there; the LM head never runs. Hidden
states go straight from a layer's output into the outgoing frame.

Legend: S token slots of a packed row, n tapped layers, H hidden size.
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dflash_mp.config import TargetConfig, UserError, require
from dflash_mp.features import FeatureBatch
from dflash_mp.progress import progress_bar
from dflash_mp.quantise import quantise
from dflash_mp.target.compiled import with_compiled_layers
from dflash_mp.target.layers import capturing
from dflash_mp.target.smollm2 import converted_folder
from dflash_mp.warn_once import warn_once

log = logging.getLogger(__name__)

PADDED_ROW_MULTIPLE = 64
PADDED_TOKENS = 4096
LEAK_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative difference in rows of one shape, by grouped kernels of experts; others have none."""
SHIFT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""Relative difference that rounding explains between shapes and kernels over many layers."""
MIXES_ADVICE = (
    "the target runs padded rows instead, which is slower where lengths differ; if its layers "
    "should not mix them, try target.attention=eager or target.dtype=float32"
)


def resolve(target: TargetConfig) -> str:
    """The folder or hub name behind ``target.name``; ``smollm2`` is the packaged default.

    Raises:
        UserError: a path that does not exist.
    """
    if target.name == "smollm2":
        return str(converted_folder())
    looks_local = target.name.startswith((".", "/", "~"))
    folder = Path(target.name).expanduser()
    if looks_local and not folder.is_dir():
        raise UserError(f"target.name={target.name}: no such folder")
    return str(folder) if folder.is_dir() else target.name


def check_target(target: TargetConfig) -> None:
    """Refuse a target folder that is not there; loads and converts nothing."""
    if target.name != "smollm2":
        resolve(target)


def load_config(target: TargetConfig):  # type: ignore[no-untyped-def]  # a transformers class
    """The target's configuration; weights are not touched.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(
            resolve(target), revision=target.revision, trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"target.name={target.name}: cannot read its config: {str(error).splitlines()[0]}"
        ) from None


def load_tokenizer(target: TargetConfig):  # type: ignore[no-untyped-def]  # a transformers class
    """The target's tokenizer with its chat template."""
    return AutoTokenizer.from_pretrained(
        resolve(target), revision=target.revision, trust_remote_code=target.trust_remote_code
    )


def target_dtype(target: TargetConfig, device: torch.device) -> torch.dtype:
    """``target.dtype``; auto is bfloat16 on a GPU and float32 on a CPU.

    In float32 greedy decoding in blocks and one by one give the same text.
    """
    if target.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[target.dtype]


def load_target(target: TargetConfig, device: torch.device) -> PreTrainedModel:
    """The frozen model in eval mode on ``device``.

    For a GPU, safetensors go there one by one: ranks of a node never hold the model in host memory.
    """
    show_loading()
    log.info("loading target %s", target.name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            resolve(target),
            revision=target.revision,
            trust_remote_code=target.trust_remote_code,
            dtype=target_dtype(target, device),
            attn_implementation=target.attention,
            device_map={"": device} if device.type == "cuda" else None,
        )
    except (OSError, ImportError, ValueError) as error:
        raise UserError(
            f"target.name={target.name}: cannot load it: {str(error).splitlines()[0]}"
        ) from None
    return model.to(device).eval().requires_grad_(False)


def show_loading() -> None:
    """Show how far transformers has loaded as our other progress is shown; on rank 0 only."""
    if os.environ.get("RANK", "0") != "0":
        # Every target rank loads; as many bars in one terminal tell nobody anything.
        transformers_logging.disable_progress_bar()
        return

    def bar(factory: object, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given = {"iterable": args[0]} if args else {}
        return progress_bar(**given | options | {"delay": 1, "leave": False})

    transformers_logging.set_tqdm_hook(bar)


class FeatureExtractor:
    """Fills frames with the hidden states of a frozen target.

    Args:
        model: the target, on the device of the frames.
        layer_ids: increasing decoder layer numbers without the last one.
        final: also take the input of the LM head (needs the whole depth).
        fixed: run a packed row with its padding, so that every forward has the same shape. The
            default is yes on a GPU, where new shapes cost memory and time, and no on a CPU.
        compiled_slots: compile the decoder layers for rows of this many slots, which are ``fixed``
            then; rows of other lengths run uncompiled.

    ``tokens`` counts what it has filled.

    Raises:
        UserError: rows of this target do not have one shape, so that it cannot be compiled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layer_ids: list[int],
        final: bool = False,
        fixed: bool | None = None,
        compiled_slots: int | None = None,
    ) -> None:
        self.model = model
        self.fixed = model.device.type != "cpu" if fixed is None else fixed
        self.layer_ids = layer_ids
        self.final = final
        self.packs = isolates_documents(model, layer_ids)
        self.tokens = 0
        self._slots, self._warm = compiled_slots, False
        if compiled_slots is not None:
            require(
                self.packs,
                f"target.compile=true: {type(model).__name__} runs every document as a row of its "
                "own, and each length would be compiled: set target.compile=false",
            )
            self.fixed = True
            self._compiled = with_compiled_layers(model)

    @torch.no_grad()
    def fill(self, frame: FeatureBatch, tokens: int | None = None) -> None:
        """Write ``hidden_states`` (and ``final_hidden``) of ``frame`` from its own token ids.

        Documents do not see each other: their restarting positions mask them in one row, or, for
        an architecture that cannot do that, every document is a row of its own.

        Args:
            frame: to be filled.
            tokens: slots that are not padding; None counts them, which waits for the device.
        """
        if tokens is None:
            tokens = int((frame.document_ids >= 0).sum())
        if tokens == 0:
            return
        if self.packs:
            row = slice(0, tokens)
            # Padding comes last and has position 0, so nothing sees it.
            run = slice(0, None if self.fixed else tokens)
            ids, positions = frame.input_ids[None, run].long(), frame.position_ids[None, run].long()
            if self._slots == ids.shape[1] and not self._warm:
                self._warm_up(ids)
            hidden, final = self._forward(ids, None, positions)
            states = [state[0, row] for state in hidden]
            self._write(frame, row, states, final[0, row] if self.final else None)
        else:
            self._fill_padded(frame, tokens)
        # Not before: a forward that ran out of memory comes again in parts.
        self.tokens += tokens

    def _fill_padded(self, frame: FeatureBatch, tokens: int) -> None:
        """Run every document as a row of its own."""
        for rows, length in padded_rows(frame.document_ids[:tokens]):
            ids = torch.zeros(len(rows), length, dtype=torch.long, device=frame.input_ids.device)
            mask = torch.zeros_like(ids)
            for index, row in enumerate(rows):
                ids[index, : row.stop - row.start] = frame.input_ids[row]
                mask[index, : row.stop - row.start] = 1
            hidden, final = self._forward(ids, mask, None)
            for index, row in enumerate(rows):
                size = row.stop - row.start
                states = [state[index, :size] for state in hidden]
                self._write(frame, row, states, final[index, :size] if self.final else None)

    def _warm_up(self, ids: Tensor) -> None:
        """Compile both forms of a layer: a row that is one document comes without a mask."""
        slots = torch.arange(ids.shape[1], device=ids.device)[None]
        for positions in (slots, slots % max(1, ids.shape[1] // 2)):
            self._forward(ids, None, positions)
        self._warm = True

    def _forward(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        output = None
        model = self._compiled if self._slots == ids.shape[1] else self.model
        with capturing(model, self.layer_ids, stop=not self.final) as hidden:
            output = model.get_decoder()(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
            )
        return hidden, output.last_hidden_state if self.final else hidden[-1]

    def _write(
        self, frame: FeatureBatch, row: slice, hidden: list[Tensor], final: Tensor | None
    ) -> None:
        width = hidden[0].shape[-1]
        for index, state in enumerate(hidden):
            slots = frame.hidden_states[row, index * width : (index + 1) * width]
            if frame.hidden_scales is None:
                slots.copy_(state)
            else:
                quantise(state, slots, frame.hidden_scales[row, index])
        if final is not None and frame.final_hidden is not None:
            frame.final_hidden[row].copy_(final)


def padded_rows(document_ids: Tensor) -> list[tuple[list[slice], int]]:
    """Group the documents of a row into batches of rows padded to one bucketed length.

    Args:
        document_ids: ``[S]`` without padding.

    Returns:
        ``(rows, length)`` pairs: slices of the packed row, and the padded length, a multiple of
        ``PADDED_ROW_MULTIPLE``; at most ``PADDED_TOKENS`` padded tokens a batch (or one row).
    """
    counts = torch.unique_consecutive(document_ids, return_counts=True)[1].tolist()
    buckets: dict[int, list[slice]] = {}
    start = 0
    for count in counts:
        length = -(-count // PADDED_ROW_MULTIPLE) * PADDED_ROW_MULTIPLE
        buckets.setdefault(length, []).append(slice(start, start + count))
        start += count
    batches = []
    for length, rows in sorted(buckets.items()):
        per_batch = max(1, PADDED_TOKENS // length)
        batches += [(rows[i : i + per_batch], length) for i in range(0, len(rows), per_batch)]
    return batches


@torch.no_grad()
def isolates_documents(model: PreTrainedModel, layer_ids: list[int]) -> bool:
    """Whether documents packed in one row with restarting positions cannot see each other.

    Linear-attention and recurrent layers carry a state over the boundary: decided by the config.
    Everything else is tried out on two short documents in one row. The second must stay as it is
    when the first has other tokens: shapes and kernels are the same, so rounding is, too. It must
    also be nearly what it is alone, which positions that do not restart would spoil.
    """
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention", "chunked_attention"}:
        return False
    device = next(model.parameters()).device
    # Token ids that exist in every vocabulary; what they say does not matter.
    ids = torch.arange(2, 26, device=device)[None] % text.vocab_size
    changed = torch.cat([(ids[:, :12] + 24) % text.vocab_size, ids[:, 12:]], dim=1)
    positions = torch.cat([torch.arange(12), torch.arange(12)]).to(device)[None]

    def second(tokens: Tensor, places: Tensor) -> Tensor:
        with capturing(model, layer_ids, stop=True) as states:
            model.get_decoder()(input_ids=tokens, position_ids=places, use_cache=False)
        return states[-1][0, -12:].float()

    packed, other = second(ids, positions), second(changed, positions)
    alone = second(ids[:, 12:], positions[:, 12:])
    leak, shift = ((packed - twin).abs().mean() / alone.abs().mean() for twin in (other, alone))
    if leak > LEAK_TOLERANCE.get(model.dtype, 2e-2) or shift > SHIFT_TOLERANCE.get(
        model.dtype, 1e-1
    ):
        leak = torch.maximum(leak, shift)
        name = type(model).__name__
        warn_once(log, f"{name} mixes documents of a row (by {float(leak):.1e})", MIXES_ADVICE)
        return False
    return True
