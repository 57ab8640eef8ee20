"""Packing: nothing is lost, nothing crosses a sample's end, values sit at the rows that predict their token."""

import pytest
import torch

from burnish.policy.training.forward import score
from burnish.policy.training.packing import Sample, batch_of, pack


def sample(*ids, targets=(), rollout=0, **extra):
    return Sample(ids=ids, loss_mask=[i in targets for i in range(len(ids))], rollout=rollout, **extra)


def test_a_row_predicts_the_next_token_of_its_own_sample():
    first = sample(11, 12, 13, targets=(1, 2), rollout=7, fields={"advantage": [0.0, 0.5, -1.0]})
    second = sample(21, 22, targets=(0, 1), rollout=8, fields={"advantage": [9.0, 0.25]})
    batch = batch_of([first, second])
    assert len(batch.rows) == 16
    assert batch.num_tokens == 5
    assert batch.rows.token_id[:5].tolist() == [11, 12, 13, 21, 22]
    assert batch.rows.position[:5].tolist() == [0, 1, 2, 0, 1]
    assert batch.rows.context[:5].tolist() == [0, 0, 0, 1, 1]
    assert batch.target[:5].tolist() == [12, 13, 0, 22, 0]
    # a sample's first token is predicted by nothing, even where it is marked
    assert batch.loss_mask[:5].tolist() == [True, True, False, True, False]
    assert batch.fields["advantage"][:5].tolist() == [0.5, -1.0, 0.0, 0.25, 0.0]
    assert batch.rollout.tolist() == [7, 7, 7, 8, 8] + [-1] * 11
    assert not batch.rows.live[5:].any()
    assert not batch.loss_mask[5:].any()
    assert batch.kept_ids is None


def test_kept_sets_follow_the_rows_that_predict_their_token():
    first = sample(11, 12, 13, targets=(1, 2), kept=[[], [12, 40], [3, 13, 9]])
    second = sample(21, 22, 23, targets=(2,))
    batch = batch_of([first, second])
    assert batch.kept_offsets is not None
    assert batch.kept_offsets.tolist() == [0, 2] + [5] * 15
    assert batch.kept_ids.tolist() == [12, 40, 3, 13, 9]
    ids, offsets = batch.kept_of(torch.tensor([1, 4, 0]))
    assert ids.tolist() == [3, 13, 9, 12, 40]
    assert offsets.tolist() == [0, 3, 3, 5]
    assert batch_of([second]).kept_of(torch.tensor([1])) == (None, None)


def test_every_sample_is_in_one_batch_whole_and_within_the_budget():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 65, (50,), generator=generator).tolist()
    samples = [sample(*range(5, 5 + n), rollout=i) for i, n in enumerate(lengths)]
    batches = pack(samples, 64)
    found = {}
    for batch in batches:
        assert batch.num_tokens <= 64
        for rollout in set(batch.rollout[: batch.num_tokens].tolist()):
            ids = batch.rows.token_id[batch.rollout == rollout].tolist()
            assert rollout not in found
            found[rollout] = ids
    assert found == {i: list(range(5, 5 + n)) for i, n in enumerate(lengths)}
    assert len(batches) <= 1.25 * sum(lengths) / 64  # first-fit decreasing wastes little
    again = pack(samples, 64)
    assert [b.rows.token_id.tolist() for b in again] == [b.rows.token_id.tolist() for b in batches]


def test_log_probabilities_do_not_depend_on_packing(core):
    """Deterministic: the same bits however samples share batches; loss sums are then equal for any cut."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for i, length in enumerate([20, 3, 33, 11, 2]):
        ids = torch.randint(5, 115, (length,), generator=generator).tolist()
        samples.append(sample(*ids, targets=range(length // 2, length), rollout=i))

    def scores(batches):
        found = {}
        for batch in batches:
            with torch.no_grad():
                scored = score(core, batch, deterministic=True)
            for row, logprob in zip(scored.row.tolist(), scored.logprob.tolist(), strict=True):
                found[int(batch.rollout[row]), int(batch.rows.position[row])] = logprob
        return found

    alone = scores([batch_of([s]) for s in samples])
    assert len(alone) == sum(len(s.ids) - max(1, len(s.ids) // 2) for s in samples)
    assert scores(pack(samples, 36)) == alone
    assert scores(pack(samples, 200)) == alone
    assert scores([batch_of(samples[::-1])]) == alone


def test_scores_are_those_of_the_whole_distribution(core):
    ids = torch.randint(5, 115, (12,)).tolist()
    batch = batch_of([sample(*ids, targets=range(12))])
    with torch.no_grad():
        scored = score(core, batch, temperature=0.5)
        plain = score(core, batch)
        cold = score(core, batch, never=[2])
    assert scored.row.tolist() == list(range(11))
    assert (scored.entropy < plain.entropy).all()  # a lower temperature
    assert (cold.logprob > plain.logprob).all()  # the mass of id 2 goes to the others
    with pytest.raises(ValueError, match=f"token 0 has id {ids[1]}, which is never sampled"):
        score(core, batch, never=[ids[1]])


def test_a_batch_without_targets_gives_no_scores(core):
    scored = score(core, batch_of([sample(5, 6, 7)]), deterministic=True)
    assert scored.logprob.shape == (0,)
    scored.logprob.sum().backward()


def test_wrong_samples_are_named():
    with pytest.raises(ValueError, match="loss_mask has 1 values, ids has 2"):
        Sample(ids=[5, 6], loss_mask=[True])
    with pytest.raises(ValueError, match="sample: advantage has 3 values, ids has 2"):
        Sample(ids=[5, 6], loss_mask=[True] * 2, fields={"advantage": [1.0] * 3})
    with pytest.raises(ValueError, match="kept has 1 values"):
        Sample(ids=[5, 6], loss_mask=[True] * 2, kept=[[]])
    with pytest.raises(ValueError, match="sample 1 is empty"):
        pack([sample(5), sample()], 10)
    with pytest.raises(ValueError, match="sample 0 has 3 tokens, a batch holds 2; raise tokens_per_batch"):
        pack([sample(5, 6, 7)], 2)
    with pytest.raises(ValueError, match="sample 0 has 3 tokens, the model's context is 2"):
        pack([sample(5, 6, 7)], 8, max_context=2)
    with pytest.raises(ValueError, match="sample 1 has fields \\[\\], the first sample \\['advantage'\\]"):
        pack([sample(5, fields={"advantage": [1.0]}), sample(6)], 8)
    assert pack([], 8) == []
