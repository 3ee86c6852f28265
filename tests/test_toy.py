"""The toy task: its questions, split, demonstrations and tokenizer."""

import json
import math
import re
import zlib
from collections import Counter

import numpy as np
import pytest
from conftest import tiny_config
from hypothesis import given
from hypothesis import strategies as st

import minirstar
import toy
from minirstar import ToolRequest, final_answer, same_integer, toy_demonstration

NONE = {
    "guess": 0.0,
    "wrong": 0.0,
    "wrong_hard": 0.0,
    "buggy": 0.0,
    "buggy_retry": 0.0,
    "wrong_after_error": 0.0,
}


def test_there_are_eight_kinds_or_more_each_in_several_phrasings():
    assert len(toy.KINDS) >= 8
    for phrasings, right, wrong, digits, _ in toy.KINDS.values():
        assert len(set(phrasings)) >= 2 and right != wrong
        used = {name for name, d in zip("abc", digits) if d != "0"}
        for text in (*phrasings, right, wrong):
            assert set(re.findall(r"{(\w)}", text)) == used
    assert 0 < sum(kind[4] for kind in toy.KINDS.values()) < len(toy.KINDS)


def recomputed(kind: str, numbers: list[int], prompt: str) -> int:
    """The answer from the words of the question."""
    if kind == "share":
        numbers = sorted(numbers)  # phrasings differ in order; there are more nuts than children
        return numbers[1] - numbers[1] // numbers[0] * numbers[0]
    if kind == "count" and prompt.startswith("Count"):
        numbers = numbers[::-1]
    a, b, *c = numbers
    return {
        "product": lambda: a * b - c[0],
        "boxes": lambda: a * b - c[0],
        "remainder": lambda: a - a // b * b,
        "gcd": lambda: max(d for d in range(1, a + 1) if a % d == b % d == 0),
        "digit_sum": lambda: sum(int(d) for d in f"{a * b}"),
        "largest_digit": lambda: max(int(d) for d in f"{a * b}"),
        "count": lambda: a // b,
        "last_digits": lambda: int(str(a * b)[-2:]),
        "power": lambda: a**b % c[0],
    }[kind]()


@pytest.mark.parametrize("held_out", [False, True])
def test_answers_are_right(held_out):
    seen = Counter()
    for q in toy.questions(np.random.default_rng(5), 400, held_out):
        kind = q["id"].partition("/")[0]
        seen[kind] += 1
        numbers = [int(x) for x in re.findall(r"\d+", q["prompt"].replace("from 1 to", "to"))]
        assert int(q["answer"]) == recomputed(kind, numbers, q["prompt"]), q
        assert same_integer(q["answer"], q["answer"])
    assert set(seen) == set(toy.KINDS)


def test_wrong_expression_is_nearly_always_wrong():
    questions = toy.questions(np.random.default_rng(6), 500, False)
    same = [q for q in questions if str(eval(q["wrong"], {"math": math})) == q["answer"]]
    assert len(same) < 0.05 * len(questions)


def test_split_is_disjoint_and_one_in_eight():
    train, held_out = (toy.questions(np.random.default_rng(side), 1500, side) for side in (False, True))
    assert not {q["prompt"] for q in train} & {q["prompt"] for q in held_out}
    assert len({q["prompt"] for q in train}) == len({q["id"] for q in train}) == 1500

    rng, n = np.random.default_rng(0), 4000
    prompts = [toy.question(rng, held_out=False)["prompt"] for _ in range(n)]
    assert all(zlib.crc32(p.encode()) % 8 for p in prompts)
    tried = [f"What is {a} * {b} - {c}?" for a in range(11, 31) for b in range(11, 31) for c in range(11, 21)]
    share = np.mean([zlib.crc32(p.encode()) % 8 == 0 for p in tried])
    assert abs(share - 1 / 8) < 5 * math.sqrt(1 / 8 * 7 / 8 / len(tried))


