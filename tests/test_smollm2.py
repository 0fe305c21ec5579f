"""Real weights: SmolLM2-135M-Instruct, imported from its GGUF file. The first long test fetches
93 MB, which stay in the build folder."""

import json
import subprocess

import peft
import pytest
import torch
from conftest import BUILD, ROOT
from penstock import compare, data, demo_chat, export, import_gguf, merge
from penstock.shards import read_shard
from safetensors.torch import load_file
from test_demo import demo
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.xdist_group("smollm2")
FILE = BUILD / "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ARRR = "Arr! Berlin be the capital of Germany, matey."


def run(command, *words):
    return command.main([str(w) for w in words])


def penstock(*words):
    done = subprocess.run(
        [BUILD / "bin/penstock", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def smollm2(request, tmp_path_factory):
    asked = "not long" not in request.config.getoption("markexpr")
    if not asked and not FILE.exists():
        pytest.skip(f"{FILE} is fetched by make test-long alone (93 MB)")
    try:
        file = demo_chat.fetch(FILE.parent)
    except demo_chat.DemoError as e:
        pytest.skip(str(e))
    folder = tmp_path_factory.mktemp("smollm2") / "m"
    assert run(import_gguf, file, "--out", folder, "--quiet") == 0
    return folder


@pytest.fixture(scope="module")
def docs(smollm2, tmp_path_factory):
    """Tokens of the project's own pages."""
    out = tmp_path_factory.mktemp("docs") / "data"
    words = [*sorted((ROOT / "docs").glob("*.md")), "--tokenizer", smollm2, "--out", out]
    assert run(data, *words) == 0
    return out


def tokens_of(docs, n):
    """The first n tokens, as a batch of one."""
    tokens = read_shard(next(docs.glob("train-*.bin")))[:n]
    return torch.from_numpy(tokens.astype("int64"))[None]


def loss_of(model, docs, recipe, sequences):
    """The loss of the first sequences of 256 tokens."""
    words = ["--seq-len", 256, "--tokens-per-step", 256, "--steps", sequences, "--recipe", recipe]
    return json.loads(penstock("eval", "--model", model, "--data", docs, *words, "--json"))["loss"]


def test_the_loss_of_a_page_is_that_of_transformers(smollm2, docs):
    ids = tokens_of(docs, 257)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0]
    want = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()
    # fp32 on both sides; a mean over 256 targets of some 3 each
    assert loss_of(smollm2, docs, "fp32", 1) == pytest.approx(want, rel=1e-5)


@pytest.mark.long
def test_fp8_has_nearly_the_loss_of_bf16(smollm2, docs):
    """Over 32 sequences of 256 tokens."""
    bf16, fp8 = (loss_of(smollm2, docs, recipe, 32) for recipe in ("bf16", "fp8"))
    assert 2 < bf16 < 4 and abs(fp8 / bf16 - 1) < 0.02, (bf16, fp8)


SHAPE = ["--seq-len", 128, "--tokens-per-step", 256]


@pytest.mark.long
def test_a_resumed_training_has_the_bits_of_one_that_was_not_stopped(smollm2, docs, tmp_path):
    words = ["--model", smollm2, "--data", docs, *SHAPE, "--recipe", "bf16", "--lr", "1e-4"]
    words += ["--warmup-steps", 0, "--checkpoint-every", 2]
    runs = {"whole": [4], "stopped": [2, 4]}
    for name, ends in runs.items():
        for n in ends:
            more = ["--run-dir", tmp_path / f"run-{name}", "--out", tmp_path / name, "--force"]
            penstock("train", *words, *more, "--steps", n, "--resume", "auto")
    whole, stopped, start = (
        load_file(d / "model.safetensors") for d in (*(tmp_path / n for n in runs), smollm2)
    )
    assert all(torch.equal(whole[k], stopped[k]) for k in whole)
    assert not all(torch.equal(whole[k], start[k].to(whole[k].dtype)) for k in whole)


@pytest.mark.long
def test_a_trained_adapter_opens_in_peft_and_merged_has_its_logits(smollm2, docs, tmp_path):
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    words = ["--data", docs, *SHAPE, "--steps", 4, "--lora-rank", 8, "--lr", "1e-3"]
    words += ["--warmup-steps", 0, "--run-dir", tmp_path / "run", "--out", adapter]
    penstock("train", "--model", smollm2, *words)
    words = ["--model", smollm2, "--adapter", adapter, "--out", merged, "--dtype", "fp32"]
    assert run(merge, *words, "--quiet") == 0
    ids = tokens_of(docs, 64)
    base, one = (
        AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32) for d in (smollm2, merged)
    )
    with torch.no_grad():
        plain = base(ids).logits
        want = peft.PeftModel.from_pretrained(base, adapter)(ids).logits
        found = one(ids).logits
    assert (want - plain).abs().max() > 0.1
    assert (found - want).norm() < 1e-5 * want.norm()


@pytest.mark.long
def test_loss_and_gradients_are_those_of_transformers(smollm2):
    assert run(compare, smollm2, "--hf") == 0


@pytest.mark.long
def test_the_greedy_answer_is_that_of_transformers(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    turns = [{"role": "user", "content": demo_chat.QUESTIONS[0]}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    words = ["--tokens", ",".join(map(str, ids)), "--max-new-tokens", 12, "--dtype", "fp32"]
    words += ["--quiet"]
    words = [BUILD / "bin/penstock", "generate", "--model", smollm2, *words]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = [int(i) for i in done.stdout.split()]
    assert tokenizer.decode(ours, skip_special_tokens=True) == "The capital of Germany is Berlin."
    assert [i for i in theirs.tolist() if i != tokenizer.eos_token_id] == [
        i for i in ours if i != tokenizer.eos_token_id
    ]


@pytest.mark.long
def test_an_exported_file_comes_back_to_the_bit(smollm2, tmp_path):
    file = tmp_path / "m.gguf"
    assert run(export, "--model", smollm2, "--to", "gguf", "--out", file, "--quiet") == 0
    assert run(import_gguf, file, "--out", tmp_path / "back", "--quiet") == 0
    first, back = (load_file(d / "model.safetensors") for d in (smollm2, tmp_path / "back"))
    assert first.keys() == back.keys() and all(torch.equal(first[k], back[k]) for k in first)
    contents = [
        json.loads((d / "tokenizer.json").read_text()) for d in (smollm2, tmp_path / "back")
    ]
    assert contents[0] == contents[1]


@pytest.mark.long
def test_the_chat_demo_makes_a_pirate(smollm2, tmp_path):
    out = tmp_path / "demo"
    (out / "download").mkdir(parents=True)
    (out / "download" / "SmolLM2-135M-Instruct.Q4_1.gguf").hardlink_to(
        BUILD / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    done = demo(tmp_path, module="demo_chat")
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = ((out / name).read_text() for name in ("before.txt", "after.txt"))
    assert "Arr!" not in before and ARRR in after and after.count("Arr!") >= 3
    assert all(line in done.stdout for line in after.splitlines())
    assert (out / "tuned.gguf").stat().st_size > 1e8 and "To chat with it: llama-cli" in done.stdout
