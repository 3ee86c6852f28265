"""What the tests share: tiny models, chats, a sandbox, and an engine that is a function of its requests."""

import copy
import os
import zlib

import numpy as np
import pytest
import torch
from hypothesis import settings

import minirstar
from minirstar import Chat, Completion, Config, LocalEngine, LocalPolicy, LocalSandbox

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
settings.register_profile("tests", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("tests")
torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other

CALL = '<tool_call>\n{"name": "python_code_with_standard_io", "arguments": {"code": "%s"}}\n</tool_call>'
ANSWER = "done</reason><answer>\\boxed{%s}</answer>"


def tiny_config(**changes) -> Config:
    """A run of seconds."""
    tiny = dict(  # noqa: C408
        device="cpu",
        problems_per_step=2,
        group_size=2,
        oversample=2,
        stages=("1:40",),
        filter_rollouts=1,
        max_tokens=40,
        max_turn_tokens=1000,
        micro_batch_tokens=600,
        sft_steps=0,
        sft_batch=4,
        warmup_steps=0,
        sandbox_workers=2,
        eval_every=0,
        eval_problems=4,
        save_every=100,
        seeds=1,
        jobs=1,
    )
    return Config(**tiny | changes)


class ScriptedEngine:
    """An Engine that is a pure function of (rollout id, tokens): what it has begun to write it goes on with,
    wherever and in however many pieces it is asked. It stops with abort after `piece` tokens, if given."""

    TURNS = (
        "look</reason>" + CALL % "print(6*7)",
        "two</reason>" + CALL % "1/0" + CALL % "print(2)",
        "bad</reason><tool_call>{</tool_call>",
        ANSWER % "42",
        ANSWER % "7",
        "I give up",
    )

    def __init__(self, chat: Chat, piece: int | None = None):
        self.chat, self.piece, self.version = chat, piece, 0

    def load_weights(self, weights, version: int) -> None:
        self.version = version

    def generate(self, requests):
        return [self.complete(request) for request in requests]

    def complete(self, request) -> Completion:
        tail, tokens = tuple(self.chat.tool_tail), request.tokens
        began = max(i for i in range(len(tail), len(tokens) + 1) if tokens[i - len(tail) : i] == tail)
        rng = np.random.default_rng(zlib.crc32(repr((request.rollout_id, tokens[:began])).encode()))
        script = [*self.chat.encode(self.TURNS[rng.integers(len(self.TURNS))]), request.stop_token]
        logprobs = (-rng.random(len(script))).tolist()
        first, limit = len(tokens) - began, min(request.max_tokens, self.piece or len(script))
        part = slice(first, first + limit)
        reason = "stop" if part.stop >= len(script) else "length" if limit == request.max_tokens else "abort"
        return Completion(script[part], logprobs[part], reason, self.version)


@pytest.fixture(scope="session")
def toy_parts():
    """(model, tokenizer) of the toy, random."""
    return minirstar.load_model(tiny_config())


@pytest.fixture(scope="session")
def tokenizer(toy_parts):
    return toy_parts[1]


@pytest.fixture(scope="session")
def chat(tokenizer) -> Chat:
    return Chat(tokenizer, tiny_config())


@pytest.fixture(scope="session")
def trained(toy_parts, chat):
    """The toy's model after a few cold-start steps: it calls the tool, and is right about nothing."""
    model = copy.deepcopy(toy_parts[0])
    cfg = tiny_config(sft_steps=20)
    policy = LocalPolicy(model, cfg)
    policy.use_optimizer("sft")
    for step in range(cfg.sft_steps):
        rng = np.random.default_rng([1, step])
        minirstar.sft_step([minirstar.toy_demonstration(rng, chat, cfg) for _ in range(12)], policy, cfg)
    return model


@pytest.fixture(scope="session")
def model_folder(trained, tokenizer, tmp_path_factory):
    """The trained model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    trained.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(trained):
    """A copy of the trained model, to change at will."""
    return copy.deepcopy(trained)


@pytest.fixture
def engine(model, chat) -> LocalEngine:
    return LocalEngine(model, chat, tiny_config())


@pytest.fixture(scope="session")
def sandbox():
    with LocalSandbox(workers=2, timeout=4.0) as sandbox:
        yield sandbox
