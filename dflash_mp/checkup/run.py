"""Whether the configured run fits: roles, data files, target, drafter, tokenizer."""

from typing import Any

import torch

from dflash_mp.cast import split
from dflash_mp.checkup.finding import OK, PROBLEM, WARNING, Finding, enough, ok
from dflash_mp.config import TrainConfig, UserError
from dflash_mp.data.corpus import check_data
from dflash_mp.data.template import chat_format
from dflash_mp.drafter.mask_token import pick_mask_token
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.job import drafter_config
from dflash_mp.published import adopt_shape
from dflash_mp.target.model import load_config, load_tokenizer
from dflash_mp.wire.connect import choose_edge

STATE_BYTES = 12
"""Of a parameter in a checkpoint: itself and two moments of AdamW, in float32."""


def check_run(config: TrainConfig, ranks_per_node: int, nodes: int) -> tuple[list[Finding], float]:
    """All findings about the run, and the bytes its checkpoints will take (0 if unknown)."""
    findings = [roles(config, ranks_per_node, nodes), edge(config)]
    if config.data.train is not None:
        findings.append(data_files(config))
    try:
        config = adopt_shape(config)
        target = load_config(config.target)
        findings += [target_found(config, target), *fast_kernels(target)]
        tokenizer = load_tokenizer(config.target)
        mask = pick_mask_token(tokenizer, target, config.drafter.mask_token_id)
        drafter, parameters = drafter_found(config, target, mask)
        findings += [drafter, chat_template(config, tokenizer, mask)]
    except UserError as error:
        return [*findings, Finding(PROBLEM, "target and drafter", str(error))], 0.0
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0]
        return [*findings, Finding(PROBLEM, "tokenizer", said, "check target.name")], 0.0
    kept = config.checkpoint.keep + config.checkpoint.keep_best + 1
    return findings, float(parameters * STATE_BYTES * kept)


def roles(config: TrainConfig, ranks_per_node: int, nodes: int) -> Finding:
    """How the ranks of a node become targets and drafters."""
    try:
        targets, drafters = split(ranks_per_node, config.topology)
    except UserError as error:
        return Finding(PROBLEM, "roles", str(error))
    per_step = config.micro_batches_per_step
    total = drafters * nodes
    found = (
        f"targets {targets}, drafters {drafters} on a node; nodes {nodes}; "
        f"micro_batches_per_step {per_step}"
    )
    if per_step < total:
        return Finding(
            PROBLEM,
            "roles",
            f"{found}: some of {total} drafters would have no work",
            f"set micro_batches_per_step to {total} or a multiple",
        )
    return enough(
        "roles",
        found,
        OK if per_step % total == 0 else WARNING,
        f"some drafters idle: make micro_batches_per_step a multiple of {total}",
    )


def edge(config: TrainConfig) -> Finding:
    """What would carry frames between the ranks of a node."""
    try:
        kind = choose_edge(config.wire.edge, torch.cuda.is_available())
    except UserError as error:
        return Finding(PROBLEM, "edge", str(error))
    return ok("edge", f"wire.edge={config.wire.edge}: frames go over {kind}")


def data_files(config: TrainConfig) -> Finding:
    """Whether the files are there; nothing is read."""
    try:
        train, heldout = check_data(config.data)
    except UserError as error:
        return Finding(PROBLEM, "data", str(error))
    return ok("data", f"{len(train)} training and {len(heldout)} held-out source(s) are there")


def target_found(config: TrainConfig, target: Any) -> Finding:
    """The target's shape."""
    text = target.get_text_config()
    return ok(
        "target",
        f"{config.target.name}: {text.num_hidden_layers} layers, width {text.hidden_size}, "
        f"vocabulary {text.vocab_size}",
    )


def drafter_found(config: TrainConfig, target: Any, mask: int) -> tuple[Finding, int]:
    """The drafter's shape and the number of its parameters."""
    shape = drafter_config(config, target, mask)
    parameters = parameter_count(shape)
    taps = shape.dflash_config["target_layer_ids"]
    return ok(
        "drafter",
        f"{parameters / 1e6:,.0f} M parameters in {shape.num_hidden_layers} layers, blocks of "
        f"{shape.block_size}, reads target layers {taps}, mask token {mask}",
    ), parameters


def parameter_count(shape: Any) -> int:
    """Parameters of the draft model of that configuration; allocates nothing."""
    with torch.device("meta"):
        model = DFlashDraftModel(shape)
    return sum(parameter.numel() for parameter in model.parameters())


def chat_template(config: TrainConfig, tokenizer: Any, mask: int) -> Finding:
    """Whether the template renders a question and its answer, and how a reply ends."""
    try:
        chat = chat_format(tokenizer, config.data, mask)
    except UserError as error:
        return Finding(PROBLEM, "chat template", str(error))
    if not chat.end_of_turn:
        return Finding(
            WARNING,
            "chat template",
            f"{chat.name} ends a reply without a control token",
            "the drafter cannot learn where replies end: set data.chat_template",
        )
    return ok("chat template", f"{chat.name} renders; a reply ends with {chat.end_of_turn}")


def fast_kernels(target: Any) -> list[Finding]:
    """Kernels of linear attention, for a target that has such layers."""
    kinds = getattr(target.get_text_config(), "layer_types", None) or []
    count = sum(kind == "linear_attention" for kind in kinds)
    if not count:
        return []
    return [
        _kernel("fla", "flash-linear-attention", count),
        _kernel("causal_conv1d", "causal-conv1d", count),
    ]


def _kernel(module: str, package: str, layers: int) -> Finding:
    name = f"{layers} layers of linear attention"
    try:
        __import__(module)
    except ImportError as error:
        return Finding(
            WARNING,
            "fast kernels",
            f"{name} run in plain torch, {package} cannot be imported ({error})",
            f"pip install {package}",
        )
    return ok("fast kernels", f"{name} use {package}")
