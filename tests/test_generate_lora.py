"""Generation with a LoRA adapter beside the weights: greedy tokens of PEFT and of the merged model,
whatever the cap and the batch, and what is refused."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import BUILD, ROOT
from families import ALL
from penstock import Generator, InvalidError, Lora, ModelConfig, Plan, Trainer, merge
from penstock.generate import main
from test_families import model_of
from test_lora import LORA, OF_EXPERTS, adapters, peft_model

NEW = 20
PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (5, 1, 17, 30)]
SOME = Lora(8, 24, "q_proj,down_proj", rslora=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """make(name, lora): a model, its adapter as PEFT saves it, and PEFT's model."""
    made = {}

    def make(name, lora=LORA):
        if (name, lora) not in made:
            where = tmp_path_factory.mktemp(name)
            model_of(name).float().save_pretrained(where / "model")
            (where / "model" / "config.json").write_text(json.dumps(ALL[name]))
            values = adapters(name, lora)
            if lora.targets != "all-linear":
                values = {k: v for k, v in values.items() if k.split(".")[-3] in lora.targets}
            peft = peft_model(name, values, lora).float().eval()
            peft.save_pretrained(where / "adapter")
            made[name, lora] = where / "model", where / "adapter", peft
        return made[name, lora]

    return make


def tokens(model, adapter=None, prompts=PROMPTS, new=NEW, **options):
    given = {"batch": 3, "context": 64, "dtype": "fp32"} | options
    with Generator(model, adapter=adapter, **given) as generator:
        return generator.run(prompts, max_new_tokens=new)


def of_peft(model):
    out = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(NEW):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        out.append(ids[len(prompt) :])
    return out


@pytest.mark.parametrize(
    "name, lora",
    [
        ("llama", SOME),
        *((name, LORA) for name in ("qwen2", "phi3-window", "gemma2", "granite", "qwen3_5")),
        ("qwen3_next", OF_EXPERTS["qwen3_next"]),
    ],
)
def test_greedy_tokens_are_those_of_peft_and_of_the_merged_model(saved, tmp_path, name, lora):
    model, adapter, peft = saved(name, lora)
    found = tokens(model, adapter)
    assert found == of_peft(peft) and found != tokens(model)
    words = ["--model", model, "--adapter", adapter, "--out", tmp_path / "merged"]
    assert merge.main([*map(str, words), "--quiet"]) == 0
    assert found == tokens(tmp_path / "merged")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tokens_do_not_depend_on_the_batch(saved, dtype):
    model, adapter, _ = saved("qwen2")
    together = tokens(model, adapter, dtype=dtype, batch=4)
    for i, prompt in enumerate(PROMPTS):
        assert tokens(model, adapter, [prompt], dtype=dtype) == [together[i]]
    assert tokens(model, adapter, dtype=dtype, prefill_tokens=3, threads=1) == together


