"""The decoder layers of a target, and taking their outputs during a forward.

Legend: B rows, S token slots of a row, n tapped layers, H hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_mp.config import UserError


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of the language model, also inside a multimodal model.

    Raises:
        UserError: no list of as many layers as the text config says.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    language = [m for name, m in model.named_modules() if "language_model" in name and m in lists]
    found = language or lists
    if not found:
        raise UserError(f"{type(model).__name__}: no list of {count} decoder layers was found")
    return found[0]


def tapped_layers(model: PreTrainedModel, layer_ids: list[int]) -> list[nn.Module]:
    """The decoder layers whose outputs are the target hidden states, in the order of the ids."""
    layers = decoder_layers(model)
    return [layers[index] for index in layer_ids]


class _Stop(Exception):
    """Ends a forward behind the deepest layer that is needed."""


@contextmanager
def capturing(model: PreTrainedModel, layer_ids: list[int], stop: bool) -> Iterator[list[Tensor]]:
    """Collect the outputs of the tapped layers of one forward: n tensors ``[B, S, H]``.

    A layer's output is ``output_hidden_states[id + 1]`` of the same forward. With ``stop`` the
    forward ends behind the deepest layer, by an exception that this context swallows.
    """
    outputs: list[Tensor] = []
    layers = tapped_layers(model, layer_ids)

    def keep(module: nn.Module, _: object, output: Tensor | tuple) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])
        if stop and module is layers[-1]:
            raise _Stop

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield outputs
    except _Stop:
        pass
    finally:
        for handle in handles:
            handle.remove()
