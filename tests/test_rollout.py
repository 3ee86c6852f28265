"""The three transitions of a rollout."""

import pickle
from dataclasses import asdict

import pytest
from conftest import ANSWER, CALL, ScriptedEngine, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from minirstar import (
    Completion,
    GenerationRequest,
    Problem,
    ToolResult,
    ToolStatus,
    append_completion,
    append_tool_results,
    collect,
    next_request,
    start,
)

PROBLEM = Problem("p/0", "What is 6 * 7?", "42")
COLUMNS = ("tokens", "loss_mask", "sampler_logprobs", "versions")
TEXTS = ScriptedEngine.TURNS + ("", "<tool_call>", "x</tool_call>", "<answer>\\boxed{1}")
TURN = st.tuples(
    st.sampled_from(TEXTS) | st.lists(st.integers(3, 700), min_size=1, max_size=12),
    st.sampled_from(["stop", "stop", "stop", "abort", "length"]),
)


def new(chat, **settings):
    cfg = tiny_config(**{"max_tokens": 400} | settings)
    return start(PROBLEM, chat, cfg, "r/0")


def completion(chat, what, finish="stop", version=0) -> Completion:
    tokens = chat.encode(what) if isinstance(what, str) else list(what)
    tokens = tokens + [chat.turn_end] * (finish == "stop")
    return Completion(tokens, [-0.5 - i for i in range(len(tokens))], finish, version)


def say(rollout, chat, what, finish="stop", version=0):
    return append_completion(rollout, completion(chat, what, finish, version), chat)


def columns(rollout):
    return {name: list(getattr(rollout, name)) for name in COLUMNS}


@given(st.lists(TURN, max_size=8), st.integers(10, 300), st.integers(1, 5))
def test_tokens_are_append_only_and_the_mask_is_what_was_sampled(chat, script, limit, turns):
    rollout = new(chat, max_tokens=limit, max_turns=turns)
    mask, logprobs, versions = (
        [0] * rollout.prompt_length,
        [0.0] * rollout.prompt_length,
        [-1] * rollout.prompt_length,
    )
    assert len(rollout.tokens) == rollout.prompt_length
    for version, (what, finish) in enumerate(script):
        before, asked = columns(rollout), completion(chat, what, finish, version)
        calls = append_completion(rollout, asked, chat)
        mask, logprobs = mask + [1] * len(asked.tokens), logprobs + asked.logprobs
        versions = versions + [version] * len(asked.tokens)
        assert rollout.tokens == before["tokens"] + asked.tokens
        if rollout.awaits_tools:
            between = columns(rollout)
            append_tool_results(rollout, [ToolResult(ToolStatus.ok, "42<|im_end|>")] * len(calls), chat)
            assert rollout.tokens[: len(between["tokens"])] == between["tokens"]
            given_tokens = len(rollout.tokens) - len(mask)
            assert given_tokens > 0
            mask, logprobs = mask + [0] * given_tokens, logprobs + [0.0] * given_tokens
            versions = versions + [-1] * given_tokens
        assert columns(rollout) == {
            "tokens": rollout.tokens,
            "loss_mask": mask,
            "sampler_logprobs": logprobs,
            "versions": versions,
        }
        assert len({len(column) for column in columns(rollout).values()}) == 1
        if rollout.stop_reason:
            break


@given(st.sampled_from(TEXTS), st.data())
def test_aborted_turn_that_goes_on_equals_an_unbroken_one(chat, text, data):
    whole = completion(chat, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole.tokens) - 1), max_size=3)))
    one, pieces = new(chat), new(chat)
    expected = append_completion(one, whole, chat)
    for i, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(whole.tokens)])):
        reason = "stop" if last == len(whole.tokens) else "abort"
        part = Completion(whole.tokens[first:last], whole.logprobs[first:last], reason, i)
        got = append_completion(pieces, part, chat)
        if reason == "abort":
            assert got == [] and pieces.stop_reason is None and not pieces.awaits_tools and pieces.turns == []
    assert got == expected
    assert set(pieces.versions[pieces.prompt_length :]) <= set(range(len(cuts) + 1))
    assert pieces.versions[-1] == len(cuts)
    pieces.versions = one.versions
    assert asdict(pieces) == asdict(one)


def test_collecting_in_pieces_equals_collecting_whole(chat, sandbox):
    cfg = tiny_config(max_tokens=250)
    problems = [Problem(f"p/{i}", f"What is {i} * 7?", str(7 * i)) for i in range(4)]
    whole = collect(problems, ScriptedEngine(chat), sandbox, cfg, samples=3)
    pieces = collect(problems, ScriptedEngine(chat, piece=5), sandbox, cfg, samples=3)
    assert len({len(r.turns) for r in whole}) > 1 and {r.stop_reason for r in whole} >= {"answer"}
    for one, other in zip(whole, pieces):
        assert one.tokens == other.tokens and one.loss_mask == other.loss_mask
        assert one.stop_reason == other.stop_reason and one.reward == other.reward
        assert [c.result.status for c in one.calls] == [c.result.status for c in other.calls]
        assert [c.result.stdout for c in one.calls] == [c.result.stdout for c in other.calls]


