"""Our side of the comparison: exports, inputs, hidden states and cycles, as files for the peers.

``python prepare.py <workdir> [export [target [prompts]]]`` in this project's environment; the
target is the default one and the prompts are the shipped ones unless named. Each case is a folder
``<workdir>/<name>`` with ``export/``, ``speculators/``, ``case.json`` and ``case.safetensors``.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_mp.acceptance import head_of
from dflash_mp.config import TargetConfig
from dflash_mp.drafter.anchors import make_blocks
from dflash_mp.drafter.checkpoint_format import drafter_state, load_drafter, save_drafter
from dflash_mp.drafter.hf_config import config_json, read_config
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.evaluate import read_prompts
from dflash_mp.features import FeatureBatch
from dflash_mp.speculate import DecodeSettings, speculative_decode
from dflash_mp.speculators_format import write_speculators
from dflash_mp.target.model import load_tokenizer, resolve

GOLDEN = Path(__file__).parents[1] / "golden"
CONTEXT = 48


def main(workdir: Path, real: list[str]) -> None:
    shutil.rmtree(workdir, ignore_errors=True)
    prompts = load_file(GOLDEN / "prompts.safetensors")["prompts"].tolist()
    trained = load_drafter(GOLDEN / "draft_trained")
    target = GOLDEN / "target"
    write_case(workdir / "golden", trained, target, prompts, 40)
    write_case(workdir / "golden-sliding", sliding(trained, window=12), target, prompts, 40)
    if real:
        export, name, rows = (*real, *("smollm2", "narrow")[len(real) - 1 :])
        settings = TargetConfig(name, None, "float32", "sdpa", None, False)
        encoded = encode(settings, rows)
        write_case(workdir / "run", load_drafter(export), Path(resolve(settings)), encoded, 64)


def sliding(model: DFlashDraftModel, window: int) -> DFlashDraftModel:
    """The same weights with a sliding first layer."""
    layers = model.config.num_hidden_layers
    raw = config_json(model.config) | {
        "layer_types": ["sliding_attention"] + ["full_attention"] * (layers - 1),
        "use_sliding_window": True,
        "sliding_window": window,
    }
    changed = DFlashDraftModel(read_config(raw))
    changed.load_state_dict(drafter_state(model, torch.float32))
    return changed


def encode(target: TargetConfig, rows: str) -> list[list[int]]:
    """Token ids of the first four prompts of a file."""
    tokenizer = load_tokenizer(target)
    return [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for _, messages in read_prompts(rows, 4)
    ]


@torch.no_grad()
def write_case(
    folder: Path, model: DFlashDraftModel, target_folder: Path, prompts: list, max_new_tokens: int
) -> None:
    folder.mkdir(parents=True)
    save_drafter(model, folder / "export")
    target_config = AutoConfig.from_pretrained(target_folder)
    write_speculators(folder / "speculators", model, target_config, str(target_folder))
    # What the peers read are the weights on disk.
    model = load_drafter(folder / "export").eval()
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    head = head_of(target)

    config = model.config
    generator = torch.Generator().manual_seed(0)
    width = config.hidden_size * len(config.dflash_config["target_layer_ids"])
    ids = torch.randint(0, config.vocab_size, (CONTEXT,), generator=generator, dtype=torch.int32)
    batch = FeatureBatch(
        number=0,
        input_ids=ids,
        position_ids=torch.arange(CONTEXT, dtype=torch.int32),
        document_ids=torch.zeros(CONTEXT, dtype=torch.int32),
        loss_mask=torch.ones(CONTEXT, dtype=torch.uint8),
        hidden_states=torch.randn(CONTEXT, width, generator=generator),
    )
    # Overlapping blocks, a short and a long context; the whole block inside the row.
    anchors = torch.tensor([3, 5, 17, CONTEXT - config.block_size - 1])
    valid = torch.ones(4, dtype=torch.bool)
    mask_token_id = config.dflash_config["mask_token_id"]
    blocks = make_blocks(batch, anchors, valid, config.block_size, mask_token_id)
    noise = head.embed(blocks.input_ids)
    hidden = model(noise, batch.hidden_states, batch.position_ids, blocks)
    tensors = {
        "input_ids": ids.long(),
        "hidden_states": batch.hidden_states,
        "anchors": anchors,
        "noise": noise,
        "hidden": hidden,
    }
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, folder / "case.safetensors"
    )
    settings = DecodeSettings(max_new_tokens)
    decoded = [speculative_decode(target, model, head, prompt, settings) for prompt in prompts]
    case = {
        "name": folder.name,
        "target": str(target_folder),
        "block_size": config.block_size,
        "max_new_tokens": max_new_tokens,
        "prompts": prompts,
        "tokens": [one.tokens for one in decoded],
        "committed": [one.committed for one in decoded],
        "tensors": sorted(load_file(folder / "export" / "model.safetensors")),
        "sliding": "sliding_attention" in config.layer_types,
    }
    (folder / "case.json").write_text(json.dumps(case))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
