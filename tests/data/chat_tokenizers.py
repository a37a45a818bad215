"""Small tokenizers with the chat templates of public families, built without any download.

The tokenizers are byte-level BPE: 256 bytes, the control tokens, and whole words that a test
names, so that ids can be written out and every text can be encoded. The templates are our own
renderings of what each family does.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_mp.config import DataConfig

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim }}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% set answer = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m['content'].split('</think>')[0].split('<think>')[-1].strip('\n')"
    " if '</think>' in m['content'] else (m.reasoning_content or '') %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' + answer }}"
    "{% else %}{{ answer }}{% endif %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)

OPENED_THINKING = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '<|User|>' + m['content'] }}{% elif m['role'] == 'assistant' %}"
    "{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + '<|eos|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)

BRACKETS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)

TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson + '\n' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + c['function']['name'] + ' ' }}"
    "{{ c['function']['arguments'] | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mask>"]
MASK = 3
"""Id of ``<mask>`` in every tokenizer here."""


def make_tokenizer(
    template: str | None,
    control: list[str] | None = None,
    words: list[str] | None = None,
    added: list[str] | None = None,
    **special: str,
) -> PreTrainedTokenizerFast:
    """Ids: control tokens, then the 256 bytes in ascending order, then the words and their heads.

    ``added`` are tokens that are not special, such as ``<think>``; their ids come last.
    """
    control = CHATML_TOKENS if control is None else control
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=byte_value)
    vocabulary = {token: index for index, token in enumerate([*control, *alphabet])}
    merges = []
    for word in words or []:
        spelt = spell(word)
        for end in range(2, len(spelt) + 1):
            if spelt[:end] not in vocabulary:
                vocabulary[spelt[:end]] = len(vocabulary)
                merges.append((spelt[: end - 1], spelt[end - 1]))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in control])
    backend.add_tokens([AddedToken(token, special=False) for token in added or []])
    names = {"eos_token": control[2], "pad_token": control[2], **special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    return tokenizer


def spell(text: str) -> str:
    """Text in the alphabet of byte-level BPE."""
    (piece,) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return piece[0]


def byte_value(character: str) -> int:
    """The byte that a character of the byte-level alphabet stands for."""
    decoded = decoders.ByteLevel().decode([character])
    if decoded != "\ufffd":
        return decoded.encode()[0]
    # Bytes of longer characters have no text of their own; their order does not matter here.
    return 256 + ord(character)


def data_config(**changes) -> DataConfig:
    """A configuration for small rows; ``changes`` are keys of the data group."""
    defaults = {
        "train": "narrow",
        "heldout": None,
        "max_length": 512,
        "tokens_per_batch": 512,
        "over_length": "truncate",
        "min_supervised_tokens": 2,
        "last_turn_only": False,
        "train_thinking": True,
        "control_tokens": "drop",
        "max_bad_fraction": 0.1,
        "chat_template": None,
        "template_kwargs": None,
        "columns": None,
        "roles": None,
        "near_copy_threshold": 0.5,
        "cache_dir": None,
    }
    return DataConfig(**{**defaults, **changes})
