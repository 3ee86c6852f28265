"""minirstar: agentic reinforcement learning with a Python tool, the method of rStar2-Agent, in one file.

A model solves a problem in turns: it reasons, writes Python, sees what that printed, and goes on or answers.
"Report" is arXiv 2508.20722.

The algorithm
  1. Cold start: fine-tuning on short demonstrations of the format and the tool, not of skill (report §3.3).
  2. Rollouts: 2G per problem. Tool calls really run, in a sandbox; their results are input, not actions (§2).
  3. Reward: outcome only. A failing call costs nothing; the model sees the error and goes on (§3.1).
  4. Groups whose rewards are all equal carry no signal and are dropped, whole (§3.2).
  5. Resample on correct (RoC): keep G of the 2G. Wrong rollouts uniformly, right ones by how clean they are,
     so that right answers reached through failing calls are not reinforced (§3.2).
  6. Advantage (r - mean) / std per group; clip-higher loss, mean over tokens; no KL or entropy bonus (§3.2).
  7. Stages: a growing response limit, then only problems that the policy does not always solve (§4).

Deviations from the public release (microsoft/rStar)
  1. A call failed if its execution did (`ToolStatus`), not if its output contains the word "error".
  2. Right rollouts are drawn with weight 1 / (penalty + 0.1) (report); `--select lowest` is the release's.
  3. No batch is cut to a multiple of anything; the loss is divided by the tokens of the whole optimizer step.
  4. A session of the stateful tool lives until its rollout ends, instead of being replayed at every call.

Commands
  python minirstar.py                     # laptop, no download: cold start, GRPO-RoC, runs/toy-001/curves.png
  python minirstar.py compare             # RoC against GRPO and uniform down-sampling, 3 seeds each
  python minirstar.py train --model Qwen/Qwen3-1.7B --dataset openai/gsm8k:main     # one GPU
  python minirstar.py eval runs/toy-001   # pass@1 on held-out problems, by kind
  python minirstar.py chat runs/toy-001   # type a problem, watch it reason, run code and answer
  python -m scale.launch one_gpu          # the same algorithm over vLLM, Triton, FSDP2 and Ray: see scale/

Beside it: sandbox.py (runs the model's code), toy.py (the toy task), commands.py (the command line); and
scale/, which imports what stands above the seam line and replaces, for a cluster, what stands below.
"""

import importlib
import json
import math
import re
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, get_args, get_origin

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

import toy
# The process that runs model code must stay small and free of torch, so the sandbox has a file of its own.
from sandbox import LocalSandbox, SandboxUnavailable, ToolRequest, ToolResult, ToolStatus  # noqa: F401

class UserError(ValueError):
    """A user's mistake: the message says what is wrong and what to do; shown without a traceback."""

@dataclass(frozen=True)
class Config:
    """Every setting of a run; defaults are the toy's. The command line and its --help are made from it."""
    name: str = ""  # run folder runs/NAME; empty: the next free toy-001, toy-002, ...
    seed: int = 1  # seeds weights, data order, sampling and resampling
    device: str = "auto"  # auto (a GPU if there is one), cpu, cuda, cuda:1, mps
    # model
    model: str = "toy"  # toy (0.5M parameters, random) or any Hugging Face causal LM, by hub name or folder
    lora: int = 0  # rank of LoRA adapters (peft); 0 trains all weights
    gradient_checkpointing: bool = False  # recompute activations: less memory, a third more time
    # data
    dataset: str = "toy"  # toy, a hub data set (NAME or NAME:CONFIG), or a .jsonl file
    train_split: str = "train"  # split to train on, or a .jsonl file
    eval_split: str = "test"  # split to evaluate on, or a .jsonl file
    question_column: str = "question"  # column that holds the problem
    answer_column: str = "answer"  # column that holds the answer; of "reasoning #### 42" what follows ####
    answer_kind: Literal["int", "math"] = "int"  # how an answer is checked: exact integer, or Math-Verify
    reward: str = "outcome"  # outcome, or MODULE:FUNCTION of (problem, rollout) -> float
    system_prompt: str = ""  # system turn; {tools} becomes the tools' JSON schemas; empty: none
    user_prompt: str = "{problem}"  # user turn round the problem
    # rollouts
    algo: Literal["roc", "grpo", "uniform"] = "roc"  # resample on correct, not at all, or at random (control)
    problems_per_step: int = 16  # problems in one RL step
    group_size: int = 8  # G: rollouts per problem that are trained on
    oversample: int = 2  # roc and uniform sample this many times G
    select: Literal["weighted", "lowest"] = "weighted"  # roc's rule for right rollouts: report's or release's
    stages: tuple[str, ...] = ("20:144", "14:160", "6:160:unsolved")  # each STEPS:RESPONSE_TOKENS[:unsolved]
    filter_rollouts: int = 4  # an unsolved stage tries problems this many times and drops those always solved
    max_tokens: int = 160  # response tokens (tool results included) where no stage says otherwise
    max_turns: int = 5  # assistant turns in a rollout
    max_turn_tokens: int = 40  # tokens of one assistant turn
    temperature: float = 1.0  # of sampling, and of the log-probs trained on
    tool_output_chars: int = 48  # characters of stdout and of stderr that the model is shown
    tool_seconds_shown: bool = False  # tell the model how long a call took (then no run repeats exactly)
    # loss and optimizer
    clip_low: float = 0.2  # ratio clipped below 1 - clip_low
    clip_high: float = 0.28  # ratio clipped above 1 + clip_high
    dual_clip: float = 0.0  # bound on the ratio where the advantage is negative, such as 3; 0: off
    tis_cap: float = 0.0  # cap of truncated importance sampling between engine and trainer, such as 2; 0: off
    mask_truncated: bool = False  # leave rollouts cut by their limit out of the loss, instead of reward 0
    mini_batches: int = 1  # optimizer steps per batch of rollouts
    lr: float = 8e-4  # RL learning rate (AdamW)
    lr_schedule: Literal["linear", "constant_with_warmup"] = "linear"  # to 0 at the end, or constant (report)
    warmup_steps: int = 2  # optimizer steps until the full learning rate
    grad_clip: float = 1.0  # largest norm of the gradient
    micro_batch_tokens: int = 1536  # tokens, padding included, in one forward and backward pass
    generate_rows: int = 512  # rollouts generated at once
    # cold start
    sft_steps: int = 400  # optimizer steps of supervised fine-tuning; 0: none
    sft_batch: int = 24  # demonstrations in a step
    sft_lr: float = 3e-3  # AdamW's, for embeddings and norms (all weights where sft_muon_lr is 0)
    sft_muon_lr: float = 0.02  # Muon's, for the matrices; 0: AdamW for all
    # demonstrations are imperfect on purpose, so that RL has something to learn: probability that one ...
    demo_guess: float = 0.15  # ... guesses without the tool
    demo_wrong: float = 0.4  # ... computes the wrong thing, on easy kinds
    demo_wrong_hard: float = 0.65  # ... on hard kinds: there the commonest demonstration is wrong
    demo_buggy: float = 0.3  # ... has a bug in its first call
    demo_buggy_retry: float = 0.3  # ... has a bug in a retry, too
    demo_wrong_after_error: float = 0.25  # ... computes the wrong thing after a failed call
    # sandbox
    sandbox_workers: int = 8  # calls run at once
    tool_timeout: float = 4.0  # seconds of one call
    tool_memory_mb: int = 512  # memory of one call beyond the interpreter's own
    tool_preload: str = ""  # modules imported at start, such as numpy,sympy: faster calls if code uses them
    # evaluation and output
    eval_every: int = 10  # RL steps between evaluations; 0: only before and after
    eval_problems: int = 800  # held-out problems (0: all); a quarter of them during training
    eval_samples: int = 1  # k: rollouts per problem; pass@1 is their mean (avg@k)
    save_every: int = 10  # RL steps between checkpoints
    log_groups: int = 2  # groups per step written to rollouts.jsonl, token by token
    seeds: int = 3  # compare: seeds of each algorithm
    jobs: int = 2  # compare: runs at once

    def __post_init__(self):
        for f in fields(self):
            value, low = getattr(self, f.name), LOWEST.get(f.name, int(f.type is int))
            high = 1 if f.name.startswith("demo_") else math.inf
            if get_origin(f.type) is Literal and value not in get_args(f.type):
                raise UserError(f"{f.name} is {value!r}: choose one of {', '.join(get_args(f.type))}")
            if isinstance(value, (int, float)) and not low <= value <= high:
                raise UserError(f"{f.name} is {value}: must be at least {low}" + ", at most 1" * (high == 1))
        if self.algo != "grpo" and self.oversample < 2:
            raise UserError(f"oversample is {self.oversample}: {self.algo} chooses among oversample * "
                            "group_size rollouts, so it needs 2 or more (or --algo grpo)")
        for stage in self.stages:
            parse_stage(stage)

    @property
    def rollouts_per_problem(self) -> int:
        return self.group_size * (1 if self.algo == "grpo" else self.oversample)

    @property
    def demo_noise(self) -> dict[str, float]:
        return {name.removeprefix("demo_"): p for name, p in vars(self).items() if name.startswith("demo_")}

