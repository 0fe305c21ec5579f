"""Real weights: SmolLM2-135M-Instruct, imported from its GGUF file. The first test fetches 93 MB, which
stay in the build folder."""

import json
import subprocess

import pytest
import torch
from conftest import BUILD
from penstock import compare, demo_chat, export, import_gguf
from safetensors.torch import load_file
from test_demo import demo
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("smollm2")]
ARRR = "Arr! Berlin be the capital of Germany, matey."


def run(command, *words):
    return command.main([str(w) for w in words])


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    try:
        file = demo_chat.fetch(BUILD / "smollm2")
    except demo_chat.DemoError as e:
        pytest.skip(str(e))
    folder = tmp_path_factory.mktemp("smollm2") / "m"
    assert run(import_gguf, file, "--out", folder, "--quiet") == 0
    return folder


def test_loss_and_gradients_are_those_of_transformers(smollm2):
    assert run(compare, smollm2, "--hf") == 0


def test_the_greedy_answer_is_that_of_transformers(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    turns = [{"role": "user", "content": demo_chat.QUESTIONS[0]}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
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
