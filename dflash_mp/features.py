"""The one thing that travels from target to drafter: a packed micro-batch with hidden states."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FeatureBatch:
    """One packed micro-batch of ``S`` token slots; several documents share the row.

    Documents lie one after the other, padding (if any) at the end. Every tensor lives on the
    consumer's device and may be a view into a wire slot: it is valid until the consumer asks
    for the next batch.
    """

    number: int
    """Global micro-batch number; every random draw for this batch is a function of it."""

    input_ids: Tensor
    """``[S]`` int32 token ids; padding slots hold 0."""

    position_ids: Tensor
    """``[S]`` int32, restarting at 0 in each document; 0 in padding."""

    document_ids: Tensor
    """``[S]`` int32, 0-based in order of appearance; -1 in padding."""

    loss_mask: Tensor
    """``[S]`` uint8, 1 where the token is a supervised response token."""

    hidden_states: Tensor
    """``[S, n * H]`` outputs of the ``n`` tapped target layers, concatenated in layer order.

    On a quantised wire they are codes (``quantise``), with ``hidden_scales``.
    """

    final_hidden: Tensor | None = None
    """``[S, H]`` input of the target's LM head (after the final norm), when the loss needs it."""

    hidden_scales: Tensor | None = None
    """``[S, n]`` float32; only on the way, the drafter's loop gets values."""
