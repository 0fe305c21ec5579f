"""models/init_model.py: what it writes opens in transformers and in the library, is reproducible,
streams, and refuses in one sentence."""

import hashlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import io_native as ps
import numpy as np
import pytest
import safetensors
import torch
from conftest import HANGS_S

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SCRIPT = ps.ROOT / "models/init_model.py"
TINY = ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "demo"]


def init(*args, ok=True, **kw):
    run = subprocess.run(
        [sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, **kw
    )
    assert (run.returncode == 0) == ok, run.stderr
    return run


def config(name):
    return ps.ROOT / f"models/{name}.json"


def digest(folder):
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.iterdir())
        if p.is_file()
    }


def load(folder):
    out = {}
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as f:
            out.update({k: f.get_tensor(k) for k in f.keys()})
    return out


@pytest.mark.oldest
@pytest.mark.parametrize("name", TINY)
def test_the_directory_opens_in_transformers_without_missing_or_unexpected_keys(tmp_path, name):
    from transformers import AutoModelForCausalLM

    init(config(name), tmp_path / "m", "--max-shard-size", "1MB")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(
        info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    ), info
    assert model.dtype == torch.float32
    for k, t in load(tmp_path / "m").items():
        assert torch.equal(model.state_dict()[k], t), k
    loss = model(torch.arange(64)[None], labels=torch.arange(64)[None]).loss.item()
    # logits of a fresh model are near 0: the loss is that of a uniform guess, log V; the logits'
    # variance v (below 0.2, from std 0.02 at dim <= 320, rows of unit rms: v = dim * 0.02^2) adds
    # v/2 on average, its noise over 63 tokens sqrt(v/63)
    v = model.config.hidden_size * 0.02**2
    if not model.config.tie_word_embeddings:  # tied, a token's logit for itself is not near 0
        assert abs(loss - math.log(model.config.vocab_size) - v / 2) < 5 * math.sqrt(v / 63)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_library_finds_every_parameter_in_it(tmp_path, name, dtype):
    import ctypes

    init(config(name), tmp_path / "m", "--dtype", dtype)
    c = ps.read_config(tmp_path / "m")
    with ps.Tensors(tmp_path / "m") as f:
        infos = {n: (d, s) for n, d, s, _, _ in f.infos()}
    assert {d for d, _ in infos.values()} == {"BF16" if dtype == "bf16" else "F32"}
    m = ps.Model(c)
    n = ps.lib.ps_model_n_params(m)
    assert len(infos) == n
    for i in range(n):
        p = ps.ParamInfo()
        ps.check(ps.lib.ps_model_param(m, i, ctypes.byref(p)))
        assert infos[p.name.decode()][1] == tuple(p.shape[: p.n_dims])


def test_values_are_normal_with_scaled_residual_outputs_ones_and_zeros(tmp_path):
    init(config("tiny-qwen2"), tmp_path / "m")
    for k, t in load(tmp_path / "m").items():
        if "norm" in k:
            assert bool((t == 1).all()), k
        elif k.endswith("bias"):
            assert bool((t == 0).all()), k
        else:
            std = 0.02 / math.sqrt(2 * 4) if "o_proj" in k or "down_proj" in k else 0.02
            n = (
                t.numel()
            )  # sample mean and deviation: standard errors std/sqrt(n) and std/sqrt(2n), 5 of them
            assert abs(t.mean().item()) < 5 * std / math.sqrt(n), k
            assert abs(t.std().item() - std) < 5 * std / math.sqrt(2 * n), k
            assert t.unique().numel() > 0.95 * n, k


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    for folder, seed in (("a", 7), ("b", 7), ("c", 8)):
        init(config("tiny-llama"), tmp_path / folder, "--seed", seed)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    a, c = load(tmp_path / "a"), load(tmp_path / "c")
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    assert not torch.equal(a["lm_head.weight"], a["model.embed_tokens.weight"])


def test_values_depend_on_seed_and_name_only(tmp_path):
    init(config("tiny-llama"), tmp_path / "a", "--seed", 3)
    init(config("tiny-qwen3"), tmp_path / "b", "--seed", 3, "--max-shard-size", "100KB")
    init(config("tiny-llama"), tmp_path / "h", "--seed", 3, "--dtype", "bf16")
    a, b, h = load(tmp_path / "a"), load(tmp_path / "b"), load(tmp_path / "h")
    same = "model.layers.2.mlp.gate_proj.weight"
    assert torch.equal(a[same], b[same])
    assert all(torch.equal(a[k].bfloat16(), h[k]) for k in a)  # one rounding to nearest even


def test_memory_stays_far_below_the_models_size(tmp_path):
    cfg = dict(
        json.loads(config("8b").read_text()),
        num_hidden_layers=2,
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        head_dim=64,
    )
    (tmp_path / "c.json").write_text(json.dumps(cfg))
    code = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))  # as `python SCRIPT` does
