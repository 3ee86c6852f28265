"""Drivers: run folders, resuming, Ctrl-C, full disks, data sets, and the commands."""

import contextlib
import dataclasses
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import commands
import pytest
import torch
from conftest import tiny_config
from safetensors.torch import load_file

import minirstar
from minirstar import Run, UserError, load_model, read_rows, write_rows

ROOT = Path(minirstar.__file__).parent
METRICS = {"reward/mean", "tools/error_rate", "tools/error_rate_correct", "tools/calls_per_rollout",
           "rollout/tokens", "rollout/tokens_correct", "rollout/turns", "roc/kept_penalty",
           "group/uniform_fraction", "loss/policy", "loss/clip_fraction", "loss/kl_old", "mismatch/kl",
           "policy/entropy", "policy/grad_norm", "time/generate", "time/tools", "time/update",
           "throughput/tokens_per_s"}
COLUMNS = ("tokens", "pieces", "loss_mask", "sampler_logprobs", "versions", "logprobs", "entropy")


@pytest.fixture(scope="session")
def run_config(model_folder):
    """Cold start, 2 RL steps, and one on problems not always solved; the reward is hardly ever uniform."""
    return tiny_config(name="r", model=str(model_folder), sft_steps=2, stages=("2:40", "1:40:unsolved"),
                       reward="rewards:parity", group_size=3, lr=1e-3, sft_muon_lr=0.0, eval_every=2)


@pytest.fixture(scope="session")
def finished(run_config, tmp_path_factory):
    """The folder in which an uninterrupted run was made, and is not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder):
        assert commands.train(run_config) == Path("runs/r")
    return folder


@pytest.fixture
def here(finished, tmp_path, monkeypatch):
    """A working folder with a copy of the finished run."""
    shutil.copytree(finished / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def digest(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def state_of(run: Path) -> dict:
    """All that a run's checkpoint and records hold, but for times."""

    def timeless(row):
        return {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))}

    def without_seconds(row):
        for call in row["calls"]:
            call["result"].pop("seconds")
        return row

    return {"weights": load_file(run / "checkpoint/model.safetensors"),
            "optimizer": torch.load(run / "checkpoint/optimizer.pt"),
            "state": torch.load(run / "checkpoint/state.pt", weights_only=False),
            "metrics": [timeless(row) for row in read_rows(run / "metrics.jsonl")],
            "rollouts": [without_seconds(row) for row in read_rows(run / "rollouts.jsonl")]}


