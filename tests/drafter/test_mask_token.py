import pytest
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from dflash_mp.config import UserError
from dflash_mp.drafter.mask_token import pick_mask_token

TEMPLATE = "{{ '<turn>' + message['content'] + '<end>' }}"


def tokenizer(special: list[str], template: str | None = TEMPLATE, **roles: str):
    words = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "[unk]": 2}, unk_token="[unk]"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[unk]", **roles)
    made.add_special_tokens({"additional_special_tokens": special})
    made.chat_template = template
    return made


def target(rows: int) -> LlamaConfig:
    return LlamaConfig(vocab_size=rows, num_hidden_layers=2, bos_token_id=None, eos_token_id=None)


def test_a_spare_embedding_row_is_taken_first():
    assert pick_mask_token(tokenizer(["<turn>", "<end>"]), target(64)) == 5


def test_the_last_unused_special_token_without_spare_rows():
    # ids: <end> 3 (eos), <turn> 4, <repo> 5, <file> 6
    made = tokenizer(["<turn>", "<repo>", "<file>"], eos_token="<end>")
    assert made.convert_tokens_to_ids("<file>") == 6
    assert pick_mask_token(made, target(7)) == 6
    made.chat_template = TEMPLATE + "<file>"
    assert pick_mask_token(made, target(7)) == 5


def test_the_tokenizers_own_mask_token():
    made = tokenizer(["<turn>"], mask_token="<mask>")
    assert pick_mask_token(made, target(64)) == made.mask_token_id


def test_nothing_is_free():
    with pytest.raises(UserError, match="no spare embedding row"):
        pick_mask_token(tokenizer(["<turn>", "<end>"]), target(5))


def test_an_explicit_id_wins_if_it_is_free():
    made = tokenizer(["<turn>", "<repo>"], eos_token="<end>")
    assert pick_mask_token(made, target(64), explicit=40) == 40
    assert pick_mask_token(made, target(64), explicit=5) == 5


@pytest.mark.parametrize(
    ("explicit", "message"),
    [
        (64, "rows 0 to 63"),
        (-1, "rows 0 to 63"),
        (3, "'<end>', which conversations"),
        (4, "'<turn>', which conversations"),
        (2, "which conversations"),
    ],
)
def test_an_explicit_id_that_is_in_use(explicit: int, message: str):
    made = tokenizer(["<turn>", "<repo>"], eos_token="<end>")
    with pytest.raises(UserError, match=message):
        pick_mask_token(made, target(64), explicit)


def test_roles_in_the_targets_config_count_too():
    config = target(64)
    config.eos_token_id = [40, 41]
    with pytest.raises(UserError, match="mask_token_id=41"):
        pick_mask_token(tokenizer(["<turn>"]), config, explicit=41)