def chi_square(train: Counter, held_out: Counter) -> float:
    """Homogeneity of two samples."""
    n, m = train.total(), held_out.total()
    value = 0.0
    for key in train | held_out:
        share = (train[key] + held_out[key]) / (n + m)
        value += (train[key] - n * share) ** 2 / (n * share) + (held_out[key] - m * share) ** 2 / (m * share)
    return value


@pytest.mark.parametrize(
    "trait",
    [
        lambda q: q["id"].partition("/")[0],
        lambda q: int(q["answer"]) % 2,
        lambda q: int(q["answer"]) % 5,
        lambda q: q["hard"],
        lambda q: q["prompt"].split()[0],
    ],
    ids=["kind", "parity", "mod 5", "hard", "phrasing"],
)
def test_split_knows_nothing_of_kind_or_answer(trait):
    train, held_out = (
        Counter(trait(toy.question(rng, side)) for _ in range(3000))
        for side, rng in ((False, np.random.default_rng(1)), (True, np.random.default_rng(2)))
    )
    freedom = len(train | held_out) - 1
    assert chi_square(train, held_out) < freedom + 5 * math.sqrt(2 * freedom)


def test_same_seed_gives_the_same_questions():
    one, same, other = (toy.questions(np.random.default_rng(s), 50, True) for s in (3, 3, 4))
    assert one == same and one != other


def codes() -> list[str]:
    """Right, wrong and buggy code of every kind."""
    forms = {}
    for seed in range(400):
        noise = NONE | {
            "buggy": 0.6,
            "buggy_retry": 0.6,
            "wrong": 0.5,
            "wrong_hard": 0.5,
            "wrong_after_error": 0.5,
        }
        q, turns, _ = toy.demonstration(np.random.default_rng(seed), noise)
        for turn in turns[:-1]:
            code = json.loads(turn.partition("<tool_call>")[2].removesuffix("</tool_call>"))["arguments"][
                "code"
            ]
            extra = code.count(")") - code.count("(")
            bug = "misspelt" if "prnt" in code else {-1: "unclosed", 0: "", 1: "unmatched"}[extra]
            forms.setdefault((q["id"].partition("/")[0], q["wrong"] in code, bug), code)
    assert {bug for _, _, bug in forms} == {"misspelt", "unclosed", "unmatched", ""} and len(forms) > 60
    return list(forms.values())


def test_demonstrated_results_are_the_sandboxs(sandbox):
    """Status, stdout and stderr of right code, wrong code and every bug."""
    some = codes()
    for code, real in zip(some, sandbox.run([ToolRequest(code) for code in some])):
        shown = toy.run(code)
        assert (shown.status, shown.stdout, shown.stderr) == (real.status, real.stdout, real.stderr), code


def test_every_bug_makes_its_call_fail():
    rng = np.random.default_rng(8)
    for _ in range(600):
        _, turns, results = toy.demonstration(rng, NONE | {"buggy": 1.0})
        assert results[0].status == "error", turns[0]


def test_demonstrations_are_rollouts(chat):
    cfg = tiny_config(tool_output_chars=48)
    for seed in range(60):
        rollout = toy_demonstration(np.random.default_rng(seed), chat, cfg)
        assert rollout.stop_reason == "answer" and final_answer(rollout) is not None
        assert all(call.result is not None and call.request is not None for call in rollout.calls)
        assert len(rollout.calls) == len(rollout.turns) - 1
        mask = rollout.loss_mask
        assert len(mask) == len(rollout.tokens) and not any(mask[: rollout.prompt_length]) and mask[-1] == 1
        assert rollout.tokens[-1] == chat.turn_end
        written = chat.decode([t for t, m in zip(rollout.tokens, mask) if m])
        assert "<tool_response>" not in written and written.count("</reason>") == len(rollout.turns)


