"""Reward, answers and penalties: what a model might try instead of being right."""

import pytest
from conftest import ANSWER, CALL, tiny_config
from minirstar import (
    Completion,
    Problem,
    ToolResult,
    ToolStatus,
    UserError,
    answer_format_penalty,
    append_completion,
    append_tool_results,
    boxed,
    final_answer,
    grade,
    same_integer,
    start,
    tool_error_penalty,
)

OK, ERROR = ToolResult(ToolStatus.ok, "42"), ToolResult(ToolStatus.error, "", "NameError: x")


def finished(chat, *turns, result=OK, answer="42", kind="int"):
    """A rollout that writes `turns`; every call gets `result`."""
    cfg = tiny_config(max_tokens=10_000, tool_output_chars=1000)
    rollout = start(Problem("p/0", "What is 6 * 7?", answer, kind), chat, cfg, "r/0")
    for text in turns:
        tokens = [*chat.encode(text), chat.turn_end]
        calls = append_completion(rollout, Completion(tokens, [0.0] * len(tokens), "stop"), chat)
        if rollout.awaits_tools:
            append_tool_results(rollout, [result] * len(calls), chat)
    return rollout


def reward(chat, *turns, **options) -> float:
    rollout = finished(chat, *turns, **options)
    grade([rollout], NoSandbox(), tiny_config())
    return rollout.reward


class NoSandbox:
    """Integers are compared here: nothing may be asked of a sandbox."""

    def run(self, requests):
        assert requests == []
        return []


RIGHT = "so</reason><answer>\\boxed{42}</answer>"


@pytest.mark.parametrize(
    "turn",
    [
        RIGHT,
        "</reason><answer>It is \\boxed{42}.</answer>",
        "</reason>\n<answer>\n\\boxed{ 42 }\n</answer>\n",
        "</reason><answer>\\boxed{+42}</answer>",
        "</reason><answer>\\boxed{0042}</answer>",
        "</reason><answer>\\boxed{42}</answer><answer>\\boxed{42}</answer>",
    ],
)
def test_right_answer_is_rewarded(chat, turn):
    assert reward(chat, turn) == 1.0
    assert reward(chat, "first</reason>" + CALL % "6*7", turn) == 1.0


@pytest.mark.parametrize(
    "turn",
    [
        "</reason><answer>\\boxed{41}</answer>",
        "</reason>\\boxed{42}",
        "</reason><answer>42</answer>",
        "</reason><answer>\\boxed{}</answer>",
        "</reason><answer>\\boxed{ }</answer>",
        "</reason><answer></answer>\\boxed{42}",
        "</reason><answer>\\boxed{42</answer>",
        "</reason><answer>\\boxed{42}",
        "</reason>\\boxed{42}</answer>",
        "</reason><answer>\\boxed{41, 42, 43}</answer>",
        "</reason><answer>\\boxed{41 42}</answer>",
        "</reason><answer>\\boxed{41,42}</answer>",
        "</reason><answer>\\boxed{42 or 43}</answer>",
        "</reason><answer>\\boxed{41}\\boxed{42}</answer>",
        "</reason><answer>\\boxed{42}\\boxed{42}</answer>",
        "</reason><answer>\\boxed{41}</answer><answer>\\boxed{42}</answer>",
        "</reason><answer>\\boxed{42}</answer><answer>\\boxed{41}</answer>",
        "</reason><answer>\\boxed{42}</answer><answer></answer>",
        "<answer>\\boxed{42}</answer>",
        "<answer>\\boxed{42}</answer></reason>",
        "<answer>\\boxed{42}</reason></answer>",
        "</reason><answer>\\boxed{\u0664\u0662}</answer>",
        "</reason><answer>\\boxed{\uff14\uff12}</answer>",
        "</reason><answer>\\boxed{4\u00b2}</answer>",
        "</reason><answer>\\boxed{42.0}</answer>",
        "</reason><answer>\\boxed{6*7}</answer>",
        "</reason><answer>\\boxed{4_2}</answer>",
        "</reason><answer>\\boxed{--42}</answer>",
        "</reason><answer>\\boxed{{42}}</answer>",
        "</reason><answer>\\boxed{\\boxed{42}}</answer>",
        "</reason><answer>\\boxed{4\n2}</answer>",
        "",
    ],
)
def test_attempt_at_the_reward_earns_nothing(chat, turn):
    assert reward(chat, turn) == 0.0
    assert reward(chat, "first</reason>" + CALL % "6*7", turn) == 0.0


