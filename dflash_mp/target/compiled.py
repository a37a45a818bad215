"""A target whose decoder layers are compiled, beside the one that is not.

Layers are compiled one by one: they share their code, so one graph serves all, and what is between
them (hooks that take their outputs, the end of a forward behind the deepest one) is not traced.
"""

import copy
from itertools import chain
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dflash_mp.target.layers import decoder_layers


def with_compiled_layers(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` again, over the same weights in memory, with compiled decoder layers.

    ``model`` stays as it is: decoding, whose shapes change with every token, goes on with it.
    """
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, shared)
    layers = decoder_layers(twin)
    for index, layer in enumerate(layers):
        layers[index] = cast(nn.Module, torch.compile(layer, dynamic=False))
    return twin