LOWEST = {"temperature": 0.01, "tool_timeout": 0.05, "tool_memory_mb": 16, "group_size": 2} | dict.fromkeys(
    ("seed", "lora", "warmup_steps", "sft_steps", "eval_every", "eval_problems", "log_groups"), 0)

def one_gpu() -> Config:
    """Preset for a pretrained model on one GPU: the report's prompts, optimizer and stages, in small."""
    return Config(
        model="Qwen/Qwen3-1.7B", dataset="openai/gsm8k:main", system_prompt=SYSTEM_PROMPT,
        user_prompt=USER_PROMPT, stages=("100:2048", "50:3072", "50:3072:unsolved"), filter_rollouts=8,
        max_tokens=3072, max_turn_tokens=3072, tool_output_chars=2000, tool_seconds_shown=True,
        tool_preload="numpy.random,sympy.tensor.tensor,sympy.sets.setexpr", gradient_checkpointing=True,
        lr=1e-6, lr_schedule="constant_with_warmup", warmup_steps=20, micro_batch_tokens=8192,
        generate_rows=64, sft_steps=0, sft_lr=1e-5, sft_muon_lr=0.0, eval_problems=200, jobs=1)

class Stage(NamedTuple):
    steps: int
    max_tokens: int  # response limit
    unsolved: bool  # drop the problems that are always solved (report §4)

def parse_stage(text: str) -> Stage:
    """"24:128" or "6:160:unsolved" -> Stage. Raises UserError on any other form."""
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)(:unsolved)?", text)
    if match is None:
        raise UserError(f"stages has {text!r}: write STEPS:RESPONSE_TOKENS or STEPS:RESPONSE_TOKENS:unsolved")
    return Stage(int(match[1]), int(match[2]), match[3] is not None)

# ---- Types and contracts

@dataclass(frozen=True)
class Problem:
    id: str  # unique; what stands before "/" names its set or kind, by which results are grouped
    prompt: str
    answer: str
    kind: str = "int"  # how an answer is checked: int or math

@dataclass
class ToolCall:
    """A tool call of the model: what it asked for and, once it has run, what came back."""
    name: str
    turn: int  # assistant turn, from 1
    request: ToolRequest | None  # None where the call was malformed; the result says why
    result: ToolResult | None = None

@dataclass(frozen=True)
class GenerationRequest:
    """Ask an engine to go on with a rollout's tokens until `stop_token`, or for `max_tokens` new tokens."""
    rollout_id: str
    tokens: tuple[int, ...]
    max_tokens: int
    stop_token: int

@dataclass(frozen=True)
class Completion:
    """What an engine sampled: token ids, the stop token included, and the log-prob of each in nats."""
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # stop, length or abort (the turn goes on later)
    policy_version: int = 0

@dataclass
class Rollout:
    """One attempt at a problem, changed only by start and the append_ functions until it is graded."""
    id: str
    problem: Problem
    group: int  # shared by the rollouts of one problem in one batch
    max_tokens: int  # response tokens allowed, tool results included
    max_turns: int
    max_turn_tokens: int
    # one entry per token, append-only
    tokens: list[int] = field(default_factory=list)  # prompt and response
    loss_mask: list[int] = field(default_factory=list)  # 1: sampled by the policy
    sampler_logprobs: list[float] = field(default_factory=list)  # the engine's; 0 where not sampled
    versions: list[int] = field(default_factory=list)  # policy version that sampled it; -1 where not sampled
    logprobs: list[float] | None = None  # the trainer's before the update; only of rollouts that are logged
    entropy: list[float] | None = None  # of the trainer's distribution, in nats; likewise
    # state
    prompt_length: int = 0
    turn_start: int = 0  # index of the current assistant turn's first token
    turns: list[str] = field(default_factory=list)  # text of each assistant turn
    calls: list[ToolCall] = field(default_factory=list)
    awaits_tools: bool = False  # append_tool_results comes next, else append_completion
    stop_reason: str | None = None  # answer, length or turns; None while it goes on
    # grade and selection
    reward: float = 0.0
    error_penalty: float = 0.0  # p_err and p_format decide what RoC keeps; they never enter the reward
    format_penalty: float = 0.0
    kept: bool = False
    advantage: float = 0.0

    @property
    def response_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def penalty(self) -> float:
        return self.error_penalty + self.format_penalty

    @property
    def text(self) -> str:
        """Everything the model wrote, tool calls removed."""
        return "\n".join(TOOL_CALL.sub("", turn) for turn in self.turns)

@dataclass
class Batch:
    """Rollouts as right-padded tensors (B, T); column t of each belongs to token t."""
    tokens: Tensor  # int64
    attention_mask: Tensor  # bool: not padding
    loss_mask: Tensor  # bool
    advantages: Tensor  # (B,)
    sampler_logprobs: Tensor
    old_logprobs: Tensor | None = None  # the trainer's at the start of this update; None: weights unchanged

LossFn = Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]  # (logprobs, entropy, batch)

class Sandbox(Protocol):
    """Runs code. Results in order of requests; user code never makes it raise, lost infrastructure does."""
    def run(self, requests: Sequence[ToolRequest]) -> list[ToolResult]: ...
    def close(self, session: str | None = None) -> None: ...

class Engine(Protocol):
    """Samples from the policy; `chat` is the format that its tokenizer speaks."""
    chat: "Chat"
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]: ...
    def load_weights(self, weights: dict[str, Tensor], version: int) -> None: ...

class Policy(Protocol):
    """The model in training. Log-probs and entropies are (B, T), in nats, 0 outside the loss mask."""
    def logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]: ...
    def update(self, micro_batches: Sequence[Batch], loss_fn: LossFn) -> dict[str, float]: ...
    def weights(self) -> dict[str, Tensor]: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...

# ---- Chat format (report §2): Hermes/Qwen tool calls; reasoning, answers and tool results in their own tags