def test_answer_of_an_earlier_turn_does_not_count(chat):
    assert reward(chat, RIGHT + CALL % "1", "I am done") == 0.0
    assert reward(chat, RIGHT + CALL % "1", "</reason><answer>\\boxed{41}</answer>") == 0.0
    assert reward(chat, "</reason><answer>\\boxed{41}</answer>" + CALL % "1", RIGHT) == 1.0


def test_answer_that_the_tool_prints_does_not_count(chat):
    printed = ToolResult(ToolStatus.ok, RIGHT)
    assert reward(chat, "x</reason>" + CALL % "1", "see above", result=printed) == 0.0


def test_answer_inside_a_call_does_not_count(chat):
    assert reward(chat, *["</reason><tool_call>" + RIGHT + "</tool_call>"] * 5) == 0.0
    assert reward(chat, "</reason><tool_call>" + RIGHT) == 0.0


@pytest.mark.parametrize("reason", ["length", "turns"])
def test_unfinished_rollout_earns_nothing(chat, reason):
    rollout = finished(chat, RIGHT)
    rollout.stop_reason = reason
    grade([rollout], NoSandbox(), tiny_config())
    assert rollout.reward == 0.0 and final_answer(rollout) is None


@pytest.mark.parametrize(
    "answer, gold, same",
    [
        ("1,234", "1234", True),
        ("1234", "1,234", True),
        ("12,34", "1234", False),
        ("1,2345", "12345", False),
        (",234", "234", False),
        ("1,234,567", "1234567", True),
        ("+5", "5", True),
        ("-0", "0", True),
        ("+0", "-0", True),
        ("007", "7", True),
        ("-7", "7", False),
        ("7-", "7", False),
        ("+-7", "7", False),
        ("- 7", "-7", False),
        ("1e3", "1000", False),
        ("0x10", "16", False),
        ("\u0667", "7", False),
        ("7\n", "7", False),
        ("", "0", False),
        ("1" * 1000, "1" * 1000, True),
        ("9" * 5000, "9", False),
        ("9" * 1_000_000, "9", False),
        ("1" + ",000" * 300, "1" + "000" * 300, True),
        ("1" + ",000" * 5000, "1", False),
    ],
    ids=lambda value: str(value)[:12],
)
def test_same_integer(answer, gold, same):
    assert same_integer(answer, gold) is same


@pytest.mark.parametrize(
    "text, content",
    [
        ("\\boxed{1}", "1"),
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("\\boxed{{{1}}}", "{{1}}"),
        ("\\boxed{1", None),
        ("\\boxed{{1}", None),
        ("\\boxed{}", None),
        ("\\boxed{1}}", "1"),
        ("boxed{1}", None),
        ("\\boxed{1} \\boxed{1}", None),
        ("{" * 100_000, None),
        ("\\boxed{" + "{" * 100_000, None),
        ("\\boxed{" + "{" * 1000 + "}" * 1001, "{" * 1000 + "}" * 1000),
    ],
    ids=lambda value: str(value)[:20],
)
def test_boxed(text, content):
    assert boxed(text) == content


def test_error_penalty_is_the_share_of_failed_calls():
    assert tool_error_penalty([]) == 0.5
    assert tool_error_penalty([ToolStatus.ok] * 3) == 0.0
    for status in set(ToolStatus) - {ToolStatus.ok}:
        assert tool_error_penalty([ToolStatus.ok, status, ToolStatus.ok, ToolStatus.ok]) == 0.25
        assert tool_error_penalty([status]) == 1.0