try: runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as e: assert not e.code
print([l.split()[1] for l in open("/proc/self/status") if l.startswith("VmHWM")][0])
# VmHWM and not getrusage: ru_maxrss also counts the process before exec, which is pytest with torch
"""
    run = subprocess.run(
        [sys.executable, "-c", code, SCRIPT, tmp_path / "c.json", tmp_path / "m"],
        capture_output=True,
        text=True,
        check=True,
    )
    size = sum(p.stat().st_size for p in (tmp_path / "m").iterdir())
    peak = int(run.stdout.split()[-1]) * 1024
    assert size > 400e6 and peak < 200e6, (size, peak)


def tokenizer_json(path, size=300):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        ["def f(x): return x"] * 9,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<|end|>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tok.save(str(path))
    return path


@pytest.mark.oldest
def test_a_tokenizer_put_into_the_directory_opens_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    init(
        config("tiny-llama"),
        tmp_path / "m",
        "--tokenizer",
        tokenizer_json(tmp_path / "tokenizer.json"),
    )
    tok = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tok.decode(tok("def f(x)")["input_ids"]) == "def f(x)"
    assert (tok.eos_token, tok.eos_token_id, tok.model_max_length) == ("<|end|>", 0, 2048)


def refused(tmp_path, args, *parts):
    before = sorted(tmp_path.rglob("*"))
    run = init(*args, ok=False)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "Traceback" not in run.stderr, (
        run.stderr
    )
    for part in parts:
        assert str(part) in run.stderr, run.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "change, parts",
    [
        ({"hidden_size": ...}, ["hidden_size", "missing"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "4096"]),
        ({"num_attention_heads": "8"}, ["num_attention_heads", '"8"']),
        ({"num_key_value_heads": 3}, ["multiple", "3"]),
        ({"head_dim": 15}, ["head_dim", "15", "even"]),
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel"]),
        ({"model_type": "qwen2"}, ["model_type", "qwen2"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"initializer_range": -1}, ["initializer_range", "-1"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings"]),
        ({"vocab_size": 2**24, "hidden_size": 2**20, "head_dim": 16}, ["GB of disk"]),
    ],
)
def test_bad_configs_are_refused_in_one_sentence(tmp_path, change, parts):
    cfg = {
        k: v
        for k, v in dict(json.loads(config("tiny-llama").read_text()), **change).items()
        if v is not ...
    }
    (tmp_path / "c.json").write_text(json.dumps(cfg))
    refused(tmp_path, [tmp_path / "c.json", tmp_path / "m"], *parts)


def test_other_bad_input_is_refused_in_one_sentence(tmp_path):
    out = tmp_path / "m"
    refused(tmp_path, [tmp_path / "none.json", out], tmp_path / "none.json", "No such file")
    (tmp_path / "bad.json").write_text("{")
    refused(tmp_path, [tmp_path / "bad.json", out], tmp_path / "bad.json", "JSON")
    refused(tmp_path, [config("tiny-llama"), tmp_path / "bad.json"], "is a file")
    refused(tmp_path, [config("tiny-llama"), tmp_path / "bad.json" / "m"], "cannot be used")
    refused(
        tmp_path, [config("tiny-llama"), out, "--tokenizer", tmp_path / "none.json"], "none.json"
    )
    (tmp_path / "tok.json").write_text('{"model": {}}')
    refused(
        tmp_path, [config("tiny-llama"), out, "--tokenizer", tmp_path / "tok.json"], "model.vocab"
    )
    big = tokenizer_json(tmp_path / "tokenizer.json", 300)
    cfg = dict(json.loads(config("tiny-llama").read_text()), vocab_size=200)
    (tmp_path / "c.json").write_text(json.dumps(cfg))
    refused(tmp_path, [tmp_path / "c.json", out, "--tokenizer", big], "vocab_size", "200")


def test_a_directory_is_replaced_only_when_asked_and_only_a_model(tmp_path):
    out = tmp_path / "m"
    init(config("tiny-llama"), out)
    first = digest(out)
    refused(tmp_path, [config("tiny-llama"), out], "not empty", "--overwrite")
    init(config("tiny-llama"), out, "--overwrite", "--seed", 5, "--max-shard-size", "1MB")
    assert (
        digest(out) != first
        and not (out / "model.safetensors").exists()
        and [p.name for p in tmp_path.iterdir()] == ["m"]
    )
    (out / "README.md").write_text("mine")
    (out / "data").mkdir()
    (out / "data" / "x.bin").write_text("tokens")
    init(config("tiny-llama"), out, "--overwrite")
    assert (
        digest(out / "data")
        and (out / "README.md").read_text() == "mine"
        and (out / "model.safetensors").exists()
    )
    other = tmp_path / "photos"
    other.mkdir()
    (other / "x.jpg").write_text("")
    refused(tmp_path, [config("tiny-llama"), other, "--overwrite"], "no model directory")
    (tmp_path / "empty").mkdir()
    init(config("tiny-llama"), tmp_path / "empty")


def test_a_parent_is_made_and_named_and_not_where_the_model_is_refused(tmp_path):
    assert init(config("tiny-llama"), tmp_path / "m").stderr.count("its parent") == 0
    run = init(config("tiny-llama"), tmp_path / "a/b/m")
    assert (
        f"init_model: {tmp_path}/a/b/m: its parent {tmp_path}/a/b did not exist and is made\n"
        in run.stderr
    )
    (tmp_path / "c.json").write_text(
        json.dumps(dict(json.loads(config("32b").read_text()), num_hidden_layers=4096))
    )
    refused(tmp_path, [tmp_path / "c.json", tmp_path / "c/d/m"], "GB of disk")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(tmp_path, how):
    p = subprocess.Popen(
        [sys.executable, SCRIPT, config("1b"), tmp_path / "m"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + HANGS_S
    while time.monotonic() < end and not list(tmp_path.glob(".m.penstock-save-*/*.safetensors")):
        time.sleep(0.01)
    p.send_signal(how)
    _, err = p.communicate(timeout=HANGS_S)
    assert p.returncode == 130 and "interrupted" in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    import resource

    limit = lambda: resource.setrlimit(
        resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)
    )  # a write past 1 MiB fails
    run = init(config("demo"), tmp_path / "m", ok=False, preexec_fn=limit)
    assert run.returncode == 2 and "no file was left" in run.stderr and not list(tmp_path.iterdir())


def test_it_needs_numpy_only(tmp_path):
    text = pathlib.Path(SCRIPT).read_text()
    assert not [
        w for w in ("torch", "safetensors", "transformers", "penstock") if f"import {w}" in text
    ]
    assert np.__version__