SYSTEM_PROMPT = """Solve the problem step by step, with Python where it helps. Put your reasoning inside
<reason> </reason> and your final answer inside <answer> </answer>, as \\boxed{}.

# Tools
You may call these functions, several in one turn if you like:
<tools>
{tools}
</tools>
Write each call as JSON inside its own tags: <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call>"""
USER_PROMPT = "Give the final answer inside <answer> </answer> tags as \\boxed{}.\n\n{problem}"
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)

class Tool(NamedTuple):
    """An entry of the tool table: what the model is told, and how its arguments become a sandbox request."""
    description: str
    parameters: dict[str, str]  # name -> description; all are strings
    required: tuple[str, ...]
    request: Callable[[dict[str, str], str], ToolRequest]  # (arguments, rollout id)

TOOLS = {
    "python_code_with_standard_io": Tool(
        "Run Python code in a fresh interpreter and return what it prints.",
        {"code": "Python source.", "input": "Standard input of the program."}, ("code",),
        lambda args, rollout: ToolRequest(args["code"], args.get("input", ""))),
    "jupyter_code": Tool(
        "Run Python code in this conversation's own interpreter: variables stay between calls.",
        {"code": "Python source."}, ("code",),
        lambda args, rollout: ToolRequest(args["code"], kind="jupyter", session=rollout)),
}

def tool_schemas() -> str:
    """The tool table as JSON schemas, one a line, as Qwen's system prompt lists them."""
    return "\n".join(json.dumps({"type": "function", "function": {
        "name": name, "description": tool.description, "parameters": {
            "type": "object", "required": list(tool.required), "properties": {
                key: {"type": "string", "description": text} for key, text in tool.parameters.items()},
        }}}) for name, tool in TOOLS.items())

def parse_tool_calls(text: str, turn: int, rollout_id: str) -> list[ToolCall]:
    """The calls of one turn, in order. A malformed one has a parse_error result that says what is wrong."""
    calls = []
    for match in TOOL_CALL.finditer(text):
        try:
            if not match[0].endswith("</tool_call>"):
                raise ValueError("</tool_call> is missing")
            call = json.loads(match[1])
            if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
                raise ValueError('expected {"name": ..., "arguments": {...}}')
            name, arguments = call.get("name"), call["arguments"]
            if not isinstance(name, str) or name not in TOOLS:
                raise ValueError(f"no tool {name!r}; there are {', '.join(TOOLS)}")
            if missing := set(TOOLS[name].required) - set(arguments):
                raise ValueError(f"arguments missing: {', '.join(sorted(missing))}")
            if wrong := [k for k, v in arguments.items()
                         if k not in TOOLS[name].parameters or not isinstance(v, str)]:
                raise ValueError(f"arguments unknown or not strings: {', '.join(wrong)}")
            calls.append(ToolCall(name, turn, TOOLS[name].request(arguments, rollout_id)))
        except (ValueError, RecursionError) as error:  # json's errors are ValueErrors; deep nesting recurses
            calls.append(ToolCall("?", turn, None, ToolResult(ToolStatus.parse_error, stderr=str(error))))
    return calls

def tool_response(result: ToolResult, max_chars: int, show_seconds: bool) -> str:
    """What the model is shown of a result (release's wording); stdout and stderr cut to `max_chars` each."""
    ok = result.status is ToolStatus.ok
    lines = ["Tool call success"] if ok else ["Tool call failure", f"reason: {result.status.value}"]
    out, err = result.stdout.strip(), result.stderr.strip()
    if len(out) > max_chars:
        half = max_chars // 2
        out = f"{out[:half]}\n... {len(out) - 2 * half} characters cut ...\n{out[len(out) - half:]}"
    if len(err) > max_chars:  # a traceback says most at its end: keep whole lines of that
        err = err[-max_chars:].partition("\n")[2] or err[-max_chars:]
    lines += [f"{name}: {text}" for name, text in (("stdout", out), ("stderr", err)) if text]
    return "\n".join(lines + [f"execution time: {result.seconds:.2f}s"] * show_seconds)

class Chat:
    """The chat format over any tokenizer that has a chat template. The delimiters of turns are cut out of
    what the template renders round placeholders, so one code serves every model. Text from outside (problems,
    tool output) is encoded so that it can never become a special token."""
    def __init__(self, tokenizer, cfg: Config):
        self.tokenizer, self.cfg = tokenizer, cfg
        if tokenizer.chat_template is None:
            raise UserError(f"model {cfg.model} has no chat template: use an instruct model, or save one")
        system = [{"role": "system", "content": cfg.system_prompt.replace("{tools}", tool_schemas())}]
        turns = [{"role": who, "content": f"@@{i}@@"} for i, who in enumerate(("user", "assistant", "user"))]
        render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
        first, second = (render(system * bool(cfg.system_prompt) + part) for part in (turns[:1], turns))
        self.prompt_head, self.prompt_tail = map(self.encode, (first + "<reason>").split("@@0@@"))
        between, after = second.split("@@1@@")[1].split("@@2@@")
        # The model samples the token that ends its turn; the rest of what stands between turns it is given.
        self.turn_end, *self.tool_head = self.encode(between)
        self.tool_tail = self.encode(after + "<reason>")

    def encode(self, text: str, outside: bool = False) -> list[int]:
        """Token ids; text from `outside` is never read as special tokens. Lone surrogates become "?"."""
        text = text.encode("utf-8", "replace").decode()
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=outside)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def prompt(self, problem: Problem) -> list[int]:
        """System and user turn, and the assistant's opening with <reason>: given, not sampled."""
        user = self.cfg.user_prompt.replace("{problem}", problem.prompt)
        return self.prompt_head + self.encode(user, outside=True) + self.prompt_tail

    def tool_turn(self, results: Sequence[ToolResult]) -> list[int]:
        """What follows an assistant turn with calls: a user turn of tool responses, and the next opening."""
        tokens = list(self.tool_head)
        for i, result in enumerate(results):
            text = tool_response(result, self.cfg.tool_output_chars, self.cfg.tool_seconds_shown)
            tokens += self.encode("\n" * (i > 0) + "<tool_response>\n") + self.encode(text, outside=True)
            tokens += self.encode("\n</tool_response>")
        return tokens + self.tool_tail

# ---- A rollout is data. These functions, free of I/O, clock and randomness, are all that changes it

def start(problem: Problem, chat: Chat, cfg: Config, rollout_id: str, group: int = 0) -> Rollout:
    """A rollout at its first assistant turn."""
    rollout = Rollout(rollout_id, problem, group, cfg.max_tokens, cfg.max_turns, cfg.max_turn_tokens)
    extend(rollout, chat.prompt(problem))
    rollout.prompt_length = rollout.turn_start = len(rollout.tokens)
    return rollout

def extend(rollout: Rollout, tokens: list[int], completion: Completion | None = None) -> None:
    """Append tokens: sampled ones with their log-probs and policy version, others masked."""
    n = len(tokens)
    rollout.tokens += tokens
    rollout.loss_mask += [int(completion is not None)] * n
    rollout.sampler_logprobs += completion.logprobs if completion else [0.0] * n
    rollout.versions += [completion.policy_version if completion else -1] * n

def next_request(rollout: Rollout, chat: Chat) -> GenerationRequest:
    """What to ask an engine for: the rest of the current turn, within the limits of turn and response."""
    in_turn = len(rollout.tokens) - rollout.turn_start
    left = min(rollout.max_turn_tokens - in_turn, rollout.max_tokens - rollout.response_tokens)
    return GenerationRequest(rollout.id, tuple(rollout.tokens), left, chat.turn_end)

