"""Advantages, the policy loss and log-probs from hidden states, against plain references in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from minirstar import group_advantages, grpo_loss, token_logprobs

EPS = 0.2, 0.28


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_advantages_are_numpys(rewards):
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_equal_rewards_have_no_advantage():
    assert group_advantages(torch.ones(4)).tolist() == [0.0] * 4


@pytest.mark.parametrize("rewards", [torch.ones(1), torch.ones(0), torch.tensor(1.0), torch.ones(2, 2)])
def test_advantages_need_a_group(rewards):
    with pytest.raises(ValueError, match="G >= 2"):
        group_advantages(rewards)


def reference(
    logprobs, old, adv, mask, *, denom, clip_low, clip_high, dual_clip=None, sampler=None, tis_cap=None
) -> float:
    """The loss, token by token, in python floats."""
    total = 0.0
    for b in range(len(mask)):
        for t in range(len(mask[0])):
            if not mask[b][t]:
                continue
            a, ratio = adv[b], math.exp(logprobs[b][t] - old[b][t])
            value = min(ratio * a, min(max(ratio, 1 - clip_low), 1 + clip_high) * a)
            if dual_clip is not None and a < 0:
                value = max(value, dual_clip * a)
            if tis_cap is not None:
                value *= min(math.exp(old[b][t] - sampler[b][t]), tis_cap)
            total -= value
    return total / denom


def random_case(seed: int, rows: int = 5, columns: int = 9, spread: float = 0.5):
    make = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, columns, generator=make, dtype=torch.float64) * 3
    logprobs, sampler = (
        old + spread * torch.randn(rows, columns, generator=make, dtype=torch.float64) for _ in range(2)
    )
    adv = torch.randn(rows, generator=make, dtype=torch.float64)
    mask = torch.rand(rows, columns, generator=make) < 0.6
    return logprobs, old, adv, mask, sampler


@given(
    st.integers(0, 10_000),
    st.sampled_from([None, 1.5, 3.0]),
    st.sampled_from([None, 0.8, 2.0]),
    st.sampled_from([(0.2, 0.28), (0.1, 0.1), (0.5, 2.0)]),
)
def test_loss_is_the_references(seed, dual_clip, tis_cap, clip):
    logprobs, old, adv, mask, sampler = random_case(seed, spread=1.0)
    options = {
        "denom": 17,
        "clip_low": clip[0],
        "clip_high": clip[1],
        "dual_clip": dual_clip,
        "tis_cap": tis_cap,
    }
    loss, _ = grpo_loss(logprobs, old, adv, mask, sampler_logprobs=sampler, **options)
    lists = [x.tolist() for x in (logprobs, old, adv, mask)]
    assert float(loss.detach()) == pytest.approx(
        reference(*lists, sampler=sampler.tolist(), **options), rel=1e-9, abs=1e-12
    )


def one_token(ratio: float, advantage: float, **options):
    """(loss, gradient of the loss by the log-prob) of one token."""
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss, stats = grpo_loss(
        logprob,
        torch.zeros(1, 1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.ones(1, 1),
        denom=1,
        **options,
    )
    loss.backward()
    return float(loss.detach()), float(logprob.grad), int(stats["clipped"])


@pytest.mark.parametrize(
    "ratio, advantage, loss, acts",
    [
        (1.0, 1.0, -1.0, True),
        (1.27, 1.0, -1.27, True),
        (1.3, 1.0, -1.28, False),
        (0.5, 1.0, -0.5, True),
        (0.81, -1.0, 0.81, True),
        (0.7, -1.0, 0.8, False),
        (5.0, -1.0, 5.0, True),
    ],
)
def test_clipped_token_has_no_gradient(ratio, advantage, loss, acts):
    got, gradient, clipped = one_token(ratio, advantage)
    assert got == pytest.approx(loss) and clipped == (not acts)
    assert gradient == pytest.approx(-ratio * advantage if acts else 0.0)


def test_dual_clip_bounds_negative_advantages_only():
    assert one_token(5.0, -1.0, dual_clip=3.0)[:2] == (pytest.approx(3.0), 0.0)
    assert one_token(2.0, -1.0, dual_clip=3.0)[:2] == (pytest.approx(2.0), pytest.approx(2.0))
    assert one_token(0.5, 1.0, dual_clip=3.0)[:2] == one_token(0.5, 1.0)[:2]


def test_importance_weight_is_capped_and_has_no_gradient():
    old = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    sampler = torch.tensor([[-1.5, -9.0]], requires_grad=True)
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss, stats = grpo_loss(
        logprobs, old, torch.ones(1), torch.ones(1, 2), denom=1, sampler_logprobs=sampler, tis_cap=2.0
    )
    (gradient,) = torch.autograd.grad(loss, [logprobs], retain_graph=True)
    assert gradient.tolist() == [[pytest.approx(-math.exp(0.5)), pytest.approx(-2.0)]]
    assert torch.autograd.grad(loss, [sampler], allow_unused=True) == (None,)
    assert int(stats["tis_capped"]) == 1


def test_importance_cap_needs_the_samplers_logprobs():
    with pytest.raises(ValueError, match="tis_cap needs sampler_logprobs"):
        grpo_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1), denom=1, tis_cap=2.0)


@given(st.integers(0, 10_000), st.lists(st.integers(1, 5), max_size=3))
def test_micro_batches_add_up_to_the_whole(seed, cuts):
    logprobs, old, adv, mask, sampler = random_case(seed)
    options = {"denom": int(mask.sum()) or 1, "dual_clip": 3.0, "tis_cap": 2.0}
    whole = logprobs.clone().requires_grad_()
    loss, stats = grpo_loss(whole, old, adv, mask, sampler_logprobs=sampler, **options)
    loss.backward()
    parts, total, sums = logprobs.clone().requires_grad_(), 0.0, dict.fromkeys(stats, 0.0)
    bounds = [0, *sorted(set(cuts) - {5}), 5]
    for rows in (slice(*pair) for pair in zip(bounds, bounds[1:])):
        part, some = grpo_loss(
            parts[rows], old[rows], adv[rows], mask[rows], sampler_logprobs=sampler[rows], **options
        )
        part.backward()
        total += float(part.detach())
        sums = {key: sums[key] + float(some[key]) for key in sums}
    assert total == pytest.approx(float(loss.detach()), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-12)
    assert sums == pytest.approx({key: float(value) for key, value in stats.items()}, rel=1e-9, abs=1e-9)


def test_stats_are_sums_over_the_mask():
    logprobs, old, adv, mask, sampler = random_case(3)
    stats = grpo_loss(logprobs, old, adv, mask, denom=1, sampler_logprobs=sampler)[1]
    assert int(stats["tokens"]) == int(mask.sum())
    log_ratio, gap = (logprobs - old)[mask], (old - sampler)[mask]
    assert float(stats["kl_old"]) == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).sum()))
    assert float(stats["mismatch"]) == pytest.approx(float((gap.exp() - 1 - gap).sum()))


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_what_stands_at_masked_positions_is_harmless(junk):
    case = random_case(5)
    clean, dirty = ([x.clone() for x in case] for _ in range(2))
    mask = case[3]
    for column in (0, 1, 4):
        dirty[column][~mask] = junk
    losses = []
    for logprobs, old, adv, mask, sampler in (clean, dirty):
        logprobs.requires_grad_()
        loss, stats = grpo_loss(
            logprobs, old, adv, mask, denom=9, dual_clip=3.0, sampler_logprobs=sampler, tis_cap=2.0
        )
        loss.backward()
        sums = {key: float(value) for key, value in stats.items()}
        losses.append((float(loss.detach()), logprobs.grad, sums))
    assert losses[0][0] == losses[1][0] and losses[0][2] == losses[1][2]
    assert torch.equal(losses[0][1], losses[1][1]) and not losses[1][1][~mask].any()


def test_loss_does_not_depend_on_integer_or_bool_mask():
    logprobs, old, adv, mask, _ = random_case(8)
    assert (
        grpo_loss(logprobs, old, adv, mask, denom=3)[0]
        == grpo_loss(logprobs, old, adv, mask.long(), denom=3)[0]
    )


def random_head(rows: int, vocabulary: int):
    make = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(rows, 3, generator=make), torch.randn(vocabulary, 3, generator=make)
    targets, temperature = (
        torch.randint(vocabulary, (rows,), generator=make),
        torch.rand(rows, generator=make),
    )
    return hidden, weight, targets, temperature + 0.5, torch.randn(2, rows, generator=make)


def weighted_sum(values, by) -> torch.Tensor:
    return sum((value * some).sum() for value, some in zip(values, by))


def test_logprobs_and_entropy_are_those_of_float64():
    hidden, weight, targets, temperature, by = random_head(7, 11)
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    logprobs = (exact[0] @ exact[1].T / temperature[:, None].double()).log_softmax(-1)
    expected = logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    weighted_sum(expected, by).backward()
    got = token_logprobs(hidden.requires_grad_(), weight.requires_grad_(), targets, temperature)
    weighted_sum(got, by).backward()
    assert {x.dtype for x in got} == {torch.float32}
    for one, other in zip((*got, hidden.grad, weight.grad), (*expected, exact[0].grad, exact[1].grad)):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_chunks_of_tokens_give_what_each_alone_gives():
    rows, vocabulary = 70, 2**20  # 64 rows make a chunk
    hidden, weight, targets, temperature, by = random_head(rows, vocabulary)
    hidden.requires_grad_()
    weight.requires_grad_()
    some = torch.tensor([0, 40, 63, 64, 69])
    by[:, [i for i in range(rows) if i not in some]] = 0
    whole = token_logprobs(hidden, weight, targets, temperature)
    alone = token_logprobs(hidden[some], weight, targets[some], temperature[some])
    for got, expected in zip(whole, alone):
        torch.testing.assert_close(got[some], expected)
    gradients = torch.autograd.grad(weighted_sum(whole, by), [hidden, weight])
    expected = torch.autograd.grad(weighted_sum(alone, by[:, some]), [hidden, weight])
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


def test_temperature_may_be_a_number_or_one_for_each_token():
    hidden, weight, targets = torch.randn(4, 3), torch.randn(6, 3), torch.tensor([0, 5, 2, 3])
    for got, same in zip(
        token_logprobs(hidden, weight, targets, 0.7),
        token_logprobs(hidden, weight, targets, torch.full((4,), 0.7)),
    ):
        torch.testing.assert_close(got, same)
    hot = token_logprobs(hidden, weight, targets, torch.tensor([0.7, 5.0, 0.7, 0.7]))[1]
    cold = token_logprobs(hidden, weight, targets, 0.7)[1]
    assert hot[1] > cold[1] and torch.equal(hot[[0, 2, 3]], cold[[0, 2, 3]])


def test_column_at_minus_infinity_adds_nothing():
    hidden, weight = torch.randn(5, 4), torch.randn(9, 4)
    hidden[:, 0] = 2.0
    masked = torch.cat([weight, torch.tensor([[-3e38, 0.0, 0.0, 0.0]])])  # its logits overflow to -inf
    targets = torch.arange(5)
    results = []
    for matrix in (weight, masked):
        h, w = hidden.clone().requires_grad_(), matrix.clone().requires_grad_()
        logprobs, entropy = token_logprobs(h, w, targets)
        (logprobs.sum() + entropy.sum()).backward()
        results.append((logprobs.detach(), entropy.detach(), h.grad, w.grad[:9]))
    for got, expected in zip(results[1], results[0]):
        torch.testing.assert_close(got, expected)


def test_half_precision_inputs_give_full_precision_logits():
    make = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 16, generator=make).bfloat16() for n in (8, 50))
    targets = torch.arange(8)
    expected = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(
        token_logprobs(hidden, weight, targets)[0].double(), expected, rtol=0, atol=1e-5
    )


def test_no_tokens_give_no_values_and_no_gradient():
    hidden, weight = torch.zeros(0, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,) and not weight.grad.any()
