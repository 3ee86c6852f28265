"""The command line of minirstar: train, compare, eval and chat, with their problems and run folders."""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

import toy
from minirstar import (Chat, Config, LocalEngine, Problem, Rollout, Run, Sandbox, SandboxUnavailable,
                       UserError, append_completion, append_tool_results, collect, evaluate, final_answer,
                       first_line, load_model, next_request, one_gpu, parse_stage, read_rows,
                       reward_function, same_integer, sandbox_for, start)
from minirstar import __doc__ as METHOD
from minirstar import __file__ as SOURCE

ALGORITHMS = ("roc", "grpo", "uniform")
COMMANDS = ("train", "compare", "eval", "chat")


def load_problems(cfg: Config, held_out: bool) -> list[Problem]:
    """The training or held-out problems of cfg.dataset.

    Raises UserError where a split, column or answer is missing.
    """
    if cfg.dataset == "toy":
        n = cfg.eval_problems or 800 if held_out else 4096
        return [Problem(q["id"], q["prompt"], q["answer"])
                for q in toy.questions(np.random.default_rng([cfg.seed, held_out]), n, held_out)]
    from datasets import load_dataset

    split = cfg.eval_split if held_out else cfg.train_split
    path, _, part = cfg.dataset.partition(":")
    source = split if split.endswith(".jsonl") else cfg.dataset
    try:
        rows = load_dataset("json", data_files=source, split="train") if source.endswith(".jsonl") else \
            load_dataset(path, part or None, split=split)
    except Exception as error:  # the library's errors are of many kinds, about arguments or network
        raise UserError(f"dataset {source!r}, split {split!r}, does not load: {first_line(error)}") from error
    if missing := {cfg.question_column, cfg.answer_column} - set(rows.column_names):
        raise UserError(f"dataset {source!r} has no column {', '.join(sorted(missing))}, only "
                        f"{', '.join(rows.column_names)}: set --question_column and --answer_column")
    problems = []
    for i, (question, answer) in enumerate(zip(rows[cfg.question_column], rows[cfg.answer_column])):
        answer = str(answer).split("####")[-1].strip()
        if cfg.answer_kind == "int" and not same_integer(answer, answer):
            raise UserError(f"dataset {source!r}, row {i}: {answer[:40]!r} is not an integer; "
                            "use --answer_kind math")
        problems.append(Problem(f"{Path(path).stem}/{i}", str(question), answer, cfg.answer_kind))
    return problems[:cfg.eval_problems or None] if held_out else problems


def run_folder(cfg: Config, resume: bool, prefix: str) -> tuple[Config, Path]:
    """cfg with a name, and its folder: not there yet or, to resume, made with the same settings."""
    cfg = replace(cfg, name=cfg.name or free_name(prefix))
    folder = Path("runs", cfg.name)
    if resume:
        old = read_config(folder)
        if changed := [f"{f.name}={getattr(old, f.name)!r}" for f in fields(cfg)
                       if getattr(old, f.name) != getattr(cfg, f.name)]:
            raise UserError(f"{folder} was made with {', '.join(changed)}: resume it without other settings, "
                            f"or start a new run from its weights with --model {folder}/checkpoint")
    elif folder.exists():
        raise UserError(f"{folder} exists: go on with it by --resume, or choose another --name")
    return cfg, folder


def write_config(cfg: Config, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(asdict(cfg), indent=1))