def test_demonstrations_without_noise_are_right(chat):
    cfg = tiny_config(**{f"demo_{name}": 0.0 for name in NONE})
    for seed in range(40):
        rollout = toy_demonstration(np.random.default_rng(seed), chat, cfg)
        assert same_integer(final_answer(rollout), rollout.problem.answer)
        assert len(rollout.calls) == 1 and rollout.calls[0].result.status == "ok"


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_demonstrations_keep_to_the_number_of_turns(chat, turns):
    cfg = tiny_config(max_turns=turns, demo_buggy=1.0, demo_buggy_retry=0.7, demo_guess=0.0)
    for seed in range(20):
        rollout = toy_demonstration(np.random.default_rng(seed), chat, cfg)
        assert len(rollout.turns) <= turns and rollout.stop_reason == "answer"


def share(noise: dict, happened) -> tuple[float, int]:
    """How often `happened(question, turns, results)` is true; None does not count."""
    rng = np.random.default_rng(11)
    values = [happened(*toy.demonstration(rng, NONE | noise)) for _ in range(2000)]
    values = [v for v in values if v is not None]
    return float(np.mean(values)), len(values)


def used_wrong(q, code: str) -> bool:
    return q["wrong"] in code


@pytest.mark.parametrize(
    "noise, happened",
    [
        ({"guess": 0.15}, lambda q, turns, results: not results),
        ({"buggy": 0.3}, lambda q, turns, results: results[0].status != "ok"),
        (
            {"buggy": 1.0, "buggy_retry": 0.3},
            lambda q, turns, results: len(results) > 1 and results[1].status != "ok",
        ),
        ({"wrong": 0.4}, lambda q, turns, results: None if q["hard"] else q["wrong"] in turns[0]),
        ({"wrong_hard": 0.65}, lambda q, turns, results: q["wrong"] in turns[0] if q["hard"] else None),
        ({"buggy": 1.0, "wrong_after_error": 0.25}, lambda q, turns, results: q["wrong"] in turns[1]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_noise_has_its_probability(noise, happened):
    probability = list(noise.values())[-1]
    seen, n = share(noise, happened)
    assert n > 500 and abs(seen - probability) < 4.5 * math.sqrt(probability * (1 - probability) / n)


def test_noise_that_is_off_does_not_happen():
    assert (
        share(
            {},
            lambda q, turns, results: len(turns) != 2 or results[0].status != "ok" or q["wrong"] in turns[0],
        )[0]
        == 0
    )


@given(st.integers(0, 10**12))
def test_digits_are_single_tokens(tokenizer, number):
    tokens = tokenizer.encode(f"print({number})", add_special_tokens=False)
    assert sum(tokenizer.decode([t]).isdigit() for t in tokens) == len(str(number))
    assert all(len(re.findall(r"\d", tokenizer.decode([t]))) <= 1 for t in tokens)


def test_tags_are_single_tokens_and_no_special_ones(tokenizer):
    for tag in ("reason", "tool_call", "tool_response", "answer"):
        for text in (f"<{tag}>", f"</{tag}>"):
            (token,) = tokenizer.encode(text, add_special_tokens=False)
            assert token not in tokenizer.all_special_ids and tokenizer.decode([token]) == text


@given(st.text(max_size=80))
def test_saved_tokenizer_encodes_the_same(tokenizer, reloaded, text):
    assert reloaded.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
    assert reloaded.decode(tokenizer.encode(text, add_special_tokens=False)) == text or "<|" in text


@pytest.fixture(scope="session")
def reloaded(tokenizer, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_saved_tokenizer_keeps_template_and_special_tokens(tokenizer, reloaded):
    assert reloaded.chat_template == tokenizer.chat_template
    assert (reloaded.pad_token_id, reloaded.eos_token_id, len(reloaded)) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        len(tokenizer),
    )
    for outside in (False, True):
        text = "a<|im_end|>b"
        assert reloaded.encode(
            text, add_special_tokens=False, split_special_tokens=outside
        ) == tokenizer.encode(text, add_special_tokens=False, split_special_tokens=outside)


def test_tokenizer_and_model_repeat_with_the_seed(toy_parts):
    model, tokenizer = minirstar.load_model(tiny_config())
    assert tokenizer.get_vocab() == toy_parts[1].get_vocab()
    assert all((a == b).all() for a, b in zip(model.parameters(), toy_parts[0].parameters()))
