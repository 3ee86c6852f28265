"""Config, presets and the command line."""

import dataclasses
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import commands
import pytest

import minirstar
from minirstar import Config, Stage, UserError, one_gpu, parse_stage

FIELDS = dataclasses.fields(Config)
NUMBERS = [f for f in FIELDS if isinstance(f.default, (int, float)) and not isinstance(f.default, bool)]


def test_defaults_and_presets_are_valid():
    assert dataclasses.asdict(Config()) == dataclasses.asdict(dataclasses.replace(Config()))
    preset = one_gpu()
    assert preset.model != "toy" and "{tools}" in preset.system_prompt and "{problem}" in preset.user_prompt
    assert [parse_stage(s).unsolved for s in preset.stages] == [False, False, True]


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lr = 1.0


@pytest.mark.parametrize("field", NUMBERS, ids=lambda f: f.name)
@pytest.mark.parametrize("value", [-1, float("nan"), -1e-9], ids=str)
def test_number_out_of_range_is_named_with_its_range(field, value):
    with pytest.raises(UserError, match=rf"{field.name} is .*must be at least"):
        Config(**{field.name: value})


@pytest.mark.parametrize("field", [f for f in NUMBERS if f.name.startswith("demo_")], ids=lambda f: f.name)
def test_probability_above_one_is_refused(field):
    with pytest.raises(UserError, match=f"{field.name} is 1.5.*at most 1"):
        Config(**{field.name: 1.5})


@pytest.mark.parametrize(
    "name",
    [
        "problems_per_step",
        "oversample",
        "max_tokens",
        "max_turns",
        "max_turn_tokens",
        "mini_batches",
        "temperature",
        "micro_batch_tokens",
        "generate_rows",
        "sandbox_workers",
        "eval_samples",
        "save_every",
        "seeds",
        "jobs",
        "tool_timeout",
        "tool_memory_mb",
        "tool_output_chars",
        "sft_batch",
    ],
)
def test_zero_is_refused_where_there_must_be_one(name):
    with pytest.raises(UserError, match=name):
        Config(**{name: 0})


def test_group_of_one_has_no_advantage():
    with pytest.raises(UserError, match="group_size is 1: must be at least 2"):
        Config(group_size=1)


@pytest.mark.parametrize("field", [f for f in FIELDS if get_origin(f.type) is Literal], ids=lambda f: f.name)
def test_unknown_choice_is_named_with_the_choices(field):
    with pytest.raises(UserError, match=f"{field.name} is 'nonsense'.*{', '.join(get_args(field.type))}"):
        Config(**{field.name: "nonsense"})


@pytest.mark.parametrize("algo", ["roc", "uniform"])
def test_choosing_needs_more_than_one_is_kept(algo):
    with pytest.raises(UserError, match="oversample is 1"):
        Config(algo=algo, oversample=1)


def test_number_of_rollouts():
    assert Config(algo="grpo", oversample=1, group_size=6).rollouts_per_problem == 6
    assert Config(algo="grpo", oversample=3, group_size=6).rollouts_per_problem == 6
    assert Config(algo="roc", oversample=3, group_size=6).rollouts_per_problem == 18


def test_demo_noise_is_what_demonstrations_read():
    assert set(Config().demo_noise) == {
        "guess",
        "wrong",
        "wrong_hard",
        "buggy",
        "buggy_retry",
        "wrong_after_error",
    }
    assert Config(demo_buggy=0.125).demo_noise["buggy"] == 0.125


def test_stages_are_read():
    assert parse_stage("24:128") == Stage(24, 128, False)
    assert parse_stage("6:160:unsolved") == Stage(6, 160, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "24",
        "24:",
        ":128",
        "0:128",
        "24:0",
        "-1:5",
        "24:128:",
        "24:128:solved",
        "a:b",
        "24:128:unsolved ",
        " 24:128",
        "1.5:128",
        "24:128:unsolved:unsolved",
        "\u0662:128",
    ],
)
def test_malformed_stage_is_refused_with_the_form(text):
    with pytest.raises(UserError, match="stages has .*STEPS:RESPONSE_TOKENS"):
        parse_stage(text)
    with pytest.raises(UserError, match="stages"):
        Config(stages=("2:48", text))


def test_every_field_has_a_comment():
    source = Path(minirstar.__file__).read_text()
    body = source[source.index("class Config") :]
    for f in FIELDS:
        assert re.search(rf"^    {f.name}: [^\n#]*  # \S", body, re.MULTILINE), f.name


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit, match="0"):
        commands.parse_args(["--help"])
    shown = capsys.readouterr().out
    for f in FIELDS:
        assert f"--{f.name}" in shown, f.name
    assert "truncated importance sampling" in " ".join(shown.split())


def test_command_line_sets_fields_of_their_type():
    given = commands.parse_args(
        [
            "train",
            "--lr",
            "1e-3",
            "--group-size",
            "4",
            "--stages",
            "2:48",
            "1:60:unsolved",
            "--mask_truncated",
            "--no-tool-seconds-shown",
            "--algo",
            "grpo",
            "--resume",
            "--name",
            "r",
        ]
    )
    assert given == (
        "train",
        None,
        True,
        {
            "lr": 1e-3,
            "group_size": 4,
            "stages": ("2:48", "1:60:unsolved"),
            "mask_truncated": True,
            "tool_seconds_shown": False,
            "algo": "grpo",
            "name": "r",
        },
    )
    Config(**given[3])


def test_train_is_the_default_command():
    assert commands.parse_args([]) == ("train", None, False, {})
    assert commands.parse_args(["eval", "runs/x"])[:2] == ("eval", "runs/x")


@pytest.mark.parametrize(
    "argv", [["--no-such-field", "1"], ["fly"], ["eval"], ["train", "runs/x"], ["--lr", "fast"], ["--resume"]]
)
def test_bad_command_line_is_refused(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        commands.parse_args(argv)
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, named",
    [
        (["--group_size", "1"], "group_size"),
        (["--algo", "ppo"], "algo"),
        (["--stages", "x"], "stages"),
        (["--device", "abacus"], "abacus"),
        (["--demo_guess", "2"], "demo_guess"),
    ],
)
def test_bad_value_ends_in_one_line_that_names_it(argv, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        commands.main(argv)
    message = str(stopped.value)
    assert message.startswith("minirstar: ") and named in message and len(message.splitlines()) == 1
    assert not any(tmp_path.glob("runs/*")), "a run that cannot start leaves no folder"