def read_config(folder: Path) -> Config:
    """The Config of a run folder. Raises UserError where there is none, or one of another version."""
    try:
        values = json.loads((folder / "config.json").read_text())
        return Config(**values | {"stages": tuple(values["stages"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder} is no run folder of this version: {first_line(error)}") from error


def free_name(prefix: str) -> str:
    """The first of PREFIX-001, PREFIX-002, ... that is not in runs/ yet."""
    names = (f"{prefix}-{i:03d}" for i in range(1, 10**6))
    return next(name for name in names if not Path("runs", name).exists())


PANELS = (("eval/pass@1", "held-out pass@1"),
          ("eval/tools/error_rate_correct", "failed calls / calls, correct rollouts"),
          ("reward/mean", "reward on training rollouts"),
          ("eval/rollout/tokens_correct", "tokens of a correct rollout"))


def plot_curves(runs: dict[str, list[list[dict]]], path: Path, title: str) -> None:
    """Training curves: label -> metric rows of each seed's run. Thin lines are seeds, thick ones the mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    for (key, panel), axis in zip(PANELS, figure.subplots(2, 2).flat):
        for i, (name, seeds) in enumerate(runs.items()):
            lines = [{row["step"]: row[key] for row in rows if row.get(key) is not None} for rows in seeds]
            alpha = 0.35 if len(lines) > 1 else 1
            for line in lines:
                axis.plot(list(line), list(line.values()), color=f"C{i}", alpha=alpha, lw=1)
            steps = sorted(set.intersection(*(set(line) for line in lines)))
            mean = [float(np.mean([line[step] for line in lines])) for step in steps]
            label = f"{name} ({len(lines)} seed{'s' * (len(lines) > 1)})"
            axis.plot(steps, mean, color=f"C{i}", lw=2.2, label=label)
        axis.set(xlabel="RL step", ylabel=panel)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)


def train(cfg: Config, resume: bool = False) -> Path:
    """One run, new or resumed; returns its folder, which is made once the data and the model are loaded."""
    cfg, folder = run_folder(cfg, resume, Path(cfg.model).name)
    print(f"{folder}: {cfg.algo}, seed {cfg.seed}; loading {cfg.dataset} and {cfg.model}", flush=True)
    reward_function(cfg)  # a bad name fails now, not after the cold start
    problems, held_out = load_problems(cfg, held_out=False), load_problems(cfg, held_out=True)
    model, tokenizer = load_model(cfg)
    write_config(cfg, folder)
    if not Run(cfg, folder, model, tokenizer, problems, held_out, resume).train():
        raise UserError(f"stopped and saved; to go on: python minirstar.py --resume --name {cfg.name}")
    plot_curves({cfg.algo: [read_rows(folder / "metrics.jsonl")]}, folder / "curves.png",
                f"{cfg.name}: {cfg.algo}, seed {cfg.seed}")
    return folder


def compare(cfg: Config, resume: bool = False) -> Path:
    """roc, grpo and uniform from one cold start, over cfg.seeds seeds: a table, compare.json, compare.png."""
    cfg, folder = run_folder(cfg, resume, "compare")
    write_config(cfg, folder)
    cold = replace(cfg, name=f"{cfg.name}/cold_start", stages=())
    train_once(cold, resume, threads=os.cpu_count() or 1)
    model = str(Path("runs", cold.name, "checkpoint"))
    seeds = [cfg.seed + i for i in range(cfg.seeds)]
    runs = [replace(cfg, algo=algo, seed=seed, name=f"{cfg.name}/{algo}-seed{seed}", sft_steps=0, model=model)
            for seed in seeds for algo in ALGORITHMS]
    threads = max(1, (os.cpu_count() or 1) // cfg.jobs)
    with ProcessPoolExecutor(cfg.jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(train_once, runs, [resume] * len(runs), [threads] * len(runs)))
    rows = {algo: [read_rows(Path("runs", run.name, "metrics.jsonl")) for run in runs if run.algo == algo]
            for algo in ALGORITHMS}
    labels = {key: label for key, label in PANELS if key.startswith("eval/")}
    last = {algo: {key: [seed[-1][key] for seed in rows[algo]] for key in labels} for algo in ALGORITHMS}
    (folder / "compare.json").write_text(json.dumps({"seeds": seeds, **last}, indent=1))
    plot_curves(rows, folder / "compare.png", f"seeds {seeds[0]} to {seeds[-1]} from one cold start")
    for algo, columns in last.items():
        numbers = {labels[key]: np.array(values, dtype=float) for key, values in columns.items()}  # null: nan
        cells = [f"{label} {x.mean():.3f} ({x.min():.3f} to {x.max():.3f})" for label, x in numbers.items()]
        print("  | ".join([f"{algo:8}", *cells]))
    return folder


def train_once(cfg: Config, resume: bool, threads: int) -> None:
    """One run of a comparison; nothing where it is finished, and go on where it began, if asked to resume."""
    torch.set_num_threads(threads)
    folder = Path("runs", cfg.name)
    rows = read_rows(folder / "metrics.jsonl") if resume else []
    if not (rows and rows[-1]["step"] == sum(parse_stage(stage).steps for stage in cfg.stages)):
        train(cfg, resume and folder.exists())


def load_for_use(path: str, overrides: dict) -> tuple[Config, LocalEngine]:
    """Config and engine of a run folder, of a checkpoint inside one, or of any Hugging Face model."""
    run = next((p for p in (Path(path), Path(path).parent) if (p / "checkpoint").exists()), None)
    cfg = replace(read_config(run), model=str(run / "checkpoint")) if run else replace(one_gpu(), model=path)
    cfg = replace(cfg, **overrides, lora=0, gradient_checkpointing=False)
    model, tokenizer = load_model(cfg)
    return cfg, LocalEngine(model, Chat(tokenizer, cfg), cfg)


def evaluate_command(path: str, overrides: dict) -> None:
    """Print pass@1 (avg@k) on the held-out problems with its interval, tools on, and by kind."""
    cfg, engine = load_for_use(path, overrides)
    problems = load_problems(cfg, held_out=True)
    print(f"{len(problems)} problems x {cfg.eval_samples} rollouts, temperature {cfg.temperature}, at most "
          f"{cfg.max_tokens} response tokens and {cfg.max_turns} turns, seed {cfg.seed}", flush=True)
    with sandbox_for(cfg) as sandbox:
        metrics = evaluate(collect(problems, engine, sandbox, cfg, samples=cfg.eval_samples, tag="eval"))
    mean, half = metrics.pop("eval/pass@1"), metrics.pop("eval/interval")
    print(f"pass@1 {mean:.3f} ± {half:.3f} (95 %, over problems)")
    for key, value in metrics.items():
        print(f"  {key.removeprefix('eval/'):32} {value:.3f}")


def chat_command(path: str, overrides: dict) -> None:
    """Read problems, a line each; show what the model writes, runs, sees and answers."""
    cfg, engine = load_for_use(path, overrides)
    color, end = {}, ""
    if sys.stdout.isatty():
        color, end = {"model": "\033[36m", "tool": "\033[33m", "answer": "\033[32m"}, "\033[0m"

    def show(who: str, text: str) -> None:
        print(color.get(who, "") + text + end, flush=True)

    with sandbox_for(cfg) as sandbox:
        print("Type a problem, or nothing to leave.", flush=True)
        while prompt := read_line():
            rollout = start(Problem("chat/0", prompt, ""), engine.chat, cfg, "chat")
            solve(rollout, engine, sandbox, show)
            sandbox.close(rollout.id)


def read_line() -> str:
    try:
        return input("problem> ").strip()
    except EOFError:
        return ""


def solve(rollout: Rollout, engine: LocalEngine, sandbox: Sandbox, show: Callable[[str, str], None]) -> None:
    """Drive one rollout to its end, showing every turn."""
    while rollout.stop_reason is None:
        completion, = engine.generate([next_request(rollout, engine.chat)])
        calls = append_completion(rollout, completion, engine.chat)
        show("model", "<reason>" + rollout.turns[-1].replace("\\n", "\n    "))
        if rollout.awaits_tools:
            before = len(rollout.tokens)
            append_tool_results(rollout, sandbox.run([call.request for call in calls]), engine.chat)
            show("tool", "\n".join(re.findall(r"<tool_response>\n(.*?)\n</tool_response>",
                                              engine.chat.decode(rollout.tokens[before:]), re.DOTALL)))
    cut = "" if rollout.stop_reason == "answer" else f" (cut: {rollout.stop_reason})"
    show("answer", f"answer: {final_answer(rollout)}{cut}")


def parse_args(argv: Sequence[str]) -> tuple[str, str | None, bool, dict]:
    """(command, target, resume, the fields that were set) of a command line; --help explains every field."""
    source = Path(SOURCE).read_text()
    helps = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source[source.index("class Config"):], re.MULTILINE))
    parser = argparse.ArgumentParser(
        prog="minirstar.py", description=METHOD.split("\n\n")[0], allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        usage="minirstar.py [train | compare | eval TARGET | chat TARGET] [--resume] [--FIELD VALUE ...]")
    parser.add_argument("command", nargs="?", default="train", help="train (default), compare, eval or chat")
    parser.add_argument("target", nargs="?", default=None,
                        help="eval, chat: run folder, checkpoint or Hugging Face model")
    parser.add_argument("--resume", action="store_true", default=False,
                        help="go on with the run --name from its last checkpoint")
    for f in fields(Config):
        kind = {"type": type(f.default), "metavar": type(f.default).__name__.upper()}
        if get_origin(f.type) is Literal:
            kind["metavar"] = "|".join(get_args(f.type))
        elif isinstance(f.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        elif isinstance(f.default, tuple):
            kind = {"nargs": "*", "metavar": "STAGE"}
        names = dict.fromkeys((f"--{f.name.replace('_', '-')}", f"--{f.name}"))
        default = " ".join(f.default) if isinstance(f.default, tuple) else f.default
        parser.add_argument(*names, **kind, help=f"{helps[f.name]} [{default}]".replace("%", "%%"))
    options = list(parser._option_string_actions)
    for word in (w.partition("=")[0] for w in argv):
        if word.startswith("--") and word not in options:
            near = difflib.get_close_matches(word, options, 1)
            hint = f"did you mean {near[0]}?" if near else "see --help"
            parser.error(f"there is no field {word}: {hint}")
    given = vars(parser.parse_args(argv))
    if "stages" in given:
        given["stages"] = tuple(given["stages"])
    command, target = given.pop("command"), given.pop("target")
    if command not in COMMANDS:
        parser.error(f"there is no command {command!r}: choose one of {', '.join(COMMANDS)}")
    if (target is None) == (command in ("eval", "chat")):
        parser.error(f"{command} takes " + ("a run folder or model" if target is None else f"no {target!r}"))
    if given["resume"] and not given.get("name"):
        parser.error("--resume needs --name NAME, the run to go on with")
    return command, target, given.pop("resume"), given


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. A user's mistake, a full disk or a lost sandbox ends in one line, not in a traceback."""
    command, target, resume, given = parse_args(sys.argv[1:] if argv is None else argv)
    disable_progress_bar()  # transformers' own, one for every checkpoint
    try:
        if command in ("eval", "chat"):
            {"eval": evaluate_command, "chat": chat_command}[command](target, given)
        else:
            if resume:
                base = read_config(Path("runs", given["name"]))
            else:
                base = Config() if given.get("model", "toy") == "toy" else one_gpu()
            cfg = replace(base, **given)
            print(f"done: {({'train': train, 'compare': compare}[command])(cfg, resume)}")
    except (UserError, SandboxUnavailable, OSError) as error:
        sys.exit(f"minirstar: {error}")
    except KeyboardInterrupt:
        sys.exit("minirstar: stopped; what the last checkpoint holds is kept: repeat the command with "
                 "--name NAME --resume")
