"""train_step with a policy that records what it is given, and LocalPolicy."""

import copy
import math

import numpy as np
import pytest
import torch
from conftest import ANSWER, CALL, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from minirstar import (
    Completion,
    LocalPolicy,
    Problem,
    Rollout,
    ToolResult,
    ToolStatus,
    append_completion,
    append_tool_results,
    collate,
    micro_batches,
    start,
    train_step,
)

STEP_METRICS = {
    "reward/mean",
    "tools/error_rate",
    "tools/error_rate_correct",
    "tools/calls_per_rollout",
    "rollout/tokens",
    "rollout/tokens_correct",
    "rollout/turns",
    "roc/kept_penalty",
    "group/uniform_fraction",
    "loss/policy",
    "loss/clip_fraction",
    "loss/kl_old",
    "mismatch/kl",
    "policy/entropy",
    "policy/grad_norm",
    "time/update",
}


class Recorder:
    """A Policy whose log-probs are -1 - (number of updates so far), and that keeps what update is given."""

    def __init__(self):
        self.updates, self.losses = [], []

    def logprobs(self, batch):
        shape = batch.tokens.shape
        return torch.full(shape, -1.0 - len(self.updates)), torch.full(shape, 0.5)

    def update(self, batches, loss_fn):
        totals = {"updates": 1, "grad_norm": 2.0, "skipped": 0.0, "loss": 0.0}
        for batch in batches:
            logprobs, entropy = self.logprobs(batch)
            loss, stats = loss_fn(logprobs, entropy, batch)
            self.losses.append(loss)
            for key, value in (stats | {"loss": loss}).items():
                totals[key] = totals.get(key, 0.0) + float(value)
        self.updates.append(list(batches))
        return totals


def made(
    i: int, group: int, reward: float, penalty: float = 0.0, length: int = 6, stop: str = "answer"
) -> Rollout:
    """A graded rollout: 3 prompt tokens, 2 sampled, 1 of a tool, the rest sampled. Its tokens name it."""
    mask = [0, 0, 0, 1, 1, 0, *[1] * (length - 3)]
    return Rollout(
        f"r/{i}",
        Problem(f"p/{group}", "?", "1"),
        group,
        100,
        5,
        100,
        tokens=[i] * len(mask),
        loss_mask=mask,
        sampler_logprobs=[-1.0 * m for m in mask],
        versions=[m - 1 for m in mask],
        prompt_length=3,
        turns=["x"],
        stop_reason=stop,
        reward=float(reward),
        error_penalty=penalty,
    )


def groups(*rewards, **options) -> list[Rollout]:
    return [
        made(100 * g + i + 1, g, reward, penalty=i / 10, length=4 + (g + 3 * i) % 7, **options)
        for g, some in enumerate(rewards)
        for i, reward in enumerate(some)
    ]


def step(rollouts, seed=0, **settings):
    policy = Recorder()
    cfg = tiny_config(**{"group_size": 4, "oversample": 2, "micro_batch_tokens": 40} | settings)
    return policy, train_step(rollouts, policy, cfg, np.random.default_rng(seed))


def trained_on(policy) -> list[int]:
    """Names (token ids) of the rollouts in the updates."""
    return sorted(int(row[0]) for batches in policy.updates for batch in batches for row in batch.tokens)