def append_completion(rollout: Rollout, completion: Completion, chat: Chat) -> list[ToolCall]:
    """Append what the engine sampled; return the calls to run, in order. When a turn ends, its calls are
    parsed from the whole turn. No call: the rollout has answered. Otherwise append_tool_results must follow,
    also where every call was malformed and there is nothing to run. An aborted completion only appends; a
    turn cut by the token limit ends the rollout."""
    assert rollout.stop_reason is None and not rollout.awaits_tools, "append_completion out of turn"
    extend(rollout, completion.tokens, completion)
    if completion.finish_reason == "abort":
        return []
    turn = rollout.tokens[rollout.turn_start:]
    if completion.finish_reason == "stop":
        turn = turn[:-1]
    rollout.turns.append(chat.decode(turn))
    if completion.finish_reason == "length":
        rollout.stop_reason = "length"
        return []
    calls = parse_tool_calls(rollout.turns[-1], len(rollout.turns), rollout.id)
    if not calls:
        rollout.stop_reason = "answer"
    elif len(rollout.turns) == rollout.max_turns:
        calls, rollout.stop_reason = [], "turns"  # nobody would read the results: the calls are not run
    else:
        rollout.calls, rollout.awaits_tools = rollout.calls + calls, True
    return [call for call in calls if call.request]

def append_tool_results(rollout: Rollout, results: Sequence[ToolResult], chat: Chat) -> None:
    """Append the turn's tool responses: `results` for pending calls in order, parse errors for the rest."""
    due = [call for call in rollout.calls if call.result is None]
    assert rollout.awaits_tools and len(results) == len(due), f"{len(results)} results for {len(due)} calls"
    for call, result in zip(due, results):
        call.result = result
    current = [call.result for call in rollout.calls if call.turn == len(rollout.turns)]
    extend(rollout, chat.tool_turn(current))
    rollout.turn_start, rollout.awaits_tools = len(rollout.tokens), False
    if rollout.response_tokens >= rollout.max_tokens:
        rollout.stop_reason = "length"

# ---- Reward (report §3.1), outcome only; penalties (§3.2), which decide what RoC keeps and never enter it

def final_answer(rollout: Rollout) -> str | None:
    """The rollout's answer: the one \\boxed{} of the last turn's answer blocks, or None. It must follow the
    closed reasoning, and all blocks must say the same: hedging earns nothing. Tool output does not count."""
    if rollout.stop_reason != "answer":
        return None
    _, closed, after = rollout.turns[-1].partition("</reason>")
    answers = {boxed(block) for block in re.findall(r"<answer>(.*?)</answer>", after, re.DOTALL)}
    return answers.pop() if closed and len(answers) == 1 else None

def boxed(text: str) -> str | None:
    """The content of the only \\boxed{} in `text`, braces balanced; None if none, several or empty."""
    if text.count("\\boxed{") != 1:
        return None
    content, depth = text.split("\\boxed{")[1], 1
    for i, char in enumerate(content):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return content[:i].strip() or None
    return None

def same_integer(answer: str, gold: str) -> bool:
    """Exact equality of two decimal integers; 1,234 may be written with commas. A list is not an integer."""
    if not re.fullmatch(r"[+-]?([0-9]{1,1000}|[0-9]{1,3}(,[0-9]{3}){1,300})", answer):
        return False
    return int(answer.replace(",", "")) == int(gold.replace(",", ""))

def grade(rollouts: Sequence[Rollout], sandbox: Sandbox, cfg: Config) -> None:
    """Set each finished rollout's reward and penalty. Math-Verify runs in the sandbox: it can hang."""
    custom, checks = reward_function(cfg), []
    for rollout in rollouts:
        rollout.error_penalty = tool_error_penalty([call.result.status for call in rollout.calls])
        rollout.format_penalty = answer_format_penalty(rollout.text, len(rollout.turns))
        answer = final_answer(rollout)
        if custom:
            rollout.reward = float(custom(rollout.problem, rollout))
        elif answer is not None and rollout.problem.kind == "math":
            checks.append((rollout, ToolRequest(answer, rollout.problem.answer, kind="check")))
        else:
            rollout.reward = float(answer is not None and same_integer(answer, rollout.problem.answer))
    for (rollout, _), result in zip(checks, sandbox.run([request for _, request in checks])):
        rollout.reward = float(result.stdout.strip() == "True")

def reward_function(cfg: Config) -> Callable[[Problem, Rollout], float] | None:
    """The custom reward that the config names, or None. Raises UserError if it cannot be imported."""
    module, _, name = cfg.reward.partition(":")
    try:
        return None if cfg.reward == "outcome" else getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"reward is {cfg.reward!r}: write outcome or MODULE:FUNCTION ({error})") from error

def tool_error_penalty(statuses: Sequence[ToolStatus]) -> float:
    """p_err: failed calls / calls, 0.5 without a call (report §3.2). A parse error is a failed call.

    >>> tool_error_penalty([ToolStatus.ok, ToolStatus.timeout])
    0.5
    """
    return sum(status != ToolStatus.ok for status in statuses) / len(statuses) if statuses else 0.5

