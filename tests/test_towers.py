"""Text models of vision-language checkpoints: trained as transformers' whole model computes them
for text alone, and saved as the same checkpoint, whose other tensors stay as they are."""

import contextlib
import copy
import functools
import json
import math
import pathlib
import re
import shutil

import numpy as np
import pytest
import safetensors.torch
import tolerance
import torch
import transformers
from families import TOWERS, as_on_disk, delta_rule_in_fp64, named_constants, random_model
from penstock import FormatError, InvalidError, Lora, export, merge
from penstock.model import ModelConfig
from penstock.plan import Hardware, Plan
from penstock.train import Trainer
from test_parity import (
    LAYOUTS,
    N_SEQ,
    SEQ,
    gradients_of,
    make_plan,
    near,
    open_trainer,
    plain,
    run,
    transformers_loss,
)
from test_published import MISTRAL_FP8
from tolerance import check_gradients, loss_noise, note_spread, note_spread_of_delta_nets

NEW = "model.language_model."
TEXT = re.compile(
    r"(model\.language_model\.|language_model\.model\.|model\.(?=layers|embed_tokens|norm))"
)


def alone(name):
    """The text model's own name of a tensor; None: it is of another part."""
    bare = name.removeprefix("language_model.")
    if bare == "lm_head.weight":
        return bare
    return TEXT.sub("model.", name, count=1) if TEXT.match(name) else None


def text_of(named):
    return {alone(k): x for k, x in named.items() if alone(k)}


@functools.cache
def model_of(name):
    """The vision tower in fp16 but for a bf16 tensor: of other bytes than anything here writes."""
    model = random_model(TOWERS[name])
    others = [p for k, p in model.named_parameters() if not alone(k)]
    for i, p in enumerate(others):
        p.data = p.data.to(torch.bfloat16 if i == 1 else torch.float16)
    return model


@functools.cache
def gradients(name):
    model, spread = copy.deepcopy(model_of(name)).double(), {}
    hooks = note_spread(model, spread)
    with delta_rule_in_fp64(model) if "qwen3_5" in name else contextlib.nullcontext():
        loss = loss_of(model, *plain(0))
    loss.backward()
    for hook in hooks:
        hook.remove()
    named = {k: p.grad for k, p in model.named_parameters()}
    named |= {k: torch.zeros_like(p) for k, p in named_constants(model)}
    grads, spread = (as_on_disk(text_of(x), "") for x in (named, spread))
    note_spread_of_delta_nets(grads, spread)
    spread = {k: math.sqrt(v) for k, v in spread.items()}
    return loss.item(), grads, {k: g.norm().item() for k, g in grads.items()} | spread


def loss_of(model, tokens, targets):
    logits = model(torch.as_tensor(tokens).long(), use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.as_tensor(targets).long().flatten(), ignore_index=-1
    )


def loss_of_whole(where, step):
    """Of transformers' whole model, which must find all its tensors in the directory."""
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        where, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        return loss_of(model.eval(), *plain(step)).item()


