"""How much of the training text the target would have written itself.

Legend: n tokens of a document, R supervised ones, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_mp.data.documents import Corpus
from dflash_mp.progress import progress_bar

ROWS_PER_CHUNK = 256
MARGIN = 0.05
"""Share of tokens by which text may fall short before it counts as someone else's."""


@dataclass(frozen=True)
class OnPolicy:
    """Agreement of responses with the target's own first choice, over all supervised tokens."""

    documents: int
    tokens: int
    agreement: float
    """Share of supervised tokens that are the target's top-1 given all before them. 1 for the
    target's own greedy text."""

    expected: float
    """The same for text that the target samples at temperature 1: the mean probability of its
    top-1. Lower temperatures agree more often."""

    by_document: list[float]
    """Agreement in each document that was looked at."""

    @property
    def is_own(self) -> bool:
        """Whether the text may be the target's own."""
        return self.agreement >= self.expected - MARGIN

    def line(self) -> str:
        """For people."""
        text = (
            f"on-policy score {self.agreement:.3f} over {self.tokens:,} tokens of "
            f"{self.documents} documents (greedy text of the target: 1, sampled at temperature "
            f"1: {self.expected:.3f})"
        )
        if self.is_own:
            return text
        return (
            f"WARNING: {text}: these responses are not the target's own. A drafter learns to "
            "imitate what it is trained on: answer the prompts with the target first "
            "(python -m dflash_mp.data.generate)"
        )


@torch.inference_mode()
def on_policy_score(model: Any, corpus: Corpus, documents: int, seed: int) -> OnPolicy:
    """Run the target over some documents and compare its first choices with the text.

    Args:
        model: a causal language model of transformers, in eval mode.
        corpus: where to take documents from.
        documents: how many at most; which ones is a function of ``seed``.
        seed: not negative.
    """
    chosen = np.random.default_rng(seed).permutation(len(corpus))[:documents]
    agreed, expected, tokens = [], 0.0, 0
    numbers = sorted(chosen.tolist())
    for index in progress_bar(iterable=numbers, desc="scoring", unit=" documents", delay=1):
        ids, mask = corpus.document(index)
        hits, probability = _first_choices(model, torch.from_numpy(ids.astype(np.int64)), mask)
        agreed.append((int(hits.sum()), len(hits)))
        expected += float(probability.sum())
        tokens += len(hits)
    return OnPolicy(
        documents=len(agreed),
        tokens=tokens,
        agreement=sum(hits for hits, _ in agreed) / max(tokens, 1),
        expected=expected / max(tokens, 1),
        by_document=[hits / count for hits, count in agreed if count],
    )


def _first_choices(model: Any, ids: Tensor, mask: np.ndarray) -> tuple[Tensor, Tensor]:
    """Per supervised token but the first of the document: is it top-1, and how probable is that."""
    positions = torch.from_numpy(np.flatnonzero(mask[1:]))  # [R], of the token before each
    device = model.get_input_embeddings().weight.device
    hidden = model.get_decoder()(input_ids=ids[None].to(device), use_cache=False)[0][0]  # [n, H]
    head = model.get_output_embeddings()
    hits, probability = [], []
    for rows in positions.split(ROWS_PER_CHUNK):
        logits = head(hidden[rows.to(device)]).float()  # [rows, V]
        best = logits.max(dim=-1)
        hits.append(best.indices.cpu() == ids[rows + 1])
        probability.append(torch.exp(best.values - logits.logsumexp(dim=-1)).cpu())
    if not hits:
        return torch.zeros(0, dtype=torch.bool), torch.zeros(0)
    return torch.cat(hits), torch.cat(probability)
