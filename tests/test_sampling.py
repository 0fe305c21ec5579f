"""Samples inside training: the texts are those of a generator of the same weights, training does
not see them, memory, the command's options and samples.jsonl."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import BUILD, words_of_training
from families import EXPERTS
from penstock import (
    BudgetError,
    Generator,
    Hardware,
    InvalidError,
    Lora,
    ModelConfig,
    NumericError,
    Plan,
    RunLog,
    StateError,
    Trainer,
)
from penstock.data import train_tokenizer
from penstock.runs import RunDirectory
from safetensors.numpy import save_file
from test_budget import LONG_ROUNDS, PACKED_ROUNDS, VOCAB, batch_of, hardware, model_dir  # noqa: F401

MIB = 1 << 20
STEPS, NEW = 2, 12
PROMPTS = [[5, 6, 7], [1], list(range(40, 57))]
HOW = dict(max_new_tokens=NEW, temperature=1.0, seed=[1, 2, 3])
CONTEXT = max(map(len, PROMPTS)) + NEW


def weights(trainer):
    return {name: trainer.read(name).tobytes() for name in trainer.params}


def trained(folder, plan, samples, save=None):
    """The texts after each step, and the weights after the last one."""
    texts = []
    every = {"sample_every": 1, "samples": {"prompts": PROMPTS} | HOW} if samples else {}
    with Trainer(folder, plan, batch_of(plan), lr=1e-2, seed=5) as t:
        first = t.sample(PROMPTS, **HOW) if samples else None  # before any step
        for m in t.steps(STEPS, **every):
            texts.append(m.samples)
        if save:
            t.save(*save)
        return [first, *texts], weights(t)


LORA = {"lora": Lora(4, 12)}
CASES = {
    "llama-master-clip": ("llama", "fp32-master", 1.0, PACKED_ROUNDS, {}),
    "llama-bf16": ("llama", "bf16", 0.0, PACKED_ROUNDS, {}),
    "qwen2-tied-master": ("qwen2-tied", "fp32-master", 0.0, LONG_ROUNDS, {}),
    "qwen3-tied-fp32-clip": ("qwen3-tied", "fp32", 1.0, LONG_ROUNDS, {}),
    "llama-frozen": ("llama", "bf16", 1.0, PACKED_ROUNDS, {"frozen_layers": 3}),
    "llama-lora": ("llama", "fp32", 1.0, PACKED_ROUNDS, LORA),
    "qwen2-lora-master": ("qwen2-tied", "fp32-master", 1.0, PACKED_ROUNDS, LORA),
}


LONG = set(CASES) - {"llama-lora", "qwen3-tied-fp32-clip"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.long] if c in LONG else []) for c in CASES]
)
def test_texts_are_a_generators_under_every_cap_and_training_is_unchanged(
    case,
    model_dir,  # noqa: F811
    hardware,  # noqa: F811
    tmp_path,
):
    name, recipe, clip, cut, more = CASES[case]
    folder = model_dir(name)
    model = ModelConfig.read(folder)
    kw = {"recipe": recipe, "clip_norm": clip, "threads": 2, "hardware": hardware} | cut | more
    room = {"sample_sequences": 2, "sample_context": CONTEXT}
    least, _ = Plan.smallest(model, **kw)
    dtype = "bf16" if recipe != "fp32" else "fp32"
    want, streamed, n_refused = None, set(), 0
    # a longer context leaves less room for blocks
    contexts = [(None, CONTEXT), (least, CONTEXT), (least, 430), (least + 2 * MIB, 9000)]
    for cap, context in contexts:
        room["sample_context"] = context
        try:
            plan = Plan(model, device_mem=cap, **kw, **room)
        except BudgetError as refused:
            assert re.search(
                rf"with samples \S+ MiB of device memory are needed, \S+ MiB given: beside .* KV "
                rf"cache of 2 x {context} tokens",
                str(refused),
            )
            n_refused += 1
            continue
        without = Plan(model, device_mem=cap, **kw)
        assert plan.report["step_s"] == without.report["step_s"]
        assert not cap or plan.report["device_used_bytes"] <= cap
        streamed.add(plan.json()["sample_streamed_bytes"])
        got = trained(folder, plan, True, None if want else (tmp_path / "saved", dtype))
        assert got[1] == trained(folder, without, False)[1]
        want = want or got
        assert got == want
    assert {len(t) for texts in want[0] for t in texts} == {NEW}
    assert len({json.dumps(texts) for texts in want[0]}) == STEPS + 1  # weights changed
    assert n_refused and 0 in streamed and (len(streamed) > 1 or name == "qwen2-tied"), streamed

    saved = tmp_path / "saved"
    what = (folder, {"adapter": saved}) if more is LORA else (saved, {})
    with Generator(what[0], dtype=dtype, context=CONTEXT, batch=3, **what[1]) as generator:
        assert generator.run(PROMPTS, **HOW) == want[0][-1]


@pytest.mark.parametrize("frozen", [pytest.param(0, marks=pytest.mark.long), 2])
def test_texts_do_not_depend_on_where_experts_are(tmp_path, frozen):
    """On the device, where frozen ones stay; copied with their block; or on demand, which needs all
    of the host's memory pinned."""
    cfg = dict(EXPERTS["qwen3_moe"], num_hidden_layers=4, moe_intermediate_size=200)
    cfg["vocab_size"] = VOCAB
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    model, rng = ModelConfig.read(tmp_path), np.random.default_rng(0)
    drawn = {p.name: rng.standard_normal(p.shape, np.float32) / 8 for p in model.params()}
    save_file(drawn, tmp_path / "model.safetensors")
    kw = dict(seq_len=16, tokens_per_step=16, recipe="fp32")
    kw |= dict(threads=2, hardware=Hardware.estimate(2, "cpu"), router_aux_loss=0.0)
    kw |= dict(frozen_layers=frozen)
    least, runs, slots = Plan.smallest(model, **kw)[0], [], []
    pinned = {"pinned_mem": 20 * MIB}
    for add, more in ((0, {}), (2, {}), (6, {}), (6, pinned)):
        more |= {"device_mem": least + add * MIB, "sample_sequences": 2, "sample_context": CONTEXT}
        plan = Plan(model, **kw, **more)
        slots.append(plan.json()["sample_expert_slots"])
        runs.append(trained(tmp_path, plan, True))
    assert slots[0] == slots[3] == 0 and slots[1] != slots[2] and min(slots[1:3]) >= 6
    assert runs[0][1] == trained(tmp_path, Plan(model, **kw), False)[1]
    assert all(run == runs[0] for run in runs)


