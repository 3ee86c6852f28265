"""What LocalEngine guarantees, and that it samples from the policy that is trained."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import ScriptedEngine, tiny_config

import minirstar
from minirstar import GenerationRequest, LocalEngine, LocalPolicy, Problem, collate, collect

PROMPTS = ["What is 61 * 17 - 12?", "Find 1234 mod 56.", "Compute 12^34 mod 56.", "Find gcd(123, 456)."]


def requests(chat, max_tokens=30, prompts=PROMPTS):
    return [
        GenerationRequest(
            f"r/{i}", tuple(chat.prompt(Problem(f"p/{i}", text, "1"))), max_tokens, chat.turn_end
        )
        for i, text in enumerate(prompts)
    ]


def seeded(model, chat, seed=1, **settings) -> LocalEngine:
    return LocalEngine(model, chat, tiny_config(seed=seed, **settings))


def test_completions_stop_at_the_stop_token_or_at_the_limit(engine, chat):
    asked = [
        GenerationRequest(f"r/{i}", r.tokens, 1 + i, r.stop_token) for i, r in enumerate(requests(chat) * 10)
    ]
    reasons = set()
    for request, completion in zip(asked, engine.generate(asked)):
        tokens = completion.tokens
        assert 1 <= len(tokens) <= request.max_tokens and len(completion.logprobs) == len(tokens)
        assert all(type(t) is int and 0 <= t < len(chat.tokenizer) for t in tokens)
        assert all(math.isfinite(x) and x <= 0 for x in completion.logprobs)
        assert chat.turn_end not in tokens[:-1]
        assert (completion.finish_reason == "stop") == (tokens[-1] == chat.turn_end)
        assert completion.finish_reason == "stop" or len(tokens) == request.max_tokens
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_any_token_can_be_the_stop_token(model, chat):
    (request,) = requests(chat, prompts=PROMPTS[:1])
    (first,) = seeded(model, chat).generate([request])
    stop = first.tokens[2]
    (again,) = seeded(model, chat).generate([dataclasses.replace(request, stop_token=stop)])
    assert again.tokens == first.tokens[: first.tokens.index(stop) + 1] and again.finish_reason == "stop"


def test_results_are_in_the_order_of_requests(model, chat):
    """A model that repeats the last token: each completion shows whose it is."""

    class Echo(torch.nn.Module):
        device, config = model.device, model.config

        def forward(self, inputs, past_key_values, **_):
            shape = (len(inputs), 1, 1, 1)
            past_key_values.update(torch.zeros(shape), torch.zeros(shape), 0)
            logits = torch.nn.functional.one_hot(inputs[:, -1:], 800) * 1e3
            return type("Output", (), {"logits": logits.float()})

    lengths = [9, 2, 7, 7, 1, 30, 4, 4, 12]
    asked = [GenerationRequest(f"r/{i}", (500 + i,) * n, 3 + i, 2) for i, n in enumerate(lengths)]
    for rows in (1, 2, 4, 100):
        results = seeded(Echo(), chat, generate_rows=rows).generate(asked)
        assert [r.tokens for r in results] == [[500 + i] * (3 + i) for i in range(len(lengths))]


def test_no_requests(engine):
    assert engine.generate([]) == []


def test_a_seed_repeats(model, chat):
    one, same, other = (seeded(model, chat, seed).generate(requests(chat)) for seed in (1, 1, 2))
    assert one == same and [c.tokens for c in one] != [c.tokens for c in other]


def test_two_calls_of_one_engine_differ(engine, chat):
    assert [c.tokens for c in engine.generate(requests(chat))] != [
        c.tokens for c in engine.generate(requests(chat))
    ]


def test_completions_carry_the_version_of_the_loaded_weights(engine, chat):
    assert {c.policy_version for c in engine.generate(requests(chat))} == {0}
    engine.load_weights(engine.model.state_dict(), version=7)
    assert {c.policy_version for c in engine.generate(requests(chat))} == {7}


def test_loaded_weights_are_sampled_from(model, toy_parts, chat):
    random = toy_parts[0]
    before = {name: tensor.clone() for name, tensor in random.state_dict().items()}
    engine = seeded(model, chat)
    engine.load_weights(random.state_dict(), version=1)
    expected = seeded(random, chat).generate(requests(chat))
    assert [c.tokens for c in engine.generate(requests(chat))] == [c.tokens for c in expected]
    with torch.no_grad():  # the engine has its own copy of another model's weights
        next(model.parameters()).zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in random.state_dict().items())


def test_engine_follows_a_policy_that_shares_its_weights(model, chat):
    policy = LocalPolicy(model, tiny_config())
    engine = seeded(model, chat)
    names = policy.weights()
    assert all(
        tensor.data_ptr() == names[name].data_ptr() for name, tensor in engine.model.state_dict().items()
    )
    engine.load_weights(names, version=3)
    assert engine.version == 3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samplers_and_trainers_logprobs_agree(model, chat, sandbox, temperature):
    cfg = tiny_config(temperature=temperature, max_tokens=120, generate_rows=5)
    problems = [Problem(f"p/{i}", text, "1") for i, text in enumerate(PROMPTS)]
    rollouts = collect(problems, LocalEngine(model, chat, cfg), sandbox, cfg, samples=4)
    assert max(len(r.turns) for r in rollouts) >= 2 and len({len(r.tokens) for r in rollouts}) > 3
    batch = collate(rollouts, cfg)
    logprobs = LocalPolicy(model, cfg).logprobs(batch)[0]
    gap = (logprobs - batch.sampler_logprobs)[batch.loss_mask].abs()
    assert len(gap) > 200 and gap.max() <= 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_frequencies_are_the_models_probabilities(model, chat, temperature):
    token, n = chat.turn_end, 4000
    with torch.no_grad():
        expected = (model(torch.tensor([[token]])).logits[0, -1] / temperature).softmax(-1).numpy()
    engine = LocalEngine(model, chat, tiny_config(temperature=temperature, generate_rows=n))
    drawn = engine.generate([GenerationRequest(f"r/{i}", (token,), 1, token) for i in range(n)])
    counts = np.bincount([c.tokens[0] for c in drawn], minlength=len(expected))
    common = np.argsort(-expected)[:10]
    sigma = np.sqrt(expected[common] * (1 - expected[common]) / n)
    assert (np.abs(counts[common] / n - expected[common]) < 5 * sigma + 1e-9).all()
    assert all(c.logprobs[0] == pytest.approx(math.log(expected[c.tokens[0]]), abs=1e-4) for c in drawn[:50])


@pytest.mark.parametrize("piece", [None, 4])
def test_collect_grades_every_sample_of_every_problem(chat, sandbox, piece):
    cfg = tiny_config(max_tokens=300, group_size=3, oversample=2)
    problems = [Problem(f"p/{i}", f"What is {i} * 7?", "42") for i in range(5)]
    rollouts = collect(problems, ScriptedEngine(chat, piece), sandbox, cfg, tag="t")
    assert [r.group for r in rollouts] == [i for i in range(5) for _ in range(6)]
    assert all(r.problem is problems[r.group] and r.stop_reason for r in rollouts)
    assert len({r.id for r in rollouts}) == 30
    assert {r.reward for r in rollouts} == {0.0, 1.0}
    for r in rollouts:
        final = r.stop_reason == "answer" and "\\boxed{42}" in r.turns[-1]
        assert r.reward == float(final)
        for call in r.calls:
            code = call.request and call.request.code
            assert call.result.stdout == {"print(6*7)": "42\n", "print(2)": "2\n"}.get(code, "")
            assert call.result.status == {"1/0": "error", None: "parse_error"}.get(code, "ok")


def test_sessions_last_through_a_rollout_and_end_with_it(chat, sandbox):
    cell = '</reason><tool_call>{"name": "jupyter_code", "arguments": {"code": "%s"}}</tool_call>'

    class Stateful(ScriptedEngine):
        def complete(self, request):
            turn = chat.decode(request.tokens).count("<tool_response>\n")
            text = [cell % "x = 1", cell % "x + 1", "done"][turn]
            tokens = [*chat.encode(text), request.stop_token]
            return minirstar.Completion(tokens, [0.0] * len(tokens), "stop")

    cfg = tiny_config(max_tokens=300)
    for _ in range(2):  # the second time under the same ids: the first left nothing
        rollouts = collect([Problem("p/0", "?", "1")], Stateful(chat), sandbox, cfg, samples=2)
        assert all([c.result.stdout for c in r.calls] == ["", "2\n"] for r in rollouts)
        assert not set(sandbox.sessions) & {r.id for r in rollouts}