def read_bytes(where):
    """{name: (dtype, shape, bytes)} of a directory's tensors."""
    return {
        name: (t.dtype, t.shape, t.contiguous().view(torch.uint8).numpy().tobytes())
        for path in sorted(where.glob("*.safetensors"))
        for name, t in safetensors.torch.load_file(path).items()
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    @functools.cache
    def make(name):
        where = tmp_path_factory.mktemp("towers") / name
        model_of(name).save_pretrained(where, max_shard_size="150KB")
        (where / "config.json").write_text(json.dumps(TOWERS[name]))
        (where / "preprocessor_config.json").write_text("{}")
        return where

    return make


def is_same_but_for_text(saved, given):
    a, b = read_bytes(saved), read_bytes(given)
    others = [n for n in b if not alone(n)]
    assert a.keys() == b.keys() and len(others) > 5
    assert all(a[n] == b[n] for n in others)
    assert (saved / "preprocessor_config.json").exists()
    return all((a[n] == b[n]) == n.endswith("layer_scalar") for n in b if alone(n))


@pytest.mark.parametrize("name", TOWERS)
def test_a_text_tower_is_trained_and_saved_as_the_same_checkpoint(directory, tmp_path, name):
    where, text = directory(name), TOWERS[name]["text_config"]
    a_layer = tolerance.A_LAYER
    a_layer += tolerance.POST_NORMS * (text["model_type"] in tolerance.FAMILIES_WITH_POST_NORMS)
    chunks = LAYOUTS["packed"][3]
    bound = math.sqrt(2) * tolerance.delta("fp32", text["num_hidden_layers"], chunks, 512, a_layer)
    with open_trainer(where, "packed", data=plain) as trainer:
        (first,) = run(trainer, 1)
        check_gradients(gradients_of(trainer), gradients(name), bound)
        assert abs(first.loss - gradients(name)[0]) < loss_noise(bound, first.valid_tokens)
        trainer.save(tmp_path / "saved", "fp32")
        (second,) = run(trainer, 1)
    assert is_same_but_for_text(tmp_path / "saved", where)
    assert json.loads((tmp_path / "saved/config.json").read_text()) == TOWERS[name]
    assert near(second.loss, loss_of_whole(tmp_path / "saved", 1))


def test_a_checkpoint_is_the_same_checkpoint_too(directory, tmp_path):
    where = directory("qwen3_vl")
    with open_trainer(where, "packed", data=plain) as trainer:
        run(trainer, 2)
        saved = pathlib.Path(trainer.checkpoint(tmp_path / "checkpoints"))
        third = run(trainer, 1)[0].loss
    plan = make_plan(where, "packed", document_end_token=-1)
    with Trainer.resume(saved, where, plan, plain) as trainer:
        assert run(trainer, 1)[0].loss == third
    for state in saved.glob("exp_avg*"):
        state.unlink()
    assert is_same_but_for_text(saved, where)


LAYOUT_PREFIXES = {  # of the text model, of its head
    "old": ("language_model.model.", "language_model.lm_head."),
    "new": (NEW, "lm_head."),
    "bare": ("model.", "lm_head."),
}


@pytest.mark.parametrize("layout", LAYOUT_PREFIXES)
def test_files_keep_the_names_that_they_had(directory, tmp_path, layout):
    given, saved, exported = (tmp_path / n for n in ("given", "saved", "exported"))
    shutil.copytree(directory("mistral3"), given)
    prefix, head = LAYOUT_PREFIXES[layout]
    tensors = {}
    for path in sorted(given.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(path)
        path.unlink()
    (given / "model.safetensors.index.json").unlink()
    names = {n: alone(n) or n for n in tensors}
    names = {n: a.replace("lm_head.", head) if "lm_head" in a else a for n, a in names.items()}
    names = {n: re.sub(r"^model\.", prefix, a) if alone(n) else a for n, a in names.items()}
    renamed = {names[n]: t for n, t in tensors.items()}
    safetensors.torch.save_file(renamed, given / "model.safetensors", {"format": "pt"})
    with open_trainer(given, "packed", data=plain) as trainer:
        (first,) = run(trainer, 1)
        trainer.save(saved, "bf16")
    assert abs(first.loss - gradients("mistral3")[0]) < 1e-5
    assert is_same_but_for_text(saved, given)
    text = {d for n, (d, _, _) in read_bytes(saved).items() if alone(n)}
    assert text == {torch.bfloat16}
    config = json.loads((saved / "config.json").read_text())
    assert config["torch_dtype"] == config["text_config"]["torch_dtype"] == "bfloat16"
    words = ("--model", str(saved), "--to", "hf", "--out", str(exported), "--quiet")
    assert export.main([*words]) == 0
    assert read_bytes(exported) == read_bytes(saved)


@pytest.mark.parametrize("name", TOWERS)
def test_the_text_model_alone_opens_in_transformers(directory, tmp_path, name):
    words = ("--model", str(directory(name)), "--to", "hf", "--out", str(tmp_path / "text"))
    assert export.main([*words, "--text-alone", "--quiet"]) == 0
    assert near(transformers_loss(tmp_path / "text", *plain(0)), gradients(name)[0])
    assert ModelConfig.read(tmp_path / "text").multimodal == 0


def in_fp8(given, where, matrix):
    """The checkpoint with what `matrix` matches in FP8, as Mistral publishes Ministral 3: a scale a
    tensor, and one of its inputs. Returns all weights, so rounded."""
    tensors = {}
    for path in given.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(path)
    rounded = dict(tensors)
    for name in [n for n in tensors if re.search(matrix, n)]:
        scale = tensors[name].float().abs().amax() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scale
        tensors[name.replace(".weight", ".activation_scale")] = torch.tensor(0.01)
        rounded[name] = tensors[name].float() * scale
    where.mkdir()
    safetensors.torch.save_file(tensors, where / "model.safetensors", {"format": "pt"})
    config = TOWERS["ministral3-vision"] | {"quantization_config": MISTRAL_FP8}
    (where / "config.json").write_text(json.dumps(config))
    return rounded


def test_a_text_tower_in_fp8_is_saved_without_scales(directory, tmp_path, capsys):
    given = directory("ministral3-vision")
    rounded = in_fp8(given, tmp_path / "m", r"language_model\..*_proj\.weight$")
    words = ("--to", "hf", "--dtype", "fp32", "--quiet")
    where = ["--model", str(tmp_path / "m"), "--out", str(tmp_path / "out")]
    assert export.main([*where, *words]) == 0
    saved = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert saved.keys() == rounded.keys()
    for name, x in rounded.items():
        assert torch.equal(saved[name], x) and saved[name].dtype == x.dtype, name
    assert json.loads((tmp_path / "out/config.json").read_text()) == TOWERS["ministral3-vision"]
    in_fp8(given, tmp_path / "other", r"multi_modal_projector\.linear_1\.weight$")
    where = ["--model", str(tmp_path / "other"), "--out", str(tmp_path / "no")]
    assert export.main([*where, *words]) == 2
    assert "linear_1.weight of another part than the text model is quantized" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "name, targets",
    [
        ("gemma3-vision", "q_proj,o_proj,down_proj"),
        ("qwen2_5_vl", "q_proj,o_proj,down_proj"),
        ("qwen3_5-vision", "q_proj,in_proj_qkv,in_proj_a,out_proj"),
    ],
)
def test_an_adapter_is_one_of_the_whole_model(directory, tmp_path, name, targets):
    """PEFT finds its modules in the whole model, and no others of the same names."""
    import peft

    where, lora = directory(name), Lora(3, 6, targets)
    hardware = Hardware.estimate(2, "cpu")
    plan = Plan(
        ModelConfig.read(where),
        seq_len=SEQ,
        tokens_per_step=SEQ * N_SEQ,
        recipe="fp32",
        lora=lora,
        hardware=hardware,
    )
    generator = np.random.default_rng(3)
    with open_trainer(where, plan=plan, data=plain) as trainer:
        for param in (p for p in trainer.params.values() if "lora_" in p.name):
            values = generator.standard_normal(param.shape).astype(np.float32) / 8
            trainer.write(param.name, values)
        trainer.save(tmp_path / "adapter", "fp32")
        (first,) = run(trainer, 1)
    base = transformers.AutoModelForImageTextToText.from_pretrained(where, dtype=torch.float32)
    loss_without_adapter = gradients(name)[0]
    with torch.no_grad():
        whole = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        adapters = {n for n, _ in whole.named_parameters() if "lora_" in n}
        file = safetensors.torch.load_file(tmp_path / "adapter/adapter_model.safetensors")
        assert {n.replace(".default", "") for n in adapters} == file.keys()
        assert all(n.startswith(f"base_model.model.{NEW}layers.") for n in file)
        assert near(first.loss, loss_of(whole, *plain(0)).item())
        assert not near(first.loss, loss_without_adapter)
    words = ("--model", where, "--adapter", tmp_path / "adapter", "--out", tmp_path / "merged")
    assert merge.main([*map(str, words), "--quiet"]) == 0
    assert not is_same_but_for_text(tmp_path / "merged", where)
    assert near(loss_of_whole(tmp_path / "merged", 0), first.loss)


def test_absent_keys_of_a_text_config_mean_what_transformers_takes(tmp_path):
    for name, cfg in TOWERS.items():
        sparse = {k: cfg[k] for k in ("model_type", "architectures")}
        sparse["text_config"] = {"model_type": cfg["text_config"]["model_type"]}
        (tmp_path / "config.json").write_text(json.dumps(sparse))
        c = ModelConfig.read(tmp_path / "config.json")
        want = transformers.AutoConfig.for_model(**copy.deepcopy(sparse))
        text = want.get_text_config()
        rope = text.rope_parameters.get("full_attention", text.rope_parameters)
        assert c.rope.theta == rope["rope_theta"], name
        assert c.tied_embeddings == want.tie_word_embeddings, name
        assert math.isclose(c.norm_eps, text.rms_norm_eps, rel_tol=1e-6), name
        ours = c.vocab_size, c.dim, c.ffn_dim, c.n_layers, c.n_heads, c.n_kv_heads, c.max_positions
        keys = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
        keys += " num_key_value_heads max_position_embeddings"
        assert ours == tuple(getattr(text, k) for k in keys.split()), name


def test_older_files_have_the_text_models_fields_beside_the_towers(tmp_path):
    cfg = copy.deepcopy(TOWERS["qwen2_5_vl"])
    nested = tmp_path / "nested.json"
    nested.write_text(json.dumps(cfg))
    flat = {**cfg.pop("text_config"), **cfg, "tie_word_embeddings": True}
    (tmp_path / "flat.json").write_text(json.dumps(flat))
    a, b = ModelConfig.read(nested), ModelConfig.read(tmp_path / "flat.json")
    assert (a.tied_embeddings, b.tied_embeddings) == (0, 1)
    assert (a.dim, a.rope.theta, a.qkv_bias) == (b.dim, b.rope.theta, b.qkv_bias) == (64, 5000, 1)


REFUSED = [
    (dict(text_config=None), "text_config is missing: the text model's config is needed there"),
    (dict(text_config=dict(model_type="qwen3_5_text")), 'model_type is "qwen3_5_text": of model'),
    (dict(model_type="llama4", architectures=None), 'model_type is "llama4": of multimodal models'),
    (dict(quantization_config=dict(quant_method="awq")), "quant_method is awq"),
    (dict(audio_config={}), "audio_config is set"),
    (dict(model_type="qwen3_vl"), "must agree"),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_what_is_no_such_model_is_refused_by_its_field(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(TOWERS["gemma3-vision"] | changes))
    with pytest.raises(FormatError, match=re.escape(message)):
        ModelConfig.read(tmp_path / "config.json")


def test_fresh_weights_of_a_whole_model_are_refused(directory):
    with pytest.raises(InvalidError, match="of a multimodal model"):
        with open_trainer(directory("mistral3"), data=plain, init_weights=True):
            pass