def test_adapters_of_streamed_blocks_come_with_them(tmp_path):
    """Blocks of 4 MiB, so that caps of the 2 MiB that memory is rounded to differ."""
    changes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    config = json.loads((ROOT / "models/tiny-llama.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = [sys.executable, ROOT / "models/init_model.py", tmp_path / "config.json"]
    subprocess.run([*program, tmp_path / "m", "--dtype", "fp32"], check=True, capture_output=True)
    plan = Plan(ModelConfig.read(tmp_path / "m"), seq_len=8, tokens_per_step=8, lora=Lora(8))
    batch = (np.arange(8, dtype=np.int32), np.arange(1, 9, dtype=np.int32))
    with Trainer(tmp_path / "m", plan, lambda _: batch, lr=0.05) as trainer:
        list(trainer.steps(5))
        trainer.save(tmp_path / "adapter")
    resident, seen = tokens(tmp_path / "m", tmp_path / "adapter", batch=4), set()
    assert resident != tokens(tmp_path / "m", batch=4)
    options = {"context": 64, "dtype": "fp32", "batch": 4}
    with Generator(tmp_path / "m", adapter=tmp_path / "adapter", **options) as generator:
        report = generator.report
    with Generator(tmp_path / "m", **options) as generator:
        block = generator.report["block_bytes"]
    of_block = [p for p in plan.params() if "layers.0." in p.name and "lora_" in p.name]
    assert report["block_bytes"] - block == 4 * sum(np.prod(p.shape) for p in of_block)
    for cap in range(report["least_device_bytes"], report["device_used_bytes"], 4 << 20):
        options["device_mem"] = cap
        with Generator(tmp_path / "m", adapter=tmp_path / "adapter", **options) as generator:
            assert generator.run(PROMPTS, max_new_tokens=NEW) == resident
            seen.add(generator.report["n_resident"])
    assert len(seen) > 1


def test_the_commands_take_an_adapter(saved):
    model, adapter, _ = saved("qwen2")
    ids = ",".join(map(str, PROMPTS[0]))
    words = [BUILD / "bin/penstock", "generate", "--model", model, "--adapter", adapter]
    words += ["--tokens", ids, "--max-new-tokens", str(NEW), "--dtype", "fp32", "--context", "64"]
    done = subprocess.run([*words, "--quiet"], capture_output=True, text=True, check=True)
    assert [int(t) for t in done.stdout.split()] == tokens(model, adapter, PROMPTS[:1])[0]
    plans = [
        json.loads(
            subprocess.run(
                [*w, "--plan", "--json"], capture_output=True, text=True, check=True
            ).stdout
        )
        for w in (words, [w for w in words if w not in ("--adapter", adapter)])
    ]
    assert plans[0]["weights_bytes"] > plans[1]["weights_bytes"]


def test_an_adapter_of_another_model_is_refused(saved, tmp_path):
    model, adapter, _ = saved("qwen2")
    _, other, _ = saved("gemma2")
    with pytest.raises(InvalidError, match="is of another model"):
        tokens(model, other)
    for changes, message in (
        ({"r": 5}, "of another model or rank"),
        ({"use_dora": True}, "use_dora is set"),
        (None, "adapter_config.json"),
    ):
        copy = tmp_path / str(len(message))
        copy.mkdir()
        if changes is not None:
            for file in adapter.iterdir():
                (copy / file.name).write_bytes(file.read_bytes())
            config = json.loads((adapter / "adapter_config.json").read_text()) | changes
            (copy / "adapter_config.json").write_text(json.dumps(config))
        words = ["generate", "--model", model, "--adapter", copy, "--tokens", "1,2"]
        done = subprocess.run([BUILD / "bin/penstock", *words], capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr
        assert done.stderr.count("\n") == 1 and not done.stdout


class Numbers:
    """A tokenizer whose text is the ids."""

    def encode(self, text, add_special_tokens=True):
        return SimpleNamespace(ids=[int(word) for word in text.split()])

    def decode(self, ids, skip_special_tokens):
        return "".join(f" {i}" for i in ids)


def test_the_command_for_text_takes_an_adapter(saved, monkeypatch, capsys):
    model, adapter, _ = saved("qwen2")
    monkeypatch.setattr("penstock.generate.load_tokenizer", lambda _: Numbers())
    words = ["--model", model, "--prompt", "3 4 5", "--max-new-tokens", NEW, "--dtype", "fp32"]
    assert main([*map(str, words), "--adapter", str(adapter), "--quiet"]) == 0
    want = tokens(model, adapter, [[3, 4, 5]], context=3 + NEW)[0]
    eos = json.loads((model / "config.json").read_text())["eos_token_id"]
    want = want[: want.index(eos)] if eos in want else want
    assert [int(i) for i in capsys.readouterr().out.split()] == want
    assert main([*map(str, words), "--adapter", "nowhere"]) == 2
    assert "nowhere/adapter_config.json" in capsys.readouterr().err