def same(a, b) -> bool:
    """Bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_same(a: dict, b: dict) -> None:
    for key in a:
        assert same(a[key], b[key]), key


def test_run_folder_has_the_documented_files(finished, run_config):
    run = finished / "runs/r"
    assert {p.name for p in run.iterdir()} == {"config.json", "metrics.jsonl", "rollouts.jsonl", "checkpoint",
                                               "curves.png"}
    assert commands.read_config(run) == run_config
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_have_the_documented_names(finished):
    rows = read_rows(finished / "runs/r/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert {key for key in row if not key.startswith("eval/")} == METRICS | {"step"}
    assert [("eval/pass@1" in row) for row in rows] == [True, False, True, True]
    assert {f"eval/{name}" for name in METRICS if name.startswith(("tools/", "rollout/"))} <= set(rows[0])
    assert all(row["group/uniform_fraction"] < 1 and row["policy/grad_norm"] > 0 for row in rows[1:])


def test_logged_rollouts_align_token_by_token(finished, run_config):
    rows = read_rows(finished / "runs/r/rollouts.jsonl")
    assert len(rows) == 3 * run_config.log_groups * run_config.rollouts_per_problem
    for row in rows:
        assert len({len(row[name]) for name in COLUMNS}) == 1
        assert all(
            mask or lp == slp == h == 0 and version == -1
            for mask, lp, slp, h, version in zip(
                *(row[name] for name in ("loss_mask", "logprobs", "sampler_logprobs", "entropy", "versions"))
            )
        )
        sampled = [i for i, mask in enumerate(row["loss_mask"]) if mask]
        assert {row["versions"][i] for i in sampled} == {row["step"] - 1}
        assert max(abs(row["logprobs"][i] - row["sampler_logprobs"][i]) for i in sampled) < 1e-4
        assert sampled[0] == row["prompt_length"] and row["problem"]["prompt"] in "".join(row["pieces"])
        for name in ("text", "reward", "error_penalty", "format_penalty", "kept", "advantage", "stop_reason"):
            assert name in row
        assert all({"status", "seconds", "stdout", "stderr"} <= set(call["result"]) for call in row["calls"])
    assert {row["kept"] for row in rows} == {True, False} and any(row["calls"] for row in rows)
    assert all(row["advantage"] == 0 for row in rows if not row["kept"])


def test_checkpoint_is_a_hugging_face_folder(finished, run_config):
    cfg = dataclasses.replace(run_config, model=str(finished / "runs/r/checkpoint"))
    model, tokenizer = load_model(cfg)
    for name, tensor in load_file(finished / "runs/r/checkpoint/model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert tokenizer.chat_template


def test_run_repeats_bit_for_bit(finished, run_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands.train(run_config)
    assert_same(state_of(tmp_path / "runs/r"), state_of(finished / "runs/r"))


@pytest.mark.parametrize(
    "method, times", [("sft", 1), ("evaluate", 1), ("rl_step", 1), ("rl_step", 2), ("rl_step", 3)]
)
def test_stopped_and_resumed_run_equals_an_unbroken_one(
    finished, run_config, tmp_path, monkeypatch, method, times
):
    """Ctrl-C comes while `method` runs for the nth time."""
    monkeypatch.chdir(tmp_path)
    where, name = (minirstar, "sft_step") if method == "sft" else (Run, method)
    original, calls = getattr(where, name), []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == times:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, interrupted)
        with contextlib.suppress(UserError):  # at the last step it may as well have come to the end
            commands.train(run_config)
    assert len(calls) == times
    commands.train(run_config, resume=True)
    assert_same(state_of(tmp_path / "runs/r"), state_of(finished / "runs/r"))


def test_killed_run_goes_on_from_its_checkpoint(finished, run_config, tmp_path, monkeypatch):
    """What came after the last checkpoint is done again, and not recorded twice."""
    monkeypatch.chdir(tmp_path)
    original = Run.log

    def killed(self, metrics):
        original(self, metrics)
        if self.state["step"] == 2:
            raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", killed)
        with pytest.raises(ZeroDivisionError):
            commands.train(run_config)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert torch.load(tmp_path / "runs/r/checkpoint/state.pt", weights_only=False)["step"] == 0
    commands.train(run_config, resume=True)
    assert_same(state_of(tmp_path / "runs/r"), state_of(finished / "runs/r"))


def test_existing_folder_is_not_overwritten(here, run_config):
    before = digest(here)
    with pytest.raises(UserError, match="runs/r exists.*--resume.*--name"):
        commands.train(dataclasses.replace(run_config, seed=9))
    assert digest(here) == before


def test_resume_with_other_settings_is_refused_by_name(here, run_config):
    before = digest(here)
    with pytest.raises(UserError, match=r"made with stages=.*, lr=0\.001: resume it without"):
        commands.train(dataclasses.replace(run_config, lr=0.5, stages=("9:40",)), resume=True)
    assert digest(here) == before


def test_resume_of_nothing_is_refused(run_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="runs/r is no run folder"):
        commands.train(run_config, resume=True)
    assert not (tmp_path / "runs").exists()


def test_resume_without_a_checkpoint_says_so(here, run_config):
    shutil.rmtree(here / "runs/r/checkpoint")
    with pytest.raises(UserError, match="no checkpoint yet"):
        commands.train(run_config, resume=True)


def test_resuming_a_finished_run_changes_no_result(here, finished, run_config):
    commands.train(run_config, resume=True)
    assert_same(state_of(here / "runs/r"), state_of(finished / "runs/r"))


def test_checkpoint_lost_between_its_two_renames_is_found(here, finished, run_config):
    (here / "runs/r/checkpoint").rename(here / "runs/r/checkpoint.old")
    commands.train(run_config, resume=True)
    assert len(read_rows(here / "runs/r/metrics.jsonl")) == 4


def stopped_at_one(run_config, monkeypatch) -> None:
    """A run in ./runs that was stopped after its first RL step."""

    def stop(self):
        self.stop = True
        return original(self)

    original = Run.rl_step
    with monkeypatch.context() as patch:
        patch.setattr(Run, "rl_step", stop)
        with pytest.raises(UserError, match="stopped and saved.*--resume --name r"):
            commands.train(run_config)


def argv_of(cfg) -> list[str]:
    """The command line that gives this Config."""
    default, argv = minirstar.one_gpu() if cfg.model != "toy" else minirstar.Config(), []
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if value == getattr(default, f.name):
            continue
        if isinstance(value, bool):
            argv.append(f"--{'' if value else 'no-'}{f.name}")
        else:
            argv += [f"--{f.name}", *map(str, value if isinstance(value, tuple) else [value])]
    return argv


def test_full_disk_leaves_the_checkpoint_before_and_ends_in_one_line(run_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stopped_at_one(run_config, monkeypatch)
    before = digest(tmp_path / "runs/r/checkpoint")

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(SystemExit) as stopped:
            commands.main(["--resume", "--name", "r"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    message = str(stopped.value)
    assert message.startswith("minirstar: ") and len(message.splitlines()) == 1
    assert "No space left on device" in message
    assert digest(tmp_path / "runs/r/checkpoint") == before
    commands.train(run_config, resume=True)
    assert [row["step"] for row in read_rows(tmp_path / "runs/r/metrics.jsonl")] == [0, 1, 2, 3]


def start_process(argv, folder: Path, **options) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, ROOT / "minirstar.py", *argv], cwd=folder,
                            env=os.environ | {"PYTHONPATH": path}, **pipes, **options)


def test_disk_that_really_refuses_to_be_written_ends_in_one_line(run_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stopped_at_one(run_config, monkeypatch)
    before = digest(tmp_path / "runs/r/checkpoint")

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))  # weights are 2 MB

    process = start_process(["--resume", "--name", "r"], tmp_path, preexec_fn=small_files)
    _, errors = process.communicate(timeout=120)
    lines = [line for line in errors.splitlines() if line.startswith("minirstar: ")]
    assert process.returncode == 1 and len(lines) == 1 and "Traceback" not in errors, errors
    assert digest(tmp_path / "runs/r/checkpoint") == before


def test_ctrl_c_saves_and_says_how_to_go_on(run_config, tmp_path):
    cfg = dataclasses.replace(run_config, stages=("500:40",), sft_steps=0, eval_every=0)
    process = start_process(argv_of(cfg), tmp_path)
    try:
        end = time.monotonic() + 120
        while len(read_rows(tmp_path / "runs/r/metrics.jsonl")) < 2 and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1 and "finishing this step" in output
    assert (
        errors.splitlines()[-1].startswith("minirstar: ") and "--resume --name r" in errors.splitlines()[-1]
    )
    steps = [row["step"] for row in read_rows(tmp_path / "runs/r/metrics.jsonl")]
    saved = torch.load(tmp_path / "runs/r/checkpoint/state.pt", weights_only=False)
    assert steps == list(range(saved["step"] + 1)) and 1 <= saved["step"] < 500


def test_names_are_given_in_turn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commands.free_name("toy") == "toy-001"
    Path("runs/toy-001").mkdir(parents=True)
    assert commands.free_name("toy") == "toy-002"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_records_are_json_whatever_the_numbers(tmp_path, value):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    write_rows(tmp_path / "rows.jsonl", [{"step": 1, "policy/grad_norm": value, "x": 0.5}])
    (row,) = (
        json.loads(line, parse_constant=refuse) for line in (tmp_path / "rows.jsonl").read_text().splitlines()
    )
    assert row == {"step": 1, "policy/grad_norm": None, "x": 0.5}


@pytest.fixture
def data(tmp_path):
    """Writes a .jsonl file and gives the Config that reads it."""

    def write(*rows, **settings):
        path = tmp_path / "set.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tiny_config(dataset=str(path), **settings)

    return write


GOOD = {"question": "What is 6 * 7?", "answer": "6 * 7 = 42 #### 42"}


def test_jsonl_problems_are_read(data):
    cfg = data(GOOD, {"question": "1000 + 234?", "answer": 1234}, {"question": "{x}", "answer": "1,234"})
    problems = commands.load_problems(cfg, held_out=False)
    assert [(p.prompt, p.answer, p.kind) for p in problems] == [
        ("What is 6 * 7?", "42", "int"),
        ("1000 + 234?", "1234", "int"),
        ("{x}", "1,234", "int"),
    ]
    assert len({p.id for p in problems}) == 3
    held_out = commands.load_problems(dataclasses.replace(cfg, eval_problems=2), held_out=True)
    assert held_out == problems[:2]


@pytest.mark.parametrize(
    "row, settings, says",
    [
        ({"problem": "6 * 7?", "answer": "42"}, {}, "no column question.*--question_column"),
        ({"question": "6 * 7?", "solution": "42"}, {}, "no column answer.*--answer_column"),
        (
            {"question": "6 * 7?", "answer": "forty-two"},
            {},
            "row 1: 'forty-two' is not an integer.*answer_kind math",
        ),
        ({"question": "6 * 7?", "answer": "42.5"}, {}, "row 1: '42.5' is not an integer"),
        ({"question": "6 * 7?", "answer": None}, {}, "row 1: .*is not an integer"),
    ],
    ids=["question", "answer", "words", "fraction", "null"],
)
def test_jsonl_that_does_not_fit_is_refused(data, row, settings, says):
    first = GOOD if set(row) == set(GOOD) else row
    with pytest.raises(UserError, match=says):
        commands.load_problems(data(first, row, **settings), held_out=False)


def test_expressions_are_answers_of_kind_math(data):
    (problem,) = commands.load_problems(
        data({"question": "?", "answer": "\\frac{1}{2}"}, answer_kind="math"), held_out=False
    )
    assert (problem.answer, problem.kind) == ("\\frac{1}{2}", "math")


@pytest.mark.parametrize("text", ["", "not json\n"], ids=["empty", "no json"])
def test_file_without_problems_is_refused(tmp_path, text):
    (tmp_path / "set.jsonl").write_text(text)
    with pytest.raises(UserError, match="set.jsonl"):
        commands.load_problems(tiny_config(dataset=str(tmp_path / "set.jsonl")), held_out=False)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="absent.jsonl"):
        commands.load_problems(tiny_config(dataset=str(tmp_path / "absent.jsonl")), held_out=False)


def test_toy_problems_are_split_and_repeat():
    cfg = tiny_config(eval_problems=50)
    train, held_out = (commands.load_problems(cfg, side) for side in (False, True))
    assert len(held_out) == 50 and len(train) > 1000 and not {p.id for p in train} & {p.id for p in held_out}
    assert held_out == commands.load_problems(cfg, True)
    assert held_out != commands.load_problems(dataclasses.replace(cfg, seed=2), True)


@pytest.mark.parametrize("missing", ["tokenizer", "config.json", "everything"])
def test_model_folder_that_is_not_whole_is_refused_before_a_run_is_made(
        model_folder, run_config, tmp_path, monkeypatch, missing):
    monkeypatch.chdir(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    for file in broken.iterdir():
        if missing == "everything" or file.name.startswith(missing):
            file.unlink()
    with pytest.raises(UserError, match="broken.*does not load"):
        commands.train(dataclasses.replace(run_config, model=str(broken)))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("reward", ["no_such_module:f", "rewards:no_such_function"])
def test_bad_reward_is_refused_before_a_run_is_made(run_config, tmp_path, monkeypatch, reward):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="reward is"):
        commands.train(dataclasses.replace(run_config, reward=reward))
    assert not (tmp_path / "runs").exists()


def test_every_problem_is_used_once_in_an_epoch(run_config):
    run = object.__new__(Run)
    run.cfg = dataclasses.replace(run_config, problems_per_step=3)
    run.problems, run.state = list("abcdefghij"), {"position": 0, "pool": [7, 1, 2, 3, 9, 0, 4]}
    taken = [p for _ in range(7) for p in run.next_problems()]
    for epoch in range(3):
        assert sorted(taken[7 * epoch : 7 * epoch + 7]) == sorted("hbcdjae")
    assert taken[:7] != taken[7:14] != taken[14:]


def test_eval_command_reports_pass_at_1_by_kind(here, capsys):
    for target in ("runs/r", "runs/r/checkpoint"):
        commands.main(["eval", target, "--eval_problems", "6", "--eval_samples", "2"])
        shown = capsys.readouterr().out
        assert "6 problems x 2 rollouts" in shown and "pass@1 " in shown and "±" in shown
        assert "tools/error_rate" in shown and "pass@1/" in shown


def test_eval_of_nothing_ends_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="^minirstar: .*empty"):
        commands.main(["eval", "./empty"])


def test_chat_command_shows_turns_tools_and_answers(here, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 61 * 17 - 12?\nFind 1234 mod 56.\n\n"))
    commands.main(["chat", "runs/r"])
    shown = capsys.readouterr().out
    assert shown.count("<reason>") >= 2 and shown.count("answer: ") == 2


def test_chat_ends_with_its_input(here, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    commands.main(["chat", "runs/r"])
    assert "answer: " not in capsys.readouterr().out


@pytest.mark.slow
def test_comparison_is_made_and_when_finished_not_made_again(run_config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cfg = dataclasses.replace(run_config, name="c", stages=("1:40",), sft_steps=1)
    assert commands.compare(cfg) == Path("runs/c")
    shown = capsys.readouterr().out
    results = json.loads((tmp_path / "runs/c/compare.json").read_text())
    assert results["seeds"] == [1] and all(
        len(results[algo]["eval/pass@1"]) == 1 for algo in commands.ALGORITHMS
    )
    assert all(line in shown for line in ("\nroc", "\ngrpo", "\nuniform"))
    assert (tmp_path / "runs/c/compare.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in (tmp_path / "runs/c").iterdir() if p.is_dir()} == {
        "cold_start",
        "roc-seed1",
        "grpo-seed1",
        "uniform-seed1",
    }
    started = {json.dumps(read_rows(p / "metrics.jsonl")[0]) for p in (tmp_path / "runs/c").glob("*-seed1")}
    assert len(started) == 1, "all three start from one cold start"
    with pytest.raises(UserError, match="exists"):
        commands.compare(cfg)
    before = digest(tmp_path / "runs/c")
    monkeypatch.setattr(Run, "__init__", None)  # nothing may be run
    commands.compare(cfg, resume=True)
    after = digest(tmp_path / "runs/c")
    assert {k: v for k, v in after.items() if "compare" not in k} == {
        k: v for k, v in before.items() if "compare" not in k
    }
    assert after["compare.json"] == before["compare.json"]
