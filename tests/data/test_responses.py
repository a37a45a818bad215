"""Decoded replies: token by token the target's own, whatever else is in the batch."""

import torch
from answering import GREEDY, TEXTS, user
from transformers import LlamaForCausalLM

from dflash_mp.data.responses import Response, RowSampler, Sampling, Skipped, local_respond

SAMPLED = Sampling(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=0)


def plain_greedy(model, tokenizer, messages, stop_ids, count):
    """Token by token, the whole text again each time, no cache and no padding."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    ids = list(ids["input_ids"])
    reply = []
    for _ in range(count):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids + reply])).logits[0, -1].argmax())
        if token in stop_ids:
            return reply, "stop"
        reply.append(token)
    return reply, "length"


def test_batch_equals_plain_greedy_of_each_prompt(model, tokenizer):
    exact = LlamaForCausalLM(model.config).double().eval()
    exact.load_state_dict(model.state_dict())
    stop_ids = [1, *range(40, 60)]
    exact.generation_config.eos_token_id = stop_ids
    # A checkpoint's own settings must not change the text.
    exact.generation_config.repetition_penalty = 5.0
    exact.generation_config.do_sample = True
    conversations = [[user(text)] for text in TEXTS]
    replies = local_respond(exact, tokenizer, GREEDY)(conversations, [0] * len(TEXTS))
    expected = [plain_greedy(exact, tokenizer, c, stop_ids, 12) for c in conversations]
    assert [(r.token_ids, r.finish_reason) for r in replies] == expected
    assert {reason for _, reason in expected} == {"stop", "length"}
    assert [r.text for r in replies] == [tokenizer.decode(ids) for ids, _ in expected]


def test_sampled_row_does_not_depend_on_its_batch(model, tokenizer):
    conversations, seeds = [[user(text)] for text in TEXTS], list(range(len(TEXTS)))
    respond = local_respond(model.double(), tokenizer, SAMPLED)
    together = respond(conversations, seeds)
    alone = [respond([c], [s])[0] for c, s in zip(conversations, seeds, strict=True)]
    assert together == alone
    assert respond(conversations, [s + 100 for s in seeds]) != together
    model.float()


def test_sampling_follows_the_nucleus():
    scores = torch.tensor([2.0, 1.0, 0.5, 0.0, -3.0])
    rows = 4000
    sampler = RowSampler(list(range(rows)), Sampling(1, 2.0, 0.85, 0), torch.device("cpu"))
    drawn = sampler(torch.zeros(rows, 1, dtype=torch.long), scores.expand(rows, -1)).argmax(-1)
    share = torch.bincount(drawn, minlength=5) / rows
    # The smallest set of most likely tokens that holds at least 0.85 of the probability.
    wanted = torch.softmax(scores / 2.0, 0)
    kept = wanted.cumsum(0) - wanted < 0.85
    wanted = torch.where(kept, wanted, 0.0) / wanted[kept].sum()
    assert share[~kept].sum() == 0
    assert torch.allclose(share, wanted, atol=0.03)


def test_too_long_prompt_is_skipped_and_the_rest_answered(model, tokenizer):
    conversations = [[user("y" * 300)], [user("Hi")]]
    long, short = local_respond(model, tokenizer, GREEDY)(conversations, [0, 0])
    assert isinstance(long, Skipped)
    assert "no room" in long.reason
    assert isinstance(short, Response)