MIXED = [1, 0, 1, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("algo", ["roc", "grpo", "uniform"])
def test_groups_of_equal_rewards_are_dropped_whole(algo):
    rollouts = groups([0] * 8, MIXED, [1] * 8)
    policy, metrics = step(rollouts, algo=algo)
    assert metrics["group/uniform_fraction"] == pytest.approx(2 / 3)
    assert trained_on(policy) and {name // 100 for name in trained_on(policy)} == {1}
    assert not any(r.kept or r.advantage for r in rollouts if r.group != 1)


@pytest.mark.parametrize("algo, kept", [("roc", 4), ("grpo", 8), ("uniform", 4)])
def test_number_kept_and_flags(algo, kept):
    rollouts = groups(MIXED, MIXED)
    policy, _ = step(rollouts, algo=algo)
    for group in (0, 1):
        assert sum(r.kept for r in rollouts if r.group == group) == kept
    assert trained_on(policy) == sorted(r.tokens[0] for r in rollouts if r.kept)


def test_uniform_ignores_rewards_and_penalties_and_roc_does_not():
    group = [[1] * 4 + [0] * 4]
    counts = {"roc": np.zeros(8), "uniform": np.zeros(8)}
    for algo, count in counts.items():
        for seed in range(300):
            rollouts = groups(*group)
            for i, r in enumerate(rollouts):
                r.error_penalty = 2.0 * (i % 2)
            step(rollouts, seed, algo=algo)
            count += [r.kept for r in rollouts]
    assert np.abs(counts["uniform"] / 300 - 0.5).max() < 0.13
    assert counts["roc"][[0, 2]].min() > 1.3 * counts["roc"][[1, 3]].max()


def test_lowest_keeps_the_cleanest_right_ones():
    rollouts = groups([1] * 4 + [0] * 4)
    _, metrics = step(rollouts, select="lowest")
    assert [r.kept for r in rollouts[:4]] == [True, True, False, False]
    assert metrics["roc/kept_penalty"] == pytest.approx(0.05)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=8, max_size=8), min_size=1, max_size=4),
    st.sampled_from(["roc", "grpo", "uniform"]),
    st.integers(0, 99),
)
def test_advantages_of_a_group_sum_to_zero_and_have_the_rewards_sign(rewards, algo, seed):
    rollouts = groups(*rewards)
    step(rollouts, seed, algo=algo)
    for group in range(len(rewards)):
        kept = [r for r in rollouts if r.group == group and r.kept]
        assert sum(r.advantage for r in kept) == pytest.approx(0, abs=1e-5)
        assert all((r.advantage > 0) == (r.reward > 0) for r in kept)
        assert not kept or np.std([r.advantage for r in kept], ddof=1) == pytest.approx(1, abs=1e-4)
    assert all(r.advantage == 0 for r in rollouts if not r.kept)


def test_loss_is_divided_by_all_kept_tokens_of_the_step():
    rollouts = groups(MIXED, MIXED[::-1])
    policy, metrics = step(rollouts, algo="grpo")
    assert len(policy.updates) == 1 and len(policy.updates[0]) > 3
    tokens = sum(sum(r.loss_mask) for r in rollouts)
    expected = -sum(r.advantage * sum(r.loss_mask) for r in rollouts) / tokens  # the ratio is 1 everywhere
    assert sum(map(float, policy.losses)) == pytest.approx(expected, abs=1e-6)
    assert metrics["loss/policy"] == pytest.approx(expected, abs=1e-6) and metrics[
        "policy/entropy"
    ] == pytest.approx(0.5)


def test_loss_does_not_depend_on_micro_batches():
    totals = [
        step(groups(MIXED, MIXED), algo="grpo", micro_batch_tokens=n)[1]["loss/policy"]
        for n in (1, 40, 10_000)
    ]
    assert totals[0] == pytest.approx(totals[1], abs=1e-6) and totals[0] == pytest.approx(totals[2], abs=1e-6)


def test_one_mini_batch_needs_no_old_logprobs():
    policy, metrics = step(groups(MIXED))
    assert all(batch.old_logprobs is None for batch in policy.updates[0])
    assert metrics["loss/kl_old"] == 0.0 and metrics["loss/clip_fraction"] == 0.0


def test_mini_batches_share_the_logprobs_from_before_the_first_update():
    rollouts = groups(MIXED, MIXED)
    policy, metrics = step(rollouts, algo="grpo", mini_batches=3)
    assert len(policy.updates) == 3
    for batches in policy.updates:
        assert all((batch.old_logprobs == -1.0).all() for batch in batches)
    assert trained_on(policy) == sorted(r.tokens[0] for r in rollouts)
    # log-ratios are 0, -1 and -2 in the three updates: the second and the third move away from the old policy
    assert metrics["loss/kl_old"] > 0.1 and metrics["loss/clip_fraction"] > 0.1


def test_more_mini_batches_than_rollouts_lose_none():
    rollouts = groups([1, 0])
    policy, _ = step(rollouts, algo="grpo", mini_batches=5)
    assert len(policy.updates) == 2 and trained_on(policy) == [1, 2]