@pytest.fixture(scope="module")
def plan(model_dir, hardware):  # noqa: F811
    model = ModelConfig.read(model_dir("llama"))
    return Plan(model, **PACKED_ROUNDS, sample_sequences=2, sample_context=20, hardware=hardware)


def test_what_does_not_fit_or_is_wrong_ends_no_training(model_dir, plan, hardware):  # noqa: F811
    folder, model = model_dir("llama"), ModelConfig.read(model_dir("llama"))
    with Trainer(folder, plan, batch_of(plan)) as t:
        good = t.sample([[1, 2]], max_new_tokens=3)
        for prompts, options, says in (
            ([[1536]], {}, "token 1536 is not in the vocabulary"),
            ([[]], {}, "prompt 1 has no token"),
            ([[1]] * 3, {"max_new_tokens": 20}, "the context is 20"),
            ([[1]], {"top_p": 2.0}, "top_p is 2"),
        ):
            with pytest.raises(InvalidError, match=says):
                t.sample(prompts, **{"max_new_tokens": 3} | options)
        with pytest.raises(ZeroDivisionError):
            t.sample([[1]], max_new_tokens=9, on_token=lambda _prompt, _token: 1 // 0)
        with pytest.raises(ValueError, match="given together"):
            next(t.steps(2, sample_every=1))
        steps = t.steps(3)
        next(steps)
        with pytest.raises(StateError, match="in flight"):
            t.sample([[1]], max_new_tokens=3)
        list(steps)
        assert t.sample([[1, 2]], max_new_tokens=3) != good or t.steps_done == 3
        name = "model.norm.weight"
        kept = t.read(name)
        t.write(name, np.full_like(kept, np.nan))
        with pytest.raises(NumericError, match="logits of prompt 1 are not finite"):
            t.sample([[1, 2]], max_new_tokens=3)
        t.write(name, kept)
        list(t.steps(1))
        assert len(t.sample([[1, 2]], max_new_tokens=3)[0]) == 3
        t.cancel()
        with pytest.raises(Exception, match="cancel"):
            t.sample([[1, 2]], max_new_tokens=3)
    none = Plan(model, **PACKED_ROUNDS, hardware=hardware)
    with Trainer(folder, none, batch_of(none)) as t, pytest.raises(InvalidError, match="plan anew"):
        t.sample([[1]])
    with pytest.raises(InvalidError, match="sample_context is 0 with 1"):
        Plan(model, **PACKED_ROUNDS, sample_sequences=1, hardware=hardware)
    with pytest.raises(InvalidError, match="trains nothing"):
        Plan(
            model,
            **PACKED_ROUNDS,
            forward_only=True,
            sample_sequences=1,
            sample_context=9,
            hardware=hardware,
        )
    with pytest.raises(
        BudgetError, match="with samples .* of host memory .* for drawing 1000 texts"
    ):
        used = none.report["host_used_bytes"]
        Plan(
            model,
            **PACKED_ROUNDS,
            host_mem=used + 2 * MIB,
            sample_sequences=1000,
            sample_context=900,
            hardware=hardware,
        )


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_tokenizer(tiny_model, tmp_path_factory):
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("text") / "model")
    text = folder.parent / "text"
    text.write_text("the cat sat on the mat. " * 20)
    train_tokenizer([text], 300).save(str(folder / "tokenizer.json"))
    return folder


