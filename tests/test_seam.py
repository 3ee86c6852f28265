"""The seam: what scale/ imports, and the names that checks call."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import minirstar

ROOT = Path(minirstar.__file__).parent
SEAM = "# ======== above: imported by scale/; below: replaced by scale/ ========"


def test_importing_minirstar_loads_no_scale():
    code = (
        "import sys, minirstar, commands\n"
        "heavy = {'ray', 'vllm', 'scale'} & {name.partition('.')[0] for name in sys.modules}\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_file_here_imports_scale():
    for name in ("minirstar.py", "toy.py", "sandbox.py", "commands.py"):
        lines = (ROOT / name).read_text().splitlines()
        assert not [
            line
            for line in lines
            if line.split()[:1] in (["import"], ["from"]) and "scale" in line.split()[1]
        ]


def test_seam_line_stands_once_and_divides_algorithm_from_infrastructure():
    source = (ROOT / "minirstar.py").read_text()
    assert source.count(SEAM) == 1
    above, below = source.split(SEAM)
    for name in ("Config", "UserError", "Problem", "Rollout", "Batch", "Chat", "Sandbox", "Engine", "Policy"):
        assert f"\nclass {name}" in above and f"\nclass {name}" not in below
    for name in (
        "start",
        "append_completion",
        "append_tool_results",
        "parse_tool_calls",
        "grade",
        "final_answer",
        "tool_error_penalty",
        "answer_format_penalty",
        "resample_on_correct",
        "group_advantages",
        "token_logprobs",
        "grpo_loss",
        "train_step",
        "sft_step",
        "evaluate",
    ):
        assert f"\ndef {name}(" in above, name
    for name in ("class LocalEngine", "class LocalPolicy", "def collect", "class Run"):
        assert f"\n{name}" in below and f"\n{name}" not in above, name


SIGNATURES = {
    "tool_error_penalty": ["statuses"],
    "answer_format_penalty": ["text", "turns"],
    "resample_on_correct": ["rewards", "penalties", "keep", "rng", "*min_each=2", "*select='weighted'"],
    "group_advantages": ["rewards", "eps=1e-06"],
    "token_logprobs": ["hidden", "weight", "targets", "temperature=1.0"],
    "grpo_loss": [
        "logprobs",
        "old_logprobs",
        "advantages",
        "loss_mask",
        "*denom",
        "*clip_low=0.2",
        "*clip_high=0.28",
        "*dual_clip=None",
        "*sampler_logprobs=None",
        "*tis_cap=None",
    ],
    "train_step": ["rollouts", "policy", "cfg", "rng"],
    "append_completion": ["rollout", "completion", "chat"],
    "append_tool_results": ["rollout", "results", "chat"],
    "ToolRequest": ["code", "stdin=''", "kind='python'", "session=None"],
    "ToolResult": ["status", "stdout=''", "stderr=''", "seconds=0.0"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    def written(p: inspect.Parameter) -> str:
        default = "" if p.default is p.empty else f"={p.default!r}"
        return "*" * (p.kind is p.KEYWORD_ONLY) + p.name + default

    assert [
        written(p) for p in inspect.signature(getattr(minirstar, name)).parameters.values()
    ] == SIGNATURES[name]


def test_contract_signatures():
    def names(function) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert {"workers", "timeout", "memory_mb"} <= set(names(minirstar.LocalSandbox))
    for sandbox in (minirstar.Sandbox, minirstar.LocalSandbox):
        assert names(sandbox.run) == ["self", "requests"] and names(sandbox.close) == ["self", "session"]
    for engine in (minirstar.Engine, minirstar.LocalEngine):
        assert names(engine.generate) == ["self", "requests"]
        assert names(engine.load_weights) == ["self", "weights", "version"]
    for policy in (minirstar.Policy, minirstar.LocalPolicy):
        assert names(policy.logprobs) == ["self", "batch"] and names(policy.update) == [
            "self",
            "micro_batches",
            "loss_fn",
        ]
        assert names(policy.weights) == ["self"] and names(policy.save) == names(policy.load) == [
            "self",
            "folder",
        ]
    assert names(minirstar.collect)[:4] == ["problems", "engine", "sandbox", "cfg"]


def test_tool_status_is_a_str_enum_of_these():
    assert [(s.name, s.value) for s in minirstar.ToolStatus] == [
        (n, n) for n in ("ok", "error", "timeout", "memory", "output_limit", "parse_error")
    ]
    assert isinstance(minirstar.ToolStatus.ok, str)
    assert issubclass(minirstar.SandboxUnavailable, RuntimeError)


def test_file_can_be_read_top_to_bottom():
    lines = (ROOT / "minirstar.py").read_text().splitlines()
    assert len(lines) <= 1100
    assert max(map(len, lines)) <= 110


def test_every_definition_says_what_it_is_unless_its_name_does():
    functions = [
        f for _, f in inspect.getmembers(minirstar, inspect.isfunction) if f.__module__ == "minirstar"
    ]
    assert len(functions) > 30
    for f in functions:
        assert len(inspect.getsource(f).splitlines()) <= 45, f.__name__