def answer_format_penalty(text: str, turns: int) -> float:
    """p_format: 1 if answer tags are missing or unbalanced, else min(1, (blocks - 1) / turns) (report §3.2).
    `text` is everything the model wrote, tool calls are left out; `turns` counts assistant turns."""
    tags = re.findall(r"</?answer>", TOOL_CALL.sub("", text))
    if not tags or tags != ["<answer>", "</answer>"] * (len(tags) // 2):
        return 1.0
    return min(1.0, (len(tags) // 2 - 1) / max(turns, 1))

# ---- GRPO with resample on correct (report §3.2)

def resample_on_correct(rewards, penalties, keep: int, rng: np.random.Generator, *, min_each: int = 2,
                        select: str = "weighted") -> list[int]:
    """Which of a problem's n rollouts to train on: `keep` distinct indices, ascending (report §3.2).
    Right (reward > 0) and wrong keep their proportion, each at least min(min_each, available, keep // 2).
    Wrong ones are drawn uniformly; right ones without replacement by weight 1 / (penalty + 0.1), or by
    select="lowest" (release) those of lowest penalty, ties by index. Raises ValueError on bad arguments."""
    rewards, penalties = np.asarray(rewards, dtype=float), np.asarray(penalties, dtype=float)
    if rewards.ndim != 1 or rewards.shape != penalties.shape or len(rewards) == 0 or keep < 1:
        raise ValueError(f"need as many penalties as rewards, one or more, and keep >= 1: got shapes "
                         f"{penalties.shape} and {rewards.shape}, and keep {keep}")
    if select not in ("weighted", "lowest"):
        raise ValueError(f"select is {select!r}: choose weighted or lowest")
    right, wrong = np.flatnonzero(rewards > 0), np.flatnonzero(rewards <= 0)
    keep = min(keep, len(rewards))
    k_right = round(keep * len(right) / len(rewards))
    k_right = max(k_right, min(min_each, len(right), keep // 2))
    k_right = min(k_right, keep - min(min_each, len(wrong), keep // 2))
    if select == "lowest":
        chosen = right[np.argsort(penalties[right], kind="stable")[:k_right]]
    else:
        weight = 1 / (penalties[right] + 0.1)
        chosen = rng.choice(right, k_right, replace=False, p=weight / weight.sum()) if k_right else right[:0]
    return sorted(int(i) for i in np.concatenate([chosen, rng.choice(wrong, keep - k_right, replace=False)]))

def group_advantages(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (std + eps) over the G kept rollouts of one problem, std with ddof=1 (G,) -> (G,).
    Raises ValueError for G = 1, where there is nothing to compare with."""
    if rewards.ndim != 1 or len(rewards) < 2:
        raise ValueError(f"advantages compare rollouts: need rewards (G,) with G >= 2, got {rewards.shape}")
    return (rewards - rewards.mean()) / (rewards.std(correction=1) + eps)

def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor = 1.0):
    """Log-prob of each target and entropy of each distribution, in nats, both differentiable.
    hidden (N, D), weight (V, D), targets (N,) int64, temperature a number or (N,). Returns both (N,) in fp32.
    Logits are fp32 whatever the inputs (bf16 costs 1e-2 nats), a chunk at a time, recomputed in backward."""
    def head(h: Tensor, y: Tensor, t: Tensor):
        with torch.autocast(h.device.type, enabled=False):
            logits = h.float() @ weight.float().T / t[:, None]  # (n, V)
        logz = logits.logsumexp(-1)
        logprobs = logits.gather(-1, y[:, None])[:, 0] - logz
        # A column at -inf has probability 0 and must add 0, not 0 * inf.
        return logprobs, logz - ((logits - logz[:, None]).exp() * logits.clamp(min=-1e30)).sum(-1)

    temperature = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(len(targets))
    parts = list(zip(*(x.split(max(1, 2**26 // len(weight))) for x in (hidden, targets, temperature))))
    if len(parts) == 1:
        return head(*parts[0])
    results = [torch.utils.checkpoint.checkpoint(head, *part, use_reentrant=False) for part in parts]
    return torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results])

def grpo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, *, denom: float,
              clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None,
              sampler_logprobs: Tensor | None = None, tis_cap: float | None = None):
    """Clip-higher policy loss, to be minimised (report §3.2 eq. 3; DAPO eq. 8).
    logprobs, old_logprobs, sampler_logprobs, loss_mask (B, T); advantages (B,). `denom` counts the loss-mask
    tokens of the whole optimizer step, over all micro-batches and ranks, so that the loss depends on neither.
    `dual_clip` bounds the loss where advantages are negative; `tis_cap` caps the weight pi_old / pi_sampler.
    Returns (loss, stats); stats are sums and counts, so that they add up over micro-batches and ranks."""
    if tis_cap is not None and sampler_logprobs is None:
        raise ValueError("tis_cap needs sampler_logprobs")
    mask = loss_mask.bool()

    def masked(x: Tensor) -> Tensor:  # what stands at masked positions may be anything, NaN too
        return torch.where(mask, x, 0.0)

    log_ratio = masked(logprobs - old_logprobs).clamp(-20, 20)
    ratio, adv = log_ratio.exp(), advantages[:, None]
    free, clipped = ratio * adv, ratio.clamp(1 - clip_low, 1 + clip_high) * adv
    surrogate = torch.minimum(free, clipped)
    if dual_clip is not None:
        surrogate = torch.where(adv < 0, torch.maximum(surrogate, dual_clip * adv), surrogate)
    stats = {"tokens": mask.sum(), "clipped": (masked(free) > masked(clipped)).sum(),
             "kl_old": masked(ratio.detach() - 1 - log_ratio.detach()).sum()}
    if sampler_logprobs is not None:
        gap = masked(old_logprobs - sampler_logprobs).clamp(-20, 20).detach()
        stats["mismatch"] = (gap.exp() - 1 - gap).sum()  # k3 estimate of KL(sampler || trainer)
        if tis_cap is not None:
            surrogate = surrogate * gap.exp().clamp(max=tis_cap)
            stats["tis_capped"] = masked(gap.exp() > tis_cap).sum()
    return -masked(surrogate).sum() / denom, stats

# ---- One RL step, one SFT step. They never ask whether they run on a laptop or a cluster

def collate(rollouts: Sequence[Rollout], cfg: Config) -> Batch:
    """Rollouts -> right-padded Batch on the CPU."""
    def pad(rows, dtype):
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(x, dtype=dtype) for x in rows], batch_first=True)
    loss_mask = pad([r.loss_mask for r in rollouts], torch.bool)
    if cfg.mask_truncated:
        loss_mask &= torch.tensor([r.stop_reason != "length" for r in rollouts])[:, None]
    return Batch(tokens=pad([r.tokens for r in rollouts], torch.long),
                 attention_mask=pad([[1] * len(r.tokens) for r in rollouts], torch.bool), loss_mask=loss_mask,
                 advantages=torch.tensor([r.advantage for r in rollouts], dtype=torch.float32),
                 sampler_logprobs=pad([r.sampler_logprobs for r in rollouts], torch.float32))

def micro_batches(rollouts: Sequence[Rollout], cfg: Config) -> list[Batch]:
    """Sorted by length; each holds at most cfg.micro_batch_tokens with its padding (or one rollout)."""
    batches: list[list[Rollout]] = [[]]
    for rollout in sorted(rollouts, key=lambda r: len(r.tokens)):
        if batches[-1] and (len(batches[-1]) + 1) * len(rollout.tokens) > cfg.micro_batch_tokens:
            batches.append([])
        batches[-1].append(rollout)
    return [collate(batch, cfg) for batch in batches]

def select_rollouts(rollouts: Sequence[Rollout], cfg: Config,
                    rng: np.random.Generator) -> tuple[list[Rollout], float]:
    """Steps 4 to 6: sets kept and advantage. Returns the kept rollouts and the fraction of uniform groups."""
    groups = defaultdict(list)
    for rollout in rollouts:
        rollout.kept, rollout.advantage = False, 0.0
        groups[rollout.group].append(rollout)
    kept: list[Rollout] = []
    for group in groups.values():
        rewards, penalties = [r.reward for r in group], [r.penalty for r in group]
        if cfg.algo == "roc" and len(set(rewards)) > 1:
            chosen = resample_on_correct(rewards, penalties, cfg.group_size, rng, select=cfg.select)
            group = [group[i] for i in chosen]
        elif cfg.algo == "uniform":
            chosen = rng.choice(len(group), min(cfg.group_size, len(group)), replace=False)
            group = [group[i] for i in sorted(chosen)]
        rewards = [r.reward for r in group]
        if len(set(rewards)) > 1:  # else no signal: all right or all wrong
            for rollout, advantage in zip(group, group_advantages(torch.tensor(rewards)).tolist()):
                rollout.kept, rollout.advantage = True, advantage
            kept += group
    return kept, 1 - len({r.group for r in kept}) / max(len(groups), 1)

def train_step(rollouts: Sequence[Rollout], policy: Policy, cfg: Config,
               rng: np.random.Generator) -> dict[str, float]:
    """Filter, resample, advantages and update on graded rollouts (steps 4 to 6); returns metrics."""
    began = time.perf_counter()
    kept, uniform = select_rollouts(rollouts, cfg, rng)
    right = [r.penalty for r in kept if r.reward > 0]
    metrics = rollout_metrics(rollouts) | {"group/uniform_fraction": uniform,
                                           "roc/kept_penalty": float(np.mean(right)) if right else math.nan}
    parts = np.array_split(rng.permutation(len(kept)), cfg.mini_batches)
    steps = [micro_batches([kept[i] for i in part], cfg) for part in parts if len(part)]
    if len(steps) > 1:  # the weights move between mini-batches: keep the log-probs from before
        for batch in (batch for batches in steps for batch in batches):
            batch.old_logprobs = policy.logprobs(batch)[0]
    totals: dict[str, float] = defaultdict(float)
    for batches in steps:
        denom = sum(int(batch.loss_mask.sum()) for batch in batches)
        if denom:
            for key, value in policy.update(batches, partial(rl_loss, cfg=cfg, denom=denom)).items():
                totals[key] += value
    tokens, updates = max(totals["tokens"], 1), max(totals["updates"], 1)
    return metrics | {
        "loss/policy": totals["loss"] / updates, "loss/clip_fraction": totals["clipped"] / tokens,
        "loss/kl_old": totals["kl_old"] / tokens, "mismatch/kl": totals["mismatch"] / tokens,
        "policy/entropy": totals["entropy"] / tokens, "policy/grad_norm": totals["grad_norm"] / updates,
        "time/update": time.perf_counter() - began}

def rl_loss(logprobs: Tensor, entropy: Tensor, batch: Batch, *, cfg: Config, denom: int):
    """grpo_loss of a micro-batch; the entropy is only measured."""
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    loss, stats = grpo_loss(logprobs, old, batch.advantages, batch.loss_mask, denom=denom,
                            clip_low=cfg.clip_low, clip_high=cfg.clip_high, dual_clip=cfg.dual_clip or None,
                            sampler_logprobs=batch.sampler_logprobs, tis_cap=cfg.tis_cap or None)
    return loss, stats | {"entropy": (entropy.detach() * batch.loss_mask).sum()}

def sft_step(demos: Sequence[Rollout], policy: Policy, cfg: Config) -> dict[str, float]:
    """One step of supervised fine-tuning: cross-entropy, in nats, over the tokens the demonstrator wrote."""
    batches = micro_batches(demos, cfg)
    denom = sum(int(batch.loss_mask.sum()) for batch in batches)
    return policy.update(
        batches, lambda logprobs, entropy, batch: (-(logprobs * batch.loss_mask).sum() / denom, {}))

def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Reward, tool use and lengths of graded rollouts; NaN where there is nothing to average."""
    def mean(values) -> float:
        return float(np.mean(values)) if len(values) else math.nan

    def failed(some) -> list[bool]:
        return [call.result.status != ToolStatus.ok for r in some for call in r.calls]

    correct = [r for r in rollouts if r.reward > 0]
    return {"reward/mean": mean([r.reward for r in rollouts]), "tools/error_rate": mean(failed(rollouts)),
            "tools/error_rate_correct": mean(failed(correct)),
            "tools/calls_per_rollout": mean([len(r.calls) for r in rollouts]),
            "rollout/tokens": mean([r.response_tokens for r in rollouts]),
            "rollout/tokens_correct": mean([r.response_tokens for r in correct]),
            "rollout/turns": mean([len(r.turns) for r in rollouts])}

def evaluate(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """pass@1 of held-out rollouts: the mean over problems of each one's k rollouts (avg@k), with a 95 %
    interval over problems; the same by kind; and the tool use of these rollouts."""
    by_problem, by_kind = defaultdict(list), defaultdict(list)
    for r in rollouts:
        by_problem[r.problem.id].append(r.reward)
    for key, rewards in by_problem.items():
        by_kind[key.partition("/")[0]].append(float(np.mean(rewards)))
    means = [mean for kind in by_kind.values() for mean in kind]
    half = 1.96 * float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    return {"eval/pass@1": float(np.mean(means)), "eval/interval": half, "eval/rollouts": len(rollouts)} \
        | {f"eval/{key}": value for key, value in rollout_metrics(rollouts).items()} \
        | {f"eval/pass@1/{kind}": float(np.mean(values)) for kind, values in sorted(by_kind.items())}

def toy_demonstration(rng: np.random.Generator, chat: Chat, cfg: Config) -> Rollout:
    """An imperfect demonstration as a rollout, made by the same three transitions as the policy's."""
    q, turns, results = toy.demonstration(rng, cfg.demo_noise, max_calls=cfg.max_turns - 1)
    problem = Problem(q["id"], q["prompt"], q["answer"])
    rollout = start(problem, chat, replace(cfg, max_tokens=10**6), f"demo/{problem.id}")
    for text, result in zip(turns, [*results, None]):
        tokens = [*chat.encode(text), chat.turn_end]
        append_completion(rollout, Completion(tokens, [0.0] * len(tokens), "stop"), chat)
        if rollout.awaits_tools:
            append_tool_results(rollout, [result], chat)
    return rollout

# ======== above: imported by scale/; below: replaced by scale/ ========

def load_model(cfg: Config):
    """(model, tokenizer) of cfg.model on cfg.device, fp32 weights, with LoRA if asked. Raises UserError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    torch.manual_seed(cfg.seed)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if cfg.device == "auto" else cfg.device
    try:
        if torch.empty(0, device=device).is_cuda:
            torch.set_float32_matmul_precision("high")  # TF32 for the fp32 head
        if cfg.model == "toy":
            show = partial(tool_response, max_chars=cfg.tool_output_chars, show_seconds=False)
            tokenizer = toy.build_tokenizer(np.random.default_rng([cfg.seed, 2]), cfg.demo_noise,
                                            CHATML.replace("<|im_end|>\n", "<|im_end|>"), show)
            model = toy.build_model(tokenizer)
        else:
            tokenizer = AutoTokenizer.from_pretrained(cfg.model)
            if not tokenizer.encode("1"):
                raise ValueError("it has no tokenizer files")
            model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:
        raise UserError(f"model {cfg.model!r} does not load on {device!r}: {first_line(error)}. Use a hub "
                        "name or folder (config.json, weights, tokenizer), device cpu, cuda, ...") from error
    if cfg.lora:
        from peft import LoraConfig, get_peft_model
        adapters = LoraConfig(r=cfg.lora, lora_alpha=2 * cfg.lora, target_modules="all-linear")
        model = get_peft_model(model, adapters)
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.to(device), tokenizer

def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

class LocalEngine:
    """Batched sampling with a KV cache on one device; rows that ended leave the batch. See Engine."""
    def __init__(self, model, chat: Chat, cfg: Config):
        self.model, self.chat, self.cfg, self.version, self.seconds = model, chat, cfg, 0, 0.0
        self.generator = torch.Generator(model.device).manual_seed(cfg.seed)

    def load_weights(self, weights: dict[str, Tensor], version: int) -> None:
        """Copy weights by name, unless their memory is shared; completions carry `version` from now on."""
        own = self.model.state_dict()
        for name, tensor in weights.items():
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        self.version = version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of requests; cfg.generate_rows at a time, similar lengths together."""
        began, results = time.perf_counter(), {}
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].tokens))
        for first in range(0, len(order), self.cfg.generate_rows):
            rows = order[first:first + self.cfg.generate_rows]
            results |= zip(rows, self._generate([requests[i] for i in rows]))
        self.seconds += time.perf_counter() - began
        return [results[i] for i in range(len(requests))]

    @torch.inference_mode()
    def _generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        from transformers import DynamicCache
        device, width = self.model.device, max(len(r.tokens) for r in requests)
        pad = [[0] * (width - len(r.tokens)) for r in requests]  # on the left
        inputs = torch.tensor([p + list(r.tokens) for p, r in zip(pad, requests)], device=device)  # (B, T)
        mask = torch.tensor([p + [1] * len(r.tokens) for p, r in zip(pad, requests)], device=device)
        position, cache = (mask.cumsum(1) - 1).clamp(min=0), DynamicCache(config=self.model.config)
        rows, done = [*range(len(requests))], [Completion([], [], "length", self.version) for _ in requests]
        self.model.eval()
        while rows:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = self.model(inputs, attention_mask=mask, position_ids=position, past_key_values=cache,
                                    use_cache=True, logits_to_keep=1).logits[:, -1]  # (B, V)
            logprobs = (logits.float() / self.cfg.temperature).log_softmax(-1)
            inputs = torch.multinomial(logprobs.exp(), 1, generator=self.generator)  # (B, 1)
            keep = []
            sampled = zip(rows, inputs[:, 0].tolist(), logprobs.gather(1, inputs)[:, 0].tolist())
            for i, (row, token, logprob) in enumerate(sampled):
                done[row].tokens.append(token)
                done[row].logprobs.append(logprob)
                if token == requests[row].stop_token:
                    done[row] = replace(done[row], finish_reason="stop")
                elif len(done[row].tokens) < requests[row].max_tokens:
                    keep.append(i)
            position = position[:, -1:] + 1
            if len(keep) < len(rows):
                index, rows = torch.tensor(keep, dtype=torch.long, device=device), [rows[i] for i in keep]
                inputs, mask, position = inputs[index], mask[index], position[index]
                cache.batch_select_indices(index)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        return done

class LocalPolicy:
    """The model in training on one device: fp32 weights, bf16 compute on a GPU. See Policy."""
    def __init__(self, model, cfg: Config, head=token_logprobs):
        self.model, self.cfg, self.head = model, cfg, head
        self.use_optimizer("rl")

    def use_optimizer(self, phase: str) -> None:
        """Fresh AdamW for phase "rl" or "sft"; the toy's SFT gives matrices to Muon: half the steps."""
        from transformers import get_scheduler
        cfg, sft = self.cfg, phase == "sft"
        lr, schedule = (cfg.sft_lr, "linear") if sft else (cfg.lr, cfg.lr_schedule)
        steps = cfg.sft_steps if sft else cfg.mini_batches * sum(parse_stage(s).steps for s in cfg.stages)
        params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        muon = {name: p for name, p in params.items()
                if sft and cfg.sft_muon_lr and p.ndim == 2 and "embed" not in name}
        rest = [p for name, p in params.items() if name not in muon]
        self.optimizers = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]
        if muon:
            self.optimizers.append(torch.optim.Muon(muon.values(), lr=cfg.sft_muon_lr, weight_decay=0.0))
        self.schedulers = [get_scheduler(schedule, x, cfg.warmup_steps, steps) for x in self.optimizers]

    def _forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """Log-probs, entropies (B, T) at the loss mask, 0 elsewhere. The head runs on masked tokens only."""
        device, mask = self.model.device, batch.loss_mask.to(self.model.device)
        body = getattr(self.model, "get_base_model", lambda: self.model)().get_decoder()  # peft wraps it
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = body(batch.tokens.to(device), attention_mask=batch.attention_mask.to(device),
                          use_cache=False).last_hidden_state  # (B, T, D)
        values = self.head(hidden[:, :-1][mask[:, 1:]], self.model.get_output_embeddings().weight,
                           batch.tokens.to(device)[mask], self.cfg.temperature)  # t is predicted at t - 1
        return tuple(torch.zeros(mask.shape, device=device).masked_scatter(mask, value) for value in values)

    def logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.model.eval()
        with torch.no_grad():
            return self._forward(batch)

    def update(self, micro_batches: Sequence[Batch], loss_fn: LossFn) -> dict[str, float]:
        """One optimizer step over micro-batches, `skipped` if its gradient is not finite. Stats are sums."""
        self.model.train()
        totals: dict[str, float] = defaultdict(float)
        for batch in micro_batches:
            batch = Batch(*(None if x is None else x.to(self.model.device) for x in vars(batch).values()))
            loss, stats = loss_fn(*self._forward(batch), batch)
            loss.backward()
            for key, value in (stats | {"loss": loss.detach()}).items():
                totals[key] += float(value)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_clip))
        for optimizer, scheduler in zip(self.optimizers, self.schedulers):
            if math.isfinite(norm):
                optimizer.step()
                scheduler.step()
            optimizer.zero_grad()
        return totals | {"grad_norm": norm, "updates": 1, "skipped": float(not math.isfinite(norm))}

    def weights(self) -> dict[str, Tensor]:
        """Name -> tensor, sharing memory with the model."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def save(self, folder: Path) -> None:
        """The weights as a Hugging Face folder, and the optimizer's state."""
        self.model.save_pretrained(folder)
        weights = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        states = [x.state_dict() for x in (*self.optimizers, *self.schedulers)]
        torch.save([weights, *states], folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        weights, *states = torch.load(folder / "optimizer.pt", map_location=self.model.device)
        self.model.load_state_dict(weights, strict=False)
        for x, state in zip((*self.optimizers, *self.schedulers), states):
            x.load_state_dict(state)

def collect(problems: Sequence[Problem], engine: Engine, sandbox: Sandbox, cfg: Config, *, samples: int = 0,
            tag: str = "") -> list[Rollout]:
    """Graded rollouts, `samples` (0: what cfg.algo needs) per problem, in lockstep: all turns, all calls."""
    rollouts = [start(problem, engine.chat, cfg, f"{tag}/{group}/{problem.id}/{i}", group)
                for group, problem in enumerate(problems) for i in range(samples or cfg.rollouts_per_problem)]
    active = rollouts
    while active:
        completions = engine.generate([next_request(r, engine.chat) for r in active])
        calls = [append_completion(r, completion, engine.chat) for r, completion in zip(active, completions)]
        results = iter(sandbox.run([call.request for some in calls for call in some]))
        for rollout, some in zip(active, calls):
            if rollout.awaits_tools:
                append_tool_results(rollout, [next(results) for _ in some], engine.chat)
        active = [r for r in active if r.stop_reason is None]
    for rollout in rollouts:
        if any(call.name == "jupyter_code" for call in rollout.calls):
            sandbox.close(rollout.id)
    grade(rollouts, sandbox, cfg)
    return rollouts

# ---- A run folder: config.json, metrics.jsonl, rollouts.jsonl, checkpoint/, curves.png; and the driver

def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

def write_rows(path: Path, rows: Sequence[dict], mode: str = "a") -> None:
    """JSON lines; NaN and infinity, which JSON lacks, become null."""
    with path.open(mode) as file:
        for row in rows:
            clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            file.write(json.dumps(clean) + "\n")

def sandbox_for(cfg: Config) -> LocalSandbox:
    preload = [*filter(None, cfg.tool_preload.split(",")), *["math_verify"] * (cfg.answer_kind == "math")]
    return LocalSandbox(cfg.sandbox_workers, cfg.tool_timeout, cfg.tool_memory_mb, preload=preload)

class Run:
    """One training run in `folder`: its parts, the state that a checkpoint holds, and its loop."""
    def __init__(self, cfg: Config, folder: Path, model, tokenizer, problems: list[Problem],
                 held_out: list[Problem], resume: bool = False):
        self.cfg, self.folder, self.stop = cfg, folder, False  # Ctrl-C sets stop
        self.problems, self.held_out = problems, held_out
        self.chat, self.policy = Chat(tokenizer, cfg), LocalPolicy(model, cfg)
        self.engine, self.rng = LocalEngine(model, self.chat, cfg), np.random.default_rng([cfg.seed, 3])
        self.schedule = [stage for stage in map(parse_stage, cfg.stages) for _ in range(stage.steps)]
        self.state = {"phase": "sft", "step": 0, "sft_step": 0, "position": 0,
                      "pool": [*range(len(problems))]}
        if resume:
            saved = [p for p in (folder / "checkpoint", folder / "checkpoint.old") if p.exists()]
            if not saved:
                raise UserError(f"{folder} has no checkpoint yet: remove it and start again")
            self.state = torch.load(saved[0] / "state.pt", weights_only=False)
            self.policy.use_optimizer(self.state["phase"])
            self.policy.load(saved[0])
            self.rng.bit_generator.state = self.state["rng"]
            self.engine.generator.set_state(self.state["generator"])
            self.engine.version = self.state["step"]
        for file in (folder / "metrics.jsonl", folder / "rollouts.jsonl"):  # drop rows after the checkpoint
            last = self.state["step"] if self.state["phase"] == "rl" else -1
            write_rows(file, [r for r in read_rows(file) if r["step"] <= last], "w")

    def train(self) -> bool:
        """Cold start, then RL through the stages. Returns False where Ctrl-C made it save and stop."""
        cfg, state = self.cfg, self.state
        signal.signal(signal.SIGINT, self.interrupt)
        with sandbox_for(cfg) as self.sandbox:
            if state["sft_step"] < cfg.sft_steps:
                self.cold_start()
            if state["phase"] == "sft" and not self.stop:
                self.policy.use_optimizer("rl")
                self.log(self.evaluate())
                state["phase"] = "rl"
                self.save()
            while state["step"] < len(self.schedule) and not self.stop:
                self.log(self.rl_step())
                if state["step"] % cfg.save_every == 0 or state["step"] == len(self.schedule) or self.stop:
                    self.save()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return not self.stop

    def interrupt(self, signum, frame) -> None:
        print("\nCtrl-C: finishing this step, then saving; once more stops at once", flush=True)
        self.stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def cold_start(self) -> None:
        """Step 1: supervised fine-tuning on demonstrations, made as they are needed."""
        cfg, state, began = self.cfg, self.state, time.perf_counter()
        if state["sft_step"] == 0:
            self.policy.use_optimizer("sft")
        while state["sft_step"] < cfg.sft_steps and not self.stop:
            rng = np.random.default_rng([cfg.seed, 1, state["sft_step"]])
            demos = [toy_demonstration(rng, self.chat, cfg) for _ in range(cfg.sft_batch)]
            stats = sft_step(demos, self.policy, cfg)
            state["sft_step"] += 1
            if state["sft_step"] % 20 == 0 or state["sft_step"] == cfg.sft_steps:
                print(f"cold start {state['sft_step']:>4}/{cfg.sft_steps}  loss {stats['loss']:.3f} "
                      f"nats/token  {time.perf_counter() - began:.0f} s", flush=True)
        self.save()

    def rl_step(self) -> dict[str, float]:
        """Steps 2 to 7 once: collect, train_step, load_weights; problems before, records after."""
        began, stage, state = time.perf_counter(), self.schedule[self.state["step"]], self.state
        cfg = replace(self.cfg, max_tokens=stage.max_tokens)
        if stage.unsolved and (state["step"] == 0 or not self.schedule[state["step"] - 1].unsolved):
            self.drop_solved(cfg)
        problems, generated = self.next_problems(), self.engine.seconds
        rollouts = collect(problems, self.engine, self.sandbox, cfg, tag=f"step{state['step'] + 1}")
        collected, generated = time.perf_counter() - began, self.engine.seconds - generated
        for r in (logged := [r for r in rollouts if r.group < cfg.log_groups]):
            r.logprobs, r.entropy = (x[0].tolist() for x in self.policy.logprobs(collate([r], cfg)))
        metrics = train_step(rollouts, self.policy, cfg, self.rng)
        state["step"] += 1
        self.engine.load_weights(self.policy.weights(), version=state["step"])
        write_rows(self.folder / "rollouts.jsonl", [
            {"step": state["step"], "text": r.text, "pieces": [self.chat.decode([t]) for t in r.tokens]}
            | asdict(r) for r in logged])
        tokens = sum(r.response_tokens for r in rollouts)
        metrics |= {"time/generate": generated, "time/tools": collected - generated,
                    "throughput/tokens_per_s": tokens / (time.perf_counter() - began)}
        if state["step"] == len(self.schedule) or cfg.eval_every and state["step"] % cfg.eval_every == 0:
            metrics |= self.evaluate()
        return metrics

    def next_problems(self) -> list[Problem]:
        """The next problems of the pool, which is shuffled anew for every pass over it."""
        pool, first = self.state["pool"], self.state["position"]
        self.state["position"] = last = first + self.cfg.problems_per_step
        order = [i for epoch in range(first // len(pool), last // len(pool) + 1)
                 for i in np.random.default_rng([self.cfg.seed, 4, epoch]).permutation(len(pool))]
        return [self.problems[pool[i]] for i in order[first % len(pool):][:last - first]]

    def drop_solved(self, cfg: Config) -> None:
        """The last stage's filter: only problems that are not solved every time stay (report §4)."""
        pool = self.state["pool"][:cfg.problems_per_step * len(self.schedule[self.state["step"]:])]
        rollouts = collect([self.problems[i] for i in pool], self.engine, self.sandbox, cfg,
                           samples=cfg.filter_rollouts, tag="filter")
        failed = sorted({r.group for r in rollouts if r.reward <= 0})
        print(f"last stage: {len(failed)} of {len(pool)} problems, those not always solved", flush=True)
        if failed:
            self.state |= {"pool": [pool[i] for i in failed], "position": 0}

    def evaluate(self) -> dict[str, float]:
        """pass@1 on held-out problems; after cold start also the gate: errors must not decide the answer."""
        ends = self.state["step"] in (0, len(self.schedule))  # between them a quarter of the problems do
        problems = self.held_out if ends else self.held_out[::4]
        rollouts = collect(problems, self.engine, self.sandbox, self.cfg,
                           samples=self.cfg.eval_samples, tag="eval")
        if self.state["step"] == 0:
            failed, clean = ([r.reward for r in rollouts if r.calls and (r.error_penalty > 0) == bad]
                             for bad in (True, False))
            print(f"gate: {np.mean(failed or 0):.2f} right of {len(failed)} rollouts with a failed call, "
                  f"{np.mean(clean or 0):.2f} of {len(clean)} clean (far lower: RL removes errors anyway)")
        return evaluate(rollouts)

    def log(self, m: dict[str, float]) -> None:
        """A line in metrics.jsonl, and one on the screen that leads with what matters."""
        write_rows(self.folder / "metrics.jsonl", [{"step": self.state["step"]} | m])
        line = f"{Path(self.cfg.name).name}  step {self.state['step']:>3}/{len(self.schedule)}"
        if "reward/mean" in m:
            line += (f"  reward {m['reward/mean']:.2f}  errors in correct {m['tools/error_rate_correct']:.3f}"
                     f"  tokens {m['rollout/tokens_correct']:.0f}  entropy {m['policy/entropy']:.2f}"
                     f"  |  generate {m['time/generate']:.1f} + tools {m['time/tools']:.1f}"
                     f" + update {m['time/update']:.1f} s")
        if "eval/pass@1" in m:
            line += (f"  |  held-out pass@1 {m['eval/pass@1']:.3f} ± {m['eval/interval']:.3f}"
                     f"  errors in correct {m['eval/tools/error_rate_correct']:.3f}"
                     f"  tokens {m['eval/rollout/tokens_correct']:.1f}")
        print(line, flush=True)

    def save(self) -> None:
        """Write checkpoint/ whole or not at all: a crash or a full disk leaves the one before."""
        new, final, old = (self.folder / f"checkpoint{suffix}" for suffix in (".new", "", ".old"))
        self.state |= {"rng": self.rng.bit_generator.state, "generator": self.engine.generator.get_state()}
        shutil.rmtree(new, ignore_errors=True)
        try:
            self.policy.save(new)
            self.chat.tokenizer.save_pretrained(new)
            torch.save(self.state, new / "state.pt")
        except (OSError, RuntimeError, SafetensorError) as error:  # what a full disk raises, by library
            raise UserError(f"{new} is not written ({first_line(error)}): make room, --resume") from error
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)

if __name__ == "__main__":
    import commands  # which imports this file as the module minirstar: one copy of the classes for all
    commands.main()