def test_turn_without_call_is_the_answer(chat):
    rollout = new(chat)
    assert say(rollout, chat, ANSWER % "42") == []
    assert rollout.stop_reason == "answer" and rollout.turns == [ANSWER % "42"]


def test_stop_token_is_trained_on_but_no_text(chat):
    rollout = new(chat)
    say(rollout, chat, "hm")
    assert rollout.tokens[-1] == chat.turn_end and rollout.loss_mask[-1] == 1 and rollout.turns == ["hm"]


def test_turn_cut_by_the_limit_ends_the_rollout_and_runs_nothing(chat):
    rollout = new(chat)
    assert say(rollout, chat, "look</reason>" + CALL % "1", "length") == []
    assert rollout.stop_reason == "length" and rollout.calls == [] and not rollout.awaits_tools
    assert rollout.turns == ["look</reason>" + CALL % "1"]


def test_calls_of_the_last_turn_are_not_run(chat):
    rollout = new(chat, max_turns=2)
    say(rollout, chat, CALL % "1")
    append_tool_results(rollout, [ToolResult(ToolStatus.ok, "1")], chat)
    calls = say(rollout, chat, CALL % "2")
    assert rollout.stop_reason == "turns" and not rollout.awaits_tools and len(rollout.calls) == 1
    assert calls == [], "a driver would run calls whose results nobody takes"


def test_only_malformed_calls_are_answered_too(chat):
    rollout = new(chat)
    assert say(rollout, chat, "<tool_call>{</tool_call>") == []
    assert rollout.awaits_tools and rollout.stop_reason is None
    before = len(rollout.tokens)
    append_tool_results(rollout, [], chat)
    assert "reason: parse_error" in chat.decode(rollout.tokens[before:]) and not rollout.awaits_tools


def test_every_call_gets_its_own_result_in_order(chat):
    rollout = new(chat, tool_output_chars=100)
    calls = say(rollout, chat, CALL % "a" + "<tool_call>{</tool_call>" + CALL % "b")
    assert [c.request.code for c in calls] == ["a", "b"]
    append_tool_results(
        rollout, [ToolResult(ToolStatus.ok, "A"), ToolResult(ToolStatus.error, "", "B")], chat
    )
    assert [c.result.status.value for c in rollout.calls] == ["ok", "parse_error", "error"]
    shown = chat.decode(rollout.tokens)
    assert shown.index("stdout: A") < shown.index("parse_error") < shown.index("stderr: B")
    assert shown.count("<tool_response>") == 3


def test_only_the_current_turns_results_are_shown(chat):
    rollout = new(chat)
    for text in ("first", "second"):
        say(rollout, chat, CALL % "1")
        append_tool_results(rollout, [ToolResult(ToolStatus.ok, text)], chat)
    shown = chat.decode(rollout.tokens)
    assert shown.count("stdout: first") == shown.count("stdout: second") == 1


def test_tool_results_beyond_the_limit_end_the_rollout(chat):
    sampled = len(chat.encode(CALL % "1")) + 1
    rollout = new(chat, max_tokens=sampled + 2)
    say(rollout, chat, CALL % "1")
    assert rollout.awaits_tools and rollout.response_tokens == sampled
    append_tool_results(rollout, [ToolResult(ToolStatus.ok, "1")], chat)
    assert rollout.stop_reason == "length" and rollout.response_tokens >= rollout.max_tokens


def test_wrong_number_of_results_is_refused(chat):
    rollout = new(chat)
    say(rollout, chat, CALL % "1")
    with pytest.raises(AssertionError, match="2 results for 1 calls"):
        append_tool_results(rollout, [ToolResult(ToolStatus.ok)] * 2, chat)


@pytest.mark.parametrize("finished", [True, False])
def test_completion_out_of_turn_is_refused(chat, finished):
    rollout = new(chat)
    say(rollout, chat, ANSWER % "1" if finished else CALL % "1")
    with pytest.raises(AssertionError, match="out of turn"):
        say(rollout, chat, "more")


def test_rollout_can_be_pickled_in_every_state(chat):
    rollout = new(chat)
    for step in (
        lambda: None,
        lambda: say(rollout, chat, CALL % "1"),
        lambda: append_tool_results(rollout, [ToolResult(ToolStatus.ok, "1")], chat),
        lambda: say(rollout, chat, "a", "abort"),
        lambda: say(rollout, chat, ANSWER % "42"),
    ):
        step()
        copy = pickle.loads(pickle.dumps(rollout))
        assert copy == rollout and copy is not rollout
    assert rollout.stop_reason == "answer"


def test_request_asks_for_what_turn_and_response_have_left(chat):
    cfg = tiny_config(max_tokens=30, max_turn_tokens=20)
    rollout = start(Problem("p/1", "?", "1"), chat, cfg, "r")
    assert next_request(rollout, chat) == GenerationRequest("r", tuple(rollout.tokens), 20, chat.turn_end)
    append_completion(rollout, Completion([5] * 8, [-1.0] * 8, "abort"), chat)
    assert next_request(rollout, chat).max_tokens == 12  # of the turn
    rollout.max_tokens = 15
    assert next_request(rollout, chat).max_tokens == 7  # of the response