@pytest.mark.parametrize(
    "text, turns, penalty",
    [
        ("<answer>1</answer>", 1, 0.0),
        ("<answer>1</answer>", 5, 0.0),
        ("", 1, 1.0),
        ("42", 3, 1.0),
        ("<answer>1", 1, 1.0),
        ("1</answer>", 1, 1.0),
        ("</answer>1<answer>", 1, 1.0),
        ("<answer><answer>1</answer></answer>", 1, 1.0),
        ("<answer>1</answer><answer>", 4, 1.0),
        ("<answer>1</answer>" * 2, 4, 0.25),
        ("<answer>1</answer>" * 3, 4, 0.5),
        ("<answer>1</answer>" * 9, 4, 1.0),
        ("<answer>1</answer>" * 2, 1, 1.0),
    ],
)
def test_format_penalty(text, turns, penalty):
    assert answer_format_penalty(text, turns) == penalty


def test_answer_tags_inside_a_call_are_not_answers(chat):
    noisy = finished(chat, "x</reason>" + CALL % "print('<answer>1</answer>')", RIGHT)
    unclosed = finished(chat, "x</reason><tool_call><answer>", RIGHT)
    printed = finished(
        chat, "x</reason>" + CALL % "1", RIGHT, result=ToolResult(ToolStatus.ok, "<answer><answer>")
    )
    grade([noisy, unclosed, printed], NoSandbox(), tiny_config())
    assert noisy.format_penalty == unclosed.format_penalty == printed.format_penalty == 0.0
    assert answer_format_penalty("a" + CALL % "<answer>" + RIGHT, 2) == 0.0


def test_answer_tags_of_all_turns_count(chat):
    rollout = finished(chat, "<answer>1</answer></reason>" + CALL % "1", RIGHT)
    grade([rollout], NoSandbox(), tiny_config())
    assert rollout.format_penalty == 0.5  # one block too many, two turns


def test_penalties_never_enter_the_reward(chat):
    clean = finished(chat, "x</reason>" + CALL % "6*7", RIGHT)
    failing = finished(
        chat, *["x</reason>" + CALL % "x"] * 3, RIGHT + "<answer>\\boxed{42}</answer>", result=ERROR
    )
    without = finished(chat, RIGHT)
    grade([clean, failing, without], NoSandbox(), tiny_config())
    assert [r.reward for r in (clean, failing, without)] == [1.0, 1.0, 1.0]
    assert [r.error_penalty for r in (clean, failing, without)] == [0.0, 1.0, 0.5]
    assert (clean.penalty, failing.penalty, without.penalty) == (0.0, 1.25, 0.5)


def test_output_with_the_word_error_is_no_failed_call(chat):
    rollout = finished(chat, "x</reason>" + CALL % "1", RIGHT, result=ToolResult(ToolStatus.ok, "error: 0.1"))
    grade([rollout], NoSandbox(), tiny_config())
    assert rollout.error_penalty == 0.0


def test_custom_reward_is_called_with_problem_and_rollout(chat):
    rollout = finished(chat, RIGHT)
    grade([rollout], NoSandbox(), tiny_config(reward="rewards:length"))
    assert rollout.reward == rollout.response_tokens / 10_000


@pytest.mark.parametrize("name", ["rewards", "rewards:none", "no_such_module:f", ":f", "outcome:f"])
def test_reward_that_cannot_be_imported_is_refused(chat, name):
    with pytest.raises(UserError, match="MODULE:FUNCTION"):
        grade([finished(chat, RIGHT)], NoSandbox(), tiny_config(reward=name))


def test_expressions_are_checked_in_the_sandbox(chat, sandbox):
    answers = {
        "\\frac{1}{2}": 1.0,
        "0.5": 1.0,
        "2/4": 1.0,
        "\\frac{1}{3}": 0.0,
        "\\frac{": 0.0,
        "0.5, 0.3": 0.0,
        "print(True)": 0.0,
        "True": 0.0,
    }
    rollouts = [finished(chat, ANSWER % text, answer="\\frac{1}{2}", kind="math") for text in answers]
    integer = finished(chat, RIGHT)
    silent = finished(chat, "nothing", answer="1", kind="math")
    grade([integer, *rollouts, silent], sandbox, tiny_config())
    assert dict(zip(answers, [r.reward for r in rollouts])) == answers
    assert integer.reward == 1.0 and silent.reward == 0.0