def train(model, data, *more, code=0, package=True):
    words = words_of_training(model, data, "--recipe", "fp32", "--steps", 5, *more)
    program = [sys.executable, "-m", "penstock"] if package else [BUILD / "bin/penstock"]
    run = subprocess.run([*program, *map(str, words)], capture_output=True, text=True)
    assert run.returncode == code, run.stderr
    return run


def rows(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_texts_of_the_command_come_every_n_steps_and_are_shown(
    with_tokenizer, tiny_shard, tmp_path
):
    prompts = ["the cat", 'a "hostile" <b>é\n prompt']
    words = ["--sample-every", 2, "--sample", "tokens=6,temperature=1"]
    words += ["--sample-prompt", prompts[0], f"--sample-prompt={prompts[1]}"]
    run = tmp_path / "run"
    train(with_tokenizer, tiny_shard, *words, "--run-dir", run, "--checkpoint-every", 2)
    got = rows(run)
    assert [(r["step"], r["prompt"]) for r in got] == [(s, p) for s in (2, 4, 5) for p in prompts]
    assert all(0 < len(r["tokens"]) <= 6 for r in got)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["samples"] == 6 and 0 < summary["sample_share"] < 1

    # as a generator of the checkpoint's weights, with the same seed
    options = dict(dtype="fp32", context=64)
    with Generator(run / "checkpoints/step-00000004", **options) as generator:
        eos = ModelConfig.read(with_tokenizer).eos_token_id
        how = dict(max_new_tokens=6, temperature=1.0, stop_tokens=[eos] if eos >= 0 else [])
        texts = generator.run([r["prompt_tokens"] for r in got[2:4]], **how)
    assert texts == [r["tokens"] for r in got[2:4]]

    # the resolved run is runnable by the program alone, and resumed runs keep the earlier texts
    toml = run / "run.toml"
    again = [sys.executable, "-m", "penstock", "train", "--config", toml, "--quiet"]
    done = subprocess.run([*again, "--run-dir", tmp_path / "again"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "again") == got
    done = subprocess.run([*again, "--resume", "latest"], capture_output=True, text=True)
    assert done.returncode == 0 and rows(run) == got, done.stderr

    shown = RunDirectory(run).samples()
    assert [(s["step"], s["prompt"]) for s in shown] == [(r["step"], r["prompt"]) for r in got]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(with_tokenizer / "tokenizer.json"))
    for row, sample in zip(got, shown, strict=True):
        assert tokenizer.encode(row["prompt"]).ids == row["prompt_tokens"]
        whole = tokenizer.decode(row["prompt_tokens"] + row["tokens"])
        assert whole.endswith(sample["text"]) and sample["text"]


def test_prompts_of_a_file_and_of_a_run_file(with_tokenizer, tiny_shard, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"the cat"\n{"prompt": "on the mat"}\n')
    words = ["--sample-every", 5, "--sample", "tokens=2"]
    words += ["--sample_prompts", file, "--base_model", with_tokenizer]  # names of other trainers
    train("nowhere", tiny_shard, *words, "--run-dir", tmp_path / "a")
    assert [r["prompt"] for r in rows(tmp_path / "a")] == ["the cat", "on the mat"]
    (tmp_path / "run.toml").write_text(
        f'[samples]\nsample-every = 5\nsample-tokens = 2\nsample-prompts = "{file}"\n'
    )
    words = ["--config", tmp_path / "run.toml", "--run-dir", tmp_path / "b"]
    train(with_tokenizer, tiny_shard, *words)
    assert rows(tmp_path / "b") == rows(tmp_path / "a")
    assert "sample-ids = [" in (tmp_path / "b/run.toml").read_text()


# of the program alone
BAD_IDS = {
    "--sample-every 2": "without a prompt",
    "--sample-ids 1,2": "without --sample-every N",
    "--sample-every 2 --sample-prompt a": "the Python package's penstock train",
    "--sample-every 2 --sample-ids 1,512": "token 512 is not in the voc",
    "--sample-every 2 --sample-ids a": "'a' is no token id",
    "--sample-every 2 --sample-ids ,": "has no token",
    "--sample-every 2 --sample-ids 1 --sample-prompt a b": "--sample-prompt has 2 texts, --sample-ids 1",
}  # fmt: skip
BAD_TEXTS = {
    "--sample-every 2 --sample-prompt=": "no token",
    "--sample-prompts /nothing --sample-every 2": "--sample-prompts /nothing: cannot be read",
    "--sample-prompt a --sample-prompts b": "give either --sample-prompt TEXT or --sample-prompts FILE",
    "--sample-prompt a --sample-every 1 --device-mem 1MiB": "device memory",
}  # fmt: skip


@pytest.mark.parametrize("words", [*BAD_IDS, *BAD_TEXTS])
def test_bad_options_are_refused(with_tokenizer, tiny_shard, tmp_path, words):
    given = [*words.split(), "--run-dir", tmp_path / "r"]
    run = train(with_tokenizer, tiny_shard, *given, code=2, package=words in BAD_TEXTS)
    assert (BAD_IDS | BAD_TEXTS)[words] in run.stderr and run.stderr.count("\n") == 1, run.stderr
    assert not (tmp_path / "r").exists()


def test_a_run_log_has_texts_and_keeps_those_before_a_resume(model_dir, plan, tmp_path):  # noqa: F811
    with Trainer(model_dir("llama"), plan, batch_of(plan)) as t, RunLog(tmp_path, t) as log:
        how = {"prompts": [[1, 2]], "max_new_tokens": 2}
        for m in t.steps(4, sample_every=2, samples=how):
            log.write(m, [("1 2", str(ids)) for ids in m.samples or ()])
    seen = RunDirectory(tmp_path).samples()
    assert [s["step"] for s in seen] == [2, 4] and seen[0]["prompt"] == "1 2"
    with Trainer(model_dir("llama"), plan, batch_of(plan), first_step=2) as t:
        RunLog(tmp_path, t).close()
    assert RunDirectory(tmp_path).samples() == seen[:1]
