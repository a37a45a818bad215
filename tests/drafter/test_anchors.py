import torch

from dflash_mp.drafter.anchors import anchor_candidates, make_blocks, sample_anchors
from dflash_mp.features import FeatureBatch


def packed(lengths: list[int], prompts: list[int], padding: int = 0, number: int = 0):
    """Documents of those lengths; the first ``prompts[i]`` tokens of each are unsupervised."""
    positions = [p for n in lengths for p in range(n)] + [0] * padding
    documents = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    mask = [int(p >= q) for n, q in zip(lengths, prompts, strict=True) for p in range(n)]
    return FeatureBatch(
        number=number,
        input_ids=torch.arange(100, 100 + len(positions), dtype=torch.int32),
        position_ids=torch.tensor(positions, dtype=torch.int32),
        document_ids=torch.tensor(documents, dtype=torch.int32),
        loss_mask=torch.tensor(mask + [0] * padding, dtype=torch.uint8),
        hidden_states=torch.zeros(len(positions), 4),
    )


def test_candidates_need_a_supervised_successor_in_the_same_document():
    batch = packed([6, 4], [2, 0], padding=2)
    # Document 0 is rows 0-5, supervised from 2; document 1 is rows 6-9, all supervised.
    assert anchor_candidates(batch).nonzero().flatten().tolist() == [2, 3, 4, 6, 7, 8]


def test_a_hole_in_the_supervision_removes_both_neighbours():
    batch = packed([6], [0])
    batch.loss_mask[3] = 0
    assert anchor_candidates(batch).nonzero().flatten().tolist() == [0, 1, 4]


def test_sampling_without_replacement_pads_at_the_end():
    batch = packed([6, 4], [2, 0], padding=2)
    anchors, valid = sample_anchors(batch, 8, seed=0)
    assert valid.tolist() == [True] * 6 + [False] * 2
    assert anchors[valid].tolist() == [2, 3, 4, 6, 7, 8]
    assert (anchors.diff() >= 0).all()


def test_more_anchors_than_slots_and_no_candidate_at_all():
    batch = packed([3], [3])
    anchors, valid = sample_anchors(batch, 5, seed=0)
    assert anchors.shape == valid.shape == (5,)
    assert not valid.any()
    blocks = make_blocks(batch, anchors, valid, 4, 9)
    assert not blocks.supervised.any()


def test_the_draw_depends_on_seed_and_batch_number_alone():
    first = sample_anchors(packed([60], [5]), 10, seed=1)[0]
    again = sample_anchors(packed([60], [5]), 10, seed=1)[0]
    other_seed = sample_anchors(packed([60], [5]), 10, seed=2)[0]
    other_batch = sample_anchors(packed([60], [5], number=1), 10, seed=1)[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, other_seed)
    assert not torch.equal(first, other_batch)


def test_every_candidate_is_equally_likely():
    batch = packed([50, 250], [0, 0])
    hits = torch.zeros(300)
    for seed in range(600):
        anchors, valid = sample_anchors(batch, 30, seed)
        hits[anchors[valid]] += 1
    share = hits[anchor_candidates(batch)] / 600
    expected = 30 / 298
    # Each count is nearly binomial: 5 standard deviations, and the short document's fair share.
    assert (share - expected).abs().max() < 5 * (expected / 600) ** 0.5
    assert abs(hits[:50].sum() / hits.sum() - 49 / 298) < 0.01


def test_blocks_of_a_hand_made_row():
    # Tokens 100..111: document 0 is rows 0-6, document 1 rows 7-10, row 11 is padding.
    batch = packed([7, 4], [2, 1], padding=1)
    blocks = make_blocks(batch, torch.tensor([4, 8, 0]), torch.tensor([True, True, False]), 4, 9)
    assert blocks.context_start.tolist() == [0, 7, 0]
    assert blocks.input_ids.tolist() == [[104, 9, 9, 9], [108, 9, 9, 9], [100, 9, 9, 9]]
    assert blocks.position_ids.tolist() == [[4, 5, 6, 7], [1, 2, 3, 4], [0, 1, 2, 3]]
    assert blocks.labels[:2].tolist() == [[104, 105, 106, 0], [108, 109, 110, 0]]
    assert blocks.supervised.int().tolist() == [[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_labels_past_the_row_are_not_supervised():
    batch = packed([5], [0])
    blocks = make_blocks(batch, torch.tensor([3]), torch.tensor([True]), 4, 9)
    assert blocks.labels.tolist() == [[103, 104, 0, 0]]
    assert blocks.supervised.int().tolist() == [[0, 1, 0, 0]]


def test_a_hole_masks_only_its_own_slot():
    batch = packed([8], [0])
    batch.loss_mask[4] = 0
    blocks = make_blocks(batch, torch.tensor([2]), torch.tensor([True]), 5, 9)
    assert blocks.supervised.int().tolist() == [[0, 1, 0, 1, 1]]