@given(st.lists(st.integers(4, 60), min_size=1, max_size=20), st.integers(1, 200))
def test_micro_batches_respect_the_budget_and_lose_nothing(lengths, budget):
    rollouts = [made(i + 1, 0, 1.0, length=length) for i, length in enumerate(lengths)]
    batches = micro_batches(rollouts, tiny_config(micro_batch_tokens=budget))
    for batch in batches:
        assert batch.tokens.numel() <= budget or len(batch.tokens) == 1
        for row, attention, mask in zip(batch.tokens, batch.attention_mask, batch.loss_mask):
            rollout = rollouts[int(row[0]) - 1]
            assert (
                row[attention].tolist() == rollout.tokens
                and mask[attention].int().tolist() == rollout.loss_mask
            )
            assert (
                not mask[~attention].any() and attention.int().diff().le(0).all()
            )  # padding is on the right
    assert sorted(int(row[0]) for batch in batches for row in batch.tokens) == list(
        range(1, len(lengths) + 1)
    )


def test_truncated_rollouts_stay_in_the_loss_unless_masked():
    rollouts = groups(MIXED)
    for r in rollouts[:3]:
        r.stop_reason = "length"
    rollouts[3].stop_reason = "turns"
    for masked in (False, True):
        policy, _ = step(rollouts, algo="grpo", mask_truncated=masked)
        counted = {
            int(row[0]): int(mask.sum())
            for batches in policy.updates
            for batch in batches
            for row, mask in zip(batch.tokens, batch.loss_mask)
        }
        for r in rollouts:
            assert counted[r.tokens[0]] == (0 if masked and r.stop_reason == "length" else sum(r.loss_mask))
    tokens = sum(sum(r.loss_mask) for r in rollouts if r.stop_reason != "length")
    expected = -sum(r.advantage * sum(r.loss_mask) for r in rollouts if r.stop_reason != "length") / tokens
    assert sum(map(float, policy.losses)) == pytest.approx(expected, abs=1e-5)


def test_step_without_signal_updates_nothing():
    policy, metrics = step(groups([0] * 8, [1] * 8))
    assert policy.updates == [] and metrics["group/uniform_fraction"] == 1.0
    assert math.isnan(metrics["roc/kept_penalty"]) and metrics["loss/policy"] == 0.0
    assert set(metrics) == STEP_METRICS


def test_step_of_which_everything_is_masked_updates_nothing():
    policy, metrics = step(groups(MIXED, stop="length"), mask_truncated=True)
    assert policy.updates == [] and metrics["loss/policy"] == 0.0


def test_metrics_have_the_documented_names_and_values(chat):
    rollouts = groups(MIXED)
    rollouts[0].calls = real(chat, "1", 0, 0).calls  # one call, ok; its rollout is right
    rollouts[1].calls = real(chat, "1", 0, 0, ToolStatus.timeout).calls
    _, metrics = step(rollouts)
    assert set(metrics) == STEP_METRICS
    assert metrics["reward/mean"] == 0.5 and metrics["tools/error_rate"] == 0.5
    assert metrics["tools/error_rate_correct"] == 0.0 and metrics["tools/calls_per_rollout"] == 0.25
    assert metrics["rollout/tokens"] == np.mean([r.response_tokens for r in rollouts])
    assert metrics["rollout/tokens_correct"] == np.mean([r.response_tokens for r in rollouts if r.reward])
    assert metrics["rollout/turns"] == 1.0 and metrics["policy/grad_norm"] == 2.0


def real(chat, number: str, i: int, reward: float, status: ToolStatus = ToolStatus.ok) -> Rollout:
    """A rollout of two turns with a tool result between, as the model would see it."""
    cfg = tiny_config(max_tokens=500)
    rollout = start(Problem("p/0", f"What is {number} * 7?", "1"), chat, cfg, f"r/{i}")
    for text in ("x" * i + "</reason>" + CALL % f"print({number}*7)", ANSWER % number):
        tokens = [*chat.encode(text), chat.turn_end]
        calls = append_completion(rollout, Completion(tokens, [-1.0] * len(tokens), "stop"), chat)
        if calls:
            append_tool_results(rollout, [ToolResult(status, number)], chat)
    rollout.reward = float(reward)
    return rollout


