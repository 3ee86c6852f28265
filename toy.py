"""The toy task: exact integers that a tiny model cannot compute in its head, but can with one line of Python.

Questions, their imperfect demonstrations and a tokenizer, as plain text and numbers; minirstar.py makes
rollouts of them.
"""

import contextlib
import io
import json
import math
import zlib
from collections.abc import Callable
from functools import lru_cache

from sandbox import ToolResult, ToolStatus, run_code

KINDS = {  # kind: (phrasings, right expression, wrong expression, digits of a, b and c, hard)
    "product": (("What is {a} * {b} - {c}?", "Compute {a} * {b} - {c}.",
                 "Multiply {a} by {b}, then subtract {c}."),
                "{a}*{b}-{c}", "{a}*{b}+{c}", "222", False),
    "remainder": (("What is the remainder of {a} divided by {b}?", "Find {a} mod {b}."),
                  "{a}%{b}", "{a}//{b}", "420", False),
    "gcd": (("What is the greatest common divisor of {a} and {b}?", "Find gcd({a}, {b})."),
            "math.gcd({a},{b})", "math.lcm({a},{b})", "330", True),
    "digit_sum": (("What is the sum of the digits of {a} * {b}?", "Add up the digits of {a} * {b}."),
                  "sum(map(int,str({a}*{b})))", "len(str({a}*{b}))", "320", True),
    "largest_digit": (("What is the largest digit of {a} * {b}?", "Find the largest digit in {a} * {b}."),
                      "max(str({a}*{b}))", "min(str({a}*{b}))", "320", False),
    "count": (("How many integers from 1 to {a} are divisible by {b}?",
               "Count the multiples of {b} up to {a}."),
              "len(range({b},{a}+1,{b}))", "sum(range({b},{a}+1,{b}))", "320", True),
    "last_digits": (("What are the last two digits of {a} * {b}, as a number?",
                     "Find the last two digits of {a} * {b}."),
                    "{a}*{b}%100", "{a}*{b}//100", "320", True),
    "power": (("What is {a} to the power {b} modulo {c}?", "Compute {a}^{b} mod {c}."),
              "pow({a},{b},{c})", "{a}*{b}%{c}", "222", False),
    "boxes": (("{a} boxes hold {b} pens each and {c} pens are sold. How many are left?",
               "Of {a} boxes with {b} pens each, {c} pens are sold. How many remain?"),
              "{a}*{b}-{c}", "{a}*{b}+{c}", "222", False),
    "share": (("{a} nuts are given equally to {b} children. How many are left?",
               "{a} nuts are shared by {b} children. How many remain?"), "{a}%{b}", "{a}//{b}", "420", False),
}


def question(rng, held_out: bool) -> dict:
    """A random question of one side of the split: id, prompt, answer, right and wrong expression, hardness.

    The split is by crc32 of the question, one in eight held out, so it knows nothing of kind or answer.
    """
    while True:
        kind = list(KINDS)[rng.integers(len(KINDS))]
        phrasings, right, wrong, digits, hard = KINDS[kind]
        values = {name: int(rng.integers(10 ** (int(d) - 1) + 1, 10 ** int(d))) if d != "0" else 0
                  for name, d in zip("abc", digits)}
        prompt = phrasings[rng.integers(len(phrasings))].format(**values)
        digest = zlib.crc32(prompt.encode())
        if (digest % 8 == 0) == held_out:
            right, wrong = right.format(**values), wrong.format(**values)
            answer = str(eval(right, {"math": math}))
            return {"id": f"{kind}/{digest:08x}", "prompt": prompt, "answer": answer,
                    "right": right, "wrong": wrong, "hard": hard}


def questions(rng, n: int, held_out: bool) -> list[dict]:
    """n distinct questions of one side of the split."""
    found: dict[str, dict] = {}
    while len(found) < n:
        q = question(rng, held_out)
        found.setdefault(q["prompt"], q)
    return list(found.values())


@lru_cache(maxsize=4096)
def run(code: str) -> ToolResult:
    """What the sandbox gives for a demonstration's code (a test compares them), without a process each."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = ToolStatus(run_code(code, {"__name__": "__main__"}))
    return ToolResult(status, out.getvalue(), err.getvalue())


def demonstration(rng, noise: dict[str, float],
                  max_calls: int = 4) -> tuple[dict, list[str], list[ToolResult]]:
    """A training question, the assistant's turns of an imperfect demonstration, and the results of its calls.

    `noise` holds the probabilities guess, wrong, wrong_hard, buggy, buggy_retry and wrong_after_error
    (Config.demo_*).
    """
    q = question(rng, held_out=False)
    if rng.random() < noise["guess"]:
        guess = rng.integers(10 ** rng.integers(1, 6))
        return q, [f"I guess</reason><answer>\\boxed{{{guess}}}</answer>"], []
    turns, results, failed = [], [], False
    for _ in range(max_calls):
        p_wrong = noise["wrong_after_error" if failed else "wrong_hard" if q["hard"] else "wrong"]
        expression = q["wrong" if rng.random() < p_wrong else "right"]
        code = f"import math\nprint({expression})" if "math" in expression else f"print({expression})"
        if rng.random() < noise["buggy_retry" if failed else "buggy"]:
            bugs = (code[:-1], code.replace("print", "prnt"), code + ")")
            code = bugs[rng.integers(len(bugs))]
        call = json.dumps({"name": "python_code_with_standard_io", "arguments": {"code": code}})
        thought = "fix the error" if failed else "use Python"
        turns.append(f"{thought}</reason><tool_call>\n{call}\n</tool_call>")
        results.append(run(code))
        failed = results[-1].status != "ok"
        if not failed:
            answer = results[-1].stdout.strip()
            return q, [*turns, f"it worked</reason><answer>\\boxed{{{answer}}}</answer>"], results
    return q, [*turns, "give up</reason><answer>\\boxed{0}</answer>"], results


def build_tokenizer(rng, noise: dict[str, float], chat_template: str, show: Callable[[ToolResult], str]):
    """A byte-level BPE with single digits and no word splitting: the fixed text round a call is a few tokens.

    Trained on 2,000 demonstrations; `show` is what the model is shown of a result.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = ["user\n", "assistant\n"] * 2000
    for q, turns, results in (demonstration(rng, noise) for _ in range(2000)):
        texts += [q["prompt"], *turns, *map(show, results)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tags = [AddedToken(f"<{slash}{tag}>", special=False, normalized=False) for slash in ("", "/")
            for tag in ("reason", "tool_call", "tool_response", "answer")]
    tokenizer.add_tokens(tags)  # before the training, so that no merge crosses them
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_tokens(tags)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>",
                                      additional_special_tokens=["<|im_start|>"])
    wrapped.chat_template = chat_template
    return wrapped


def build_model(tokenizer):
    """A random Qwen3 of 0.5M parameters, the smallest that learns to copy numbers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3, head_dim=32,
        num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id))
