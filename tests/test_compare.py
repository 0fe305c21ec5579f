"""`penstock compare DIR --hf`: what is the same passes, what is not is named."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import families
import numpy as np
import pytest
import torch
from conftest import ROOT, write_shard
from penstock import Hardware, ModelConfig, Plan, compare
from penstock.shards import IS_TARGET, write_mask
from safetensors.torch import load_file, save_file

CONFIGS = {
    "llama": families.llama(),
    "qwen2": families.qwen2(),
    "qwen3": families.qwen3(),
    **families.FAMILIES,
    "llama-yarn": families.VARIANTS["llama-yarn"],
    "gemma3-linear": families.VARIANTS["gemma3-linear"],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    def make(name):
        where = tmp_path_factory.mktemp("compare") / name
        families.random_model(CONFIGS[name]).save_pretrained(where)
        (where / "config.json").write_text(json.dumps(CONFIGS[name]))
        return where

    return make


@pytest.fixture(scope="module")
def llama(directory):
    return directory("llama")


def run(capsys, *words):
    """(exit code, JSON object)"""
    code = compare.main([*map(str, words), "--seq-len", "40", "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", CONFIGS)
def test_families_are_the_same(directory, capsys, name):
    code, result = run(capsys, directory(name), "--hf", "--sequences", 3)
    assert code == 0 and result["ok"] and result["difference"] is None
    assert all(t["same_weights"] and t["ok"] for t in result["tensors"])
    assert [x["what"] for x in result["losses"][1:]] == [f"sequence {i}" for i in range(3)]
    # A bound that is far from what is found would see nothing.
    worst = max(t["relative_error"] for t in result["tensors"])
    assert 0.01 < worst / result["tolerance"]["value"] < 1
    logits = result["logits"]
    assert logits["n_tokens"] == logits["same_likeliest"] == 120
    assert all(x["ok"] for x in logits["figures"])
    assert 0.05 < logits["figures"][0]["found"] / logits["figures"][0]["tolerance"] < 0.5


@pytest.mark.parametrize("recipe", ["bf16", "fp32-master"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bf16_recipes(directory, capsys, name, recipe):
    code, result = run(capsys, directory(name), "--hf", "--recipe", recipe)
    assert code == 0
    worst = max(t["relative_error"] for t in result["tensors"])
    assert 0.1 < worst / result["tolerance"]["value"] < 1
    assert all(0.1 < x["found"] / x["tolerance"] < 0.9 for x in result["logits"]["figures"])


def test_under_the_least_device_memory_it_is_the_same(llama, capsys):
    options = dict(seq_len=40, tokens_per_step=80, recipe="fp32", clip_norm=0)
    hardware = Hardware.estimate(backend="cpu")
    least, _ = Plan.smallest(ModelConfig.read(llama), hardware=hardware, **options)
    roomy, tight = (run(capsys, llama, "--hf", *more) for more in ((), ("--device-mem", least)))
    assert roomy[0] == tight[0] == 0
    with pytest.raises(SystemExit):  # the cap counts
        sys.exit(compare.main([str(llama), "--hf", "--device-mem", "1MiB"]))
    assert "device" in capsys.readouterr().err


def test_tokens_of_shards_with_their_masks(llama, tmp_path, capsys):
    tokens = np.random.default_rng(1).integers(0, 512, 200)
    shard = write_shard(tmp_path / "a.bin", tokens)
    write_mask(shard, np.where(np.arange(200) % 3 == 0, IS_TARGET, 0))
    code, masked = run(capsys, llama, "--hf", "--data", tmp_path)
    _, other = run(capsys, llama, "--hf", "--seed", 1)
    assert code == 0 and masked["losses"][0]["penstock"] != other["losses"][0]["penstock"]


@pytest.fixture
def copy(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_one_altered_weight_is_named(llama, copy, capsys, name):
    weights = load_file(copy / "model.safetensors")
    weights[name].flatten()[7] += 1e-6
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    code, result = run(capsys, llama, "--hf", copy)
    assert code == 1 and result["difference"] == f"the weights of {name} are not the same"
    assert [t["name"] for t in result["tensors"] if not t["same_weights"]] == [name]
    assert compare.main([str(llama), "--hf", str(copy)]) == 1
    out = capsys.readouterr().out
    assert "differ" in next(line for line in out.splitlines() if line.startswith(name + " "))


@pytest.mark.parametrize(
    "change", [{"rope_theta": 5100.0}, {"rms_norm_eps": 1.1e-3}], ids=["rope", "eps"]
)
def test_another_computation_with_the_same_weights_is_seen(llama, copy, capsys, change):
    (copy / "config.json").write_text(json.dumps(CONFIGS["llama"] | change))
    code, result = run(capsys, llama, "--hf", copy)
    assert code == 1 and all(t["same_weights"] for t in result["tensors"])
    assert result["difference"].startswith("the logits differ: relative error ")


def test_another_pad_token_is_no_difference(llama, copy, capsys):
    tokens, _ = compare.random_batch(512, 2, 40, 0)
    pad = {"pad_token_id": int(tokens[0, 7])}
    (copy / "config.json").write_text(json.dumps(CONFIGS["llama"] | pad))
    for words in ([copy, "--hf"], [llama, "--hf", copy]):
        code, result = run(capsys, *words)
        assert code == 0, result["difference"]


def test_what_differs_is_named(llama):
    """Weights before logits, logits before gradients, gradients before losses."""
    batch = compare.random_batch(512, 1, 20, 0)
    result = compare.compare(llama, llama, *batch)
    assert compare._verdict(result) is None
    result.losses[1].penstock += 1
    assert compare._verdict(result).startswith("the loss of sequence 0 is")
    result.tensors[4] = dataclasses.replace(result.tensors[4], relative_error=2.0, ok=False)
    assert f"gradient of {result.tensors[4].name} is wrong by 2" in compare._verdict(result)
    result.logits.figures[2].found = 1.0
    assert compare._verdict(result).startswith("the logits differ: KL divergence, mean 1.00e+00")
    result.tensors[1].same_weights = False
    assert result.tensors[1].name in compare._verdict(result)


def test_errors_of_logits():
    """Against formulas of all tokens together, of torch."""
    found, wanted = torch.randn((2, 7, 33), generator=torch.Generator().manual_seed(1))
    errors = compare.LogitErrors(wanted.numpy())
    for token in reversed(range(7)):
        errors(0, token, found[token].numpy())
    result = errors.result(0.1)
    size = wanted.square().mean(1).sqrt()
    kl = torch.nn.functional.kl_div(
        found.log_softmax(1), wanted.log_softmax(1), log_target=True, reduction="batchmean"
    )
    assert [x.found for x in result.figures] == pytest.approx(
        [
            ((found - wanted).norm() / wanted.norm()).item(),
            ((found - wanted).abs().amax(1) / size).max().item(),
            kl.item(),
        ],
        rel=1e-5,
    )
    assert result.same_likeliest == (found.argmax(1) == wanted.argmax(1)).sum()
    assert not any(x.ok for x in result.figures)
    missing = compare.LogitErrors(wanted.numpy())
    missing(0, 0, wanted[0].numpy())
    assert not missing.result(1e9).ok  # tokens that never came


@pytest.mark.parametrize("error", [1.0, float("nan"), float("inf")])
def test_a_gradient_that_is_wrong_differs_wherever_it_stands(error):
    """Also one that is NaN, which is neither larger nor smaller than another."""
    tensors = [compare.Tensor(name, True, 0.0, 0.01, True) for name in "abc"]
    loss = compare.Loss("all sequences", 1.0, 1.0, 0.1)

    def verdict(tensors):
        tolerance = compare.Tolerance(0.5, "")
        logits = compare.Logits(1, 0.0, 1, [])
        return compare._verdict(compare.Comparison(logits, [loss], tensors, tolerance, tolerance))

    for at in range(3):
        wrong = compare.Tensor("w", True, error, error, False)
        mixed = [*tensors[:at], wrong, *tensors[at:]]
        assert verdict(mixed).startswith("the gradient of w is wrong by")
    assert verdict(tensors) is None


def test_a_model_with_nan_is_no_traceback(llama, copy, capsys):
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert compare.main([str(copy), "--hf", "--seq-len", "40"]) == 1
    error = capsys.readouterr().err
    assert "not finite" in error and error.count("\n") == 1
    result = compare._fields(compare.Tensor("w", True, 1.0, float("inf"), False))
    assert result["relative_error"] is None and result["max_error"] == 1.0  # JSON has neither


def test_tensors_that_one_side_lacks(llama, copy, capsys):
    cfg = CONFIGS["llama"] | {"tie_word_embeddings": True}
    (copy / "config.json").write_text(json.dumps(cfg))
    weights = load_file(copy / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert compare.main([str(llama), "--hf", str(copy)]) == 2
    assert "misses the tensor lm_head.weight" in capsys.readouterr().err


REFUSED = {
    "no directory": ("nowhere --hf", "nowhere: there is no such directory"),
    "no model": (". --hf", "config.json"),
    "no --hf": ("M", "--hf"),
    "other": ("M --hf nowhere", "--hf nowhere: there is no such directory"),
    "unreadable": ("M --hf .", "transformers cannot open it"),
    "--recipe": ("M --hf --recipe fp8", "invalid choice: 'fp8'"),
    "--seq-len": ("M --hf --seq-len 0", "--seq-len: '0' is given, and a whole number from 1"),
    "--seq-len words": ("M --hf --seq-len many", "--seq-len: 'many' is given"),
    "--sequences": ("M --hf --sequences -1", "--sequences: '-1' is given"),
    "--seed": ("M --hf --seed -1", "--seed: '-1' is given, and a whole number from 0"),
    "--device-mem": ("M --hf --device-mem much", "device_mem='much' is not a size"),
    "--host-mem": ("M --hf --host-mem 3MiB", "host"),
    "--data": ("M --hf --data nowhere", "nowhere"),
    "option": ("M --hf --steps 3", "unrecognized arguments"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_options_are_refused(llama, tmp_path, monkeypatch, capsys, case):
    words, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    try:
        code = compare.main([str(llama) if w == "M" else w for w in words.split()])
    except SystemExit as e:
        code = e.code
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and message in error


def test_too_little_data_is_refused(llama, tiny_shard, capsys):
    words = ["--data", tiny_shard, "--sequences", "1000"]
    assert compare.main([str(llama), "--hf", *map(str, words)]) == 2
    assert "lower --sequences or --seq-len" in capsys.readouterr().err


def test_without_transformers_the_command_for_it_is_named(llama, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert compare.main([str(llama), "--hf"]) == 2
    assert "pip install torch transformers" in capsys.readouterr().err


def test_the_command_prints_a_table(llama):
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "compare", llama, "--hf"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.endswith("the same within tolerance\n")
    assert "u sqrt(18 * 3 layers" in done.stdout and "u sqrt(8 * 3 layers" in done.stdout
    assert "same likeliest token                   128 of 128" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_the_tolerance_of_a_gpu_counts_its_fused_attention(llama):
    model, tolerances = ModelConfig.read(llama), []
    for hardware in (
        Hardware.estimate(backend="cpu"),
        Hardware.read(ROOT / "docs/hardware-h200.json"),
    ):
        plan = Plan(model, seq_len=40, recipe="bf16", hardware=hardware)
        tolerances.append(
            (
                compare.derive_tolerance(model, plan, "bf16", 40),
                compare.derive_logit_tolerance(model, plan, "bf16"),
            )
        )
    for cpu, gpu in zip(*tolerances, strict=True):
        assert gpu.value > cpu.value, (cpu, gpu)