def real_group(chat) -> list[Rollout]:
    return [real(chat, str(3 + 1000 ** (i % 3)), i, i % 2) for i in range(6)]


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_weights_after_an_update_do_not_depend_on_micro_batches(model, chat):
    after = []
    for budget in (1, 200, 100_000):
        cfg = tiny_config(algo="grpo", micro_batch_tokens=budget, lr=1e-3, grad_clip=1e9)
        one = copy.deepcopy(model)
        policy = LocalPolicy(one, cfg)
        policy.optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2)]  # Adam would blow rounding errors up
        policy.schedulers = [torch.optim.lr_scheduler.ConstantLR(policy.optimizers[0], 1.0)]
        metrics = train_step(real_group(chat), policy, cfg, np.random.default_rng(0))
        after.append((weights_of(one), metrics))
    assert any(not torch.equal(after[0][0][name], tensor) for name, tensor in model.state_dict().items())
    for weights, metrics in after[1:]:
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, after[0][0][name], rtol=1e-4, atol=1e-6)
        for name in ("loss/policy", "policy/entropy", "policy/grad_norm", "mismatch/kl"):
            assert metrics[name] == pytest.approx(after[0][1][name], rel=1e-4, abs=1e-6)


def test_gradient_that_is_not_finite_leaves_the_weights(model, chat):
    cfg = tiny_config(stages=("9:40",))
    policy, before = LocalPolicy(model, cfg), weights_of(model)
    batch = collate(real_group(chat), cfg)
    stats = policy.update([batch], lambda logprobs, entropy, batch: (logprobs.sum() * math.inf, {}))
    assert stats["skipped"] == 1 and stats["updates"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    stats = policy.update([batch], lambda logprobs, entropy, batch: (-logprobs.mean(), {}))
    assert stats["skipped"] == 0 and any(not torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_update_makes_rewarded_tokens_likelier_and_touches_masked_ones_in_no_way(model, chat):
    cfg = tiny_config(algo="grpo", lr=1e-3, micro_batch_tokens=10_000)
    policy, rollouts = LocalPolicy(model, cfg), real_group(chat)
    batch = collate(rollouts, cfg)
    before = policy.logprobs(batch)[0]
    assert not before[~batch.loss_mask].any() and (before[batch.loss_mask] < 0).all()
    train_step(rollouts, policy, cfg, np.random.default_rng(0))
    gain = (policy.logprobs(batch)[0] - before).sum(1)
    right = torch.tensor([r.reward > 0 for r in rollouts])
    assert gain[right].mean() > gain[~right].mean()


def test_policys_logprobs_are_the_models_whatever_the_padding(model, chat):
    cfg = tiny_config(temperature=0.7)
    policy, rollouts = LocalPolicy(model, cfg), real_group(chat)
    logprobs, entropy = policy.logprobs(collate(rollouts, cfg))
    for rollout, got, measured in zip(rollouts, logprobs, entropy):
        tokens = torch.tensor([rollout.tokens])
        with torch.no_grad():
            expected = (model(tokens).logits[0, :-1] / 0.7).log_softmax(-1)
        mask = torch.tensor(rollout.loss_mask[1:], dtype=torch.bool)
        picked = expected.gather(1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(got[1 : len(tokens[0])][mask], picked[mask], rtol=1e-4, atol=1e-4)
        spread = -(expected.exp() * expected).sum(-1)
        torch.testing.assert_close(measured[1 : len(tokens[0])][mask], spread[mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"lora": 2}, {"gradient_checkpointing": True}], ids=str)
def test_saved_policy_goes_on_as_if_it_had_not_been(model_folder, chat, tmp_path, settings):
    from minirstar import load_model

    cfg = tiny_config(model=str(model_folder), lr=1e-3, **settings)

    def policy():
        return LocalPolicy(load_model(cfg)[0], cfg)

    def update(one):
        return one.update(
            [collate(real_group(chat), cfg)], lambda logprobs, entropy, batch: (-logprobs.mean(), {})
        )

    one, other = policy(), policy()
    update(one)
    one.save(tmp_path)
    other.load(tmp_path)
    assert update(one) == update(other)
    assert all(torch.equal(a, b) for a, b in zip(one.weights().values(), other.weights().values()))
    trained = {name for name, p in one.model.named_parameters() if p.requires_grad}
    assert all("lora" in name for name in trained) if settings.get("lora") else len(trained) > 20
