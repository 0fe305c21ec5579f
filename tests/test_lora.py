"""LoRA against PEFT: loss and every gradient in fp32 on every kind of block, a training, adapters
saved and read, and what is refused. The oracle is PEFT over transformers' model in fp64, as in
test_families.py.

An adapter adds two products to a projection, and their gradients: four roundings for each of the
seven, to the 18 of a layer (tolerance.py)."""

import contextlib
import copy
import functools
import json
import math
import pathlib
import re
import subprocess

import numpy as np
import peft
import pytest
import tolerance
import torch
import transformers
from conftest import BUILD, ROOT, words_of_training
from families import ALL, DELTA, delta_rule_in_fp64, llama, qwen2, qwen3
from penstock import (
    Checkpoint,
    FormatError,
    Generator,
    Hardware,
    InvalidError,
    Lora,
    ModelConfig,
    Plan,
    StateError,
    Trainer,
    merge,
)
from penstock.plan import parse_bytes
from safetensors.torch import load_file, save_file
from test_families import directory, model_of  # noqa: F401
from test_parity import CLIP, EPS, LAYOUTS, N_SEQ, SEQ, lr_at, near, open_trainer, plain
from tolerance import UNIT, check_gradients, loss_noise

ALL |= {"llama": llama(), "qwen2": qwen2(), "qwen3": qwen3()}
ADAPTED = 4 * 7  # roundings a layer
LORA = Lora(4, 12)
STEPS = 10
MODELS = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "olmo2", "granite", "qwen3_5")
OF_EXPERTS = {  # with experts, which have no adapters, targets must be named
    name: Lora(8, 12, targets)
    for name, targets in [
        ("deepseek_v2", "q_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"),
        ("deepseek_v3", "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"),
        ("qwen3_next", "q_proj,k_proj,v_proj,o_proj,in_proj_qkvz,in_proj_ba,out_proj"),
    ]
}


def delta(name, recipe, layout):
    cfg = ALL[name]
    post_norms = cfg["model_type"] in tolerance.FAMILIES_WITH_POST_NORMS
    a_layer = tolerance.A_LAYER + tolerance.POST_NORMS * post_norms + ADAPTED
    exact = math.sqrt(2) if recipe == "fp32" else 1
    return exact * tolerance.delta(
        recipe, cfg["num_hidden_layers"], LAYOUTS[layout][3], 512, a_layer
    )


def make_plan(where, layout="packed", lora=LORA, recipe="fp32", **more):
    chunk, a_round, _, _ = LAYOUTS[layout]
    kw = dict(chunk_tokens=chunk, chunks_per_round=a_round, threads=2)
    kw |= dict(hardware=Hardware.estimate(2, "cpu"), recipe=recipe, lora=lora)
    return Plan(ModelConfig.read(where), seq_len=SEQ, tokens_per_step=SEQ * N_SEQ, **kw, **more)


@functools.cache
def adapters(name, lora=LORA):
    """{parameter: values} of an adapter that has been trained: B is not zero."""
    generator, out = np.random.default_rng(5), {}
    cfg = transformers.AutoConfig.for_model(**copy.deepcopy(ALL[name]))
    model = transformers.AutoModelForCausalLM.from_config(cfg)
    for key, p in model.named_parameters():
        if not re.search(r"_proj(_\w+)?\.weight", key) or (name in OF_EXPERTS and "mlp" in key):
            continue
        n_out, n_in = p.shape
        for part, shape in (("A", (lora.rank, n_in)), ("B", (n_out, lora.rank))):
            values = generator.standard_normal(shape) / math.sqrt(n_in if part == "A" else 40)
            out[key.replace("weight", f"lora_{part}.weight")] = values.astype(np.float32)
    return out


def write_adapters(trainer, values):
    found = [n for n in trainer.params if "lora_" in n]
    assert set(found) == set(values)
    for name in found:
        trainer.write(name, values[name])


def peft_model(name, values, lora=LORA):
    """PEFT over transformers' model in fp64, with the adapters' values."""
    modules = sorted({n.split(".")[-3] for n in values})
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * lora.rank,
        use_rslora=lora.rslora,
        target_modules=modules,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(copy.deepcopy(model_of(name)), config).double()
    with torch.no_grad():
        for key, p in trained(model).items():
            p.copy_(torch.from_numpy(values[key]))
    return model


def trained(model):
    """{our name: parameter} of what PEFT trains."""
    return {
        n.removeprefix("base_model.model.").replace(".default", ""): p
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def loss_of(model, tokens, targets):
    base, exact = model.get_base_model(), contextlib.nullcontext()
    if base.config.model_type in DELTA and base.dtype == torch.float64:
        exact = delta_rule_in_fp64(base)
    with exact:
        logits = model(torch.as_tensor(tokens).long(), use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.as_tensor(targets).long().flatten(), ignore_index=-1
    )


@functools.cache
def expected(name, lora=LORA):
    model, spread = peft_model(name, adapters(name, lora), lora), {}
    names = {id(p): key for key, p in trained(model).items()}

    def on_forward(module, inputs, out):
        x, key = inputs[0].detach(), names[id(module.weight)]
        squares = lambda g: (g.square().sum(-1) * x.square().sum(-1)).sum().item()  # noqa: E731
        out.register_hook(lambda g: spread.__setitem__(key, math.sqrt(squares(g))))

    for module in model.modules():
        if id(getattr(module, "weight", None)) in names:
            module.register_forward_hook(on_forward)
    loss = loss_of(model, *plain(0))
    loss.backward()
    return loss.item(), {key: p.grad for key, p in trained(model).items()}, spread


def gradients_of(trainer):
    found = {}
    for name in trainer.params:
        try:
            found[name] = trainer.grad(name)
        except StateError as refused:
            assert "frozen" in str(refused) and "lora_" not in name
    return found


# ---- loss and gradients --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, layout",
    [(name, "uneven-slices") for name in (*MODELS, *OF_EXPERTS, "gemma4-e2b")]
    + [("qwen3", "packed")],
)
def test_losses_and_gradients_are_those_of_peft(directory, name, layout):  # noqa: F811
    lora = OF_EXPERTS.get(name, LORA)
    bound, plan = delta(name, "fp32", layout), make_plan(directory(name), layout, lora)
    with open_trainer(directory(name), plan=plan, data=plain) as trainer:
        write_adapters(trainer, adapters(name, lora))
        (first,) = trainer.steps(1)
        check_gradients(gradients_of(trainer), expected(name, lora), bound)
    assert abs(first.loss - expected(name, lora)[0]) < loss_noise(bound, first.valid_tokens)


@pytest.mark.parametrize(
    "lora",
    [
        Lora(3, 5, "q_proj,v_proj"),
        Lora(8, 4, ("o_proj", "up_proj"), True),
        Lora(80, 40, "k_proj,gate_proj"),  # more than both sides of k_proj
    ],
)
def test_some_targets_and_rslora(directory, lora):  # noqa: F811
    values = {n: v for n, v in adapters("qwen3", lora).items() if n.split(".")[-3] in lora.targets}
    model = peft_model("qwen3", values, lora)
    loss_of(model, *plain(0)).backward()
    plan = make_plan(directory("qwen3"), lora=lora)
    with open_trainer(directory("qwen3"), plan=plan, data=plain) as trainer:
        write_adapters(trainer, values)
        list(trainer.steps(1))
        found = gradients_of(trainer)
    assert set(found) == set(values)
    for name, p in trained(model).items():
        error = np.linalg.norm(found[name] - p.grad.numpy()) / p.grad.norm().item()
        assert error < 10 * delta("qwen3", "fp32", "packed"), name


def test_a_fresh_adapter_changes_nothing_and_is_drawn_as_peft_draws_it(directory):  # noqa: F811
    where = directory("llama")
    with open_trainer(where, plan=make_plan(where), data=plain, seed=9) as trainer:
        values = {n: trainer.read(n) for n in trainer.params if "lora_" in n}
        (first,) = trainer.steps(1)
    with open_trainer(where, plan=make_plan(where, lora=None), data=plain) as trainer:
        (without,) = trainer.steps(1)
    assert first.loss == without.loss
    assert all((v == 0).all() for n, v in values.items() if "lora_B" in n)
    for name, a in values.items():
        if "lora_A" not in name:
            continue
        limit = 1 / math.sqrt(a.shape[1])
        # n uniform draws: their mean square is limit^2 / 3, with a deviation of 0.9 / sqrt(n) of it
        assert np.abs(a).max() <= limit < 1.1 * np.abs(a).max()
        assert abs(3 * (a / limit) ** 2 - 1).mean() < 2
        assert abs(3 * np.mean((a / limit) ** 2) - 1) < 4 * 0.9 / math.sqrt(a.size)
    a = [v for n, v in values.items() if "lora_A" in n]
    assert len({x.tobytes() for x in a}) == len(a)


# ---- a training ----------------------------------------------------------------------------------


def test_a_training_goes_as_with_peft_and_torch(directory):  # noqa: F811
    """check_twenty_steps() of test_parity.py derives the bounds."""
    name, layout = "qwen3", "packed"
    model, figures = peft_model(name, adapters(name)), []
    params = trained(model)
    adam = torch.optim.AdamW(params.values(), lr=1, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)
    for step in range(STEPS):
        adam.param_groups[0]["lr"] = lr_at(step)
        adam.zero_grad()
        loss = loss_of(model, *plain(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), CLIP).item()
        figures.append((loss.item(), norm, lr_at(step)))
        adam.step()
    assert figures[0][0] - figures[-1][0] > 0.05  # it learns
    d, grads, n = delta(name, "fp32", layout), expected(name)[1], 0
    rms = figures[0][1] / math.sqrt(sum(p.numel() for p in params.values()))
    kappa, walk = d * math.sqrt(1.6 * max(rms / EPS, 1)), 0.0
    with open_trainer(
        directory(name),
        plan=make_plan(directory(name), layout, clip_norm=CLIP),
        data=plain,
        eps=EPS,
    ) as trainer:
        write_adapters(trainer, adapters(name))
        for m, (loss, norm, lr) in zip(trainer.steps(STEPS), figures, strict=True):
            bound = math.hypot(loss_noise(d, m.valid_tokens), 3 * kappa * norm * math.sqrt(walk))
            assert abs(m.loss - loss) < bound and abs(m.grad_norm / norm - 1) < bound
            walk, n = walk + lr * lr, n + 1
        for tensor, begun in adapters(name).items():
            final = params[tensor].detach().numpy()
            way = np.linalg.norm(final - begun)
            kappa = d * math.sqrt(1.6 * max(grads[tensor].square().mean().sqrt().item() / EPS, 1))
            bound = kappa + UNIT["fp32"] * math.sqrt(STEPS) * np.linalg.norm(begun) / way
            assert np.linalg.norm(trainer.read(tensor) - final) / way < bound, tensor
    assert n == STEPS


def train(where, plan, steps=3, values=None):
    with Trainer(where, plan, plain, lr=3e-3, seed=11) as t:
        if values:
            write_adapters(t, values)
        losses = [m.loss for m in t.steps(steps)]
        return losses, {n: t.read(n).tobytes() for n in t.params}


@pytest.mark.parametrize(
    "name, recipe",
    [
        pytest.param("gemma2-deep", "fp32", marks=pytest.mark.long),
        ("gemma2-deep", "fp32-master"),
        pytest.param("gemma2-deep", "bf16", marks=pytest.mark.long),
        ("qwen3_5-deep", "bf16"),
    ],
)
def test_caps_do_not_change_a_bit(directory, name, recipe):  # noqa: F811
    where = directory(name)
    plan = make_plan(where, "packed-rounds", recipe=recipe)
    chunk, a_round, _, _ = LAYOUTS["packed-rounds"]
    least, _ = Plan.smallest(
        ModelConfig.read(where),
        seq_len=SEQ,
        tokens_per_step=SEQ * N_SEQ,
        chunk_tokens=chunk,
        chunks_per_round=a_round,
        threads=2,
        recipe=recipe,
        lora=LORA,
        hardware=Hardware.estimate(2, "cpu"),
    )
    most = plan.report["device_used_bytes"]
    plans = [plan] + [
        make_plan(where, "packed-rounds", recipe=recipe, device_mem=least + (most - least) * i // 3)
        for i in range(3)
    ]
    assert len({json.dumps(p.json()["units"]) for p in plans}) > 1
    runs = [train(where, p) for p in plans]
    assert all(run == runs[0] for run in runs)
    with Trainer(where, plan, plain, lr=0.0, seed=11) as t:
        before = {n: t.read(n).tobytes() for n in t.params}
    changed = {n for n in before if before[n] != runs[0][1][n]}
    assert changed == {n for n in before if "lora_" in n}


@pytest.mark.long
def test_32b_plans_under_80_gib_of_host_memory_and_24_of_the_gpu():
    model = ModelConfig.read(ROOT / "models/32b.json")
    hardware = Hardware.read(ROOT / "docs/hardware-h200.json")
    plan = Plan(
        model,
        seq_len=4096,
        tokens_per_step=49152,
        device_mem="24GiB",
        host_mem="80GiB",
        chunk_tokens=4096,  # pinned: a search of all takes longer
        chunks_per_round=3,
        lora=Lora(16),
        reserve="2GiB",
        hardware=hardware,
    )
    report = plan.report
    assert report["device_used_bytes"] <= 24 << 30 and report["host_used_bytes"] <= 80 << 30
    n = sum(math.prod(p.shape) for p in plan.params())
    assert n > 32e9 and 2 * n < report["host_used_bytes"]


def test_a_frozen_base_is_kept_once(directory):  # noqa: F811
    """Host memory holds the base's weights, and for each element of an adapter its weight, master
    copy, gradient and two states."""
    where = directory("gemma2-deep")
    plan = make_plan(where, lora=LORA, recipe="fp32-master", keep_grads=False)
    base, adapter = 0, 0
    for p in plan.params():
        n = math.prod(p.shape)
        base, adapter = (base, adapter + n) if "lora_" in p.name else (base + n, adapter)
    weights = 2 * base + 16 * adapter
    batch = 100 * SEQ * N_SEQ  # activations that are offloaded there: none without a cap
    assert (
        weights < plan.report["host_arena_bytes"] < 1.1 * weights + batch + parse_bytes("2MiB", "")
    )


# ---- on disk -------------------------------------------------------------------------------------


@pytest.mark.oldest
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "qwen3_5", *OF_EXPERTS])
def test_a_saved_adapter_opens_in_peft(directory, tmp_path, name):  # noqa: F811
    where, lora = directory(name), OF_EXPERTS.get(name, LORA)
    with open_trainer(where, plan=make_plan(where, lora=lora), data=plain) as trainer:
        write_adapters(trainer, adapters(name, lora))
        list(trainer.steps(2))
        trainer.save(tmp_path / "adapter")
        values = {n: trainer.read(n) for n in trainer.params if "lora_" in n}
        (third,) = trainer.steps(1)  # its loss is that of the saved adapter
    base = transformers.AutoModelForCausalLM.from_pretrained(
        where, dtype=torch.float64, attn_implementation="eager"
    )
    base.config._experts_implementation = "eager"
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    assert set(trained(model)) == set(values)
    assert all(np.array_equal(p.detach().numpy(), values[n]) for n, p in trained(model).items())
    assert near(third.loss, loss_of(model.double(), *plain(2)).item())


@pytest.mark.oldest
@pytest.mark.parametrize("name, dtype", [("qwen2", "fp32"), ("gemma2", "fp32"), ("llama", "bf16")])
def test_a_merged_model_has_the_logits_of_peft(directory, tmp_path, name, dtype):  # noqa: F811
    """Both sums are made in fp32 and rounded once."""
    where, out = directory(name), tmp_path / "merged"
    reference = peft_model(name, adapters(name)).float()
    reference.save_pretrained(tmp_path / "adapter")
    words = ["--model", where, "--adapter", tmp_path / "adapter", "--out", out, "--dtype", dtype]
    assert merge.main([str(w) for w in (*words, "--quiet")]) == 0
    merged = reference.merge_and_unload()
    saved = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    )
    for (key, ours), theirs in zip(saved.state_dict().items(), merged.state_dict().values()):
        ulp = 2.0 ** (-23 if dtype == "fp32" else -8)
        scale = theirs.abs().clamp(min=0.1)  # the products of B and A are summed in another order
        assert ((ours - theirs).abs() <= 2 * ulp * scale).all(), key
    if dtype == "fp32":
        tokens = torch.as_tensor(plain(0)[0]).long()
        with torch.no_grad():
            a, b = (m.eval().double()(tokens).logits for m in (saved, reference.base_model.model))
        assert (a - b).abs().max() < 1e-4


def only_some(name, where, **more):
    """PEFT's model in fp64 with LoRA on other modules in other layers, saved. more: its config."""
    which = r"model\.layers\.(0\.self_attn\.q_proj|2\.mlp\.down_proj)"
    config = peft.LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, target_modules=which, task_type="CAUSAL_LM", **more
    )
    model = peft.get_peft_model(copy.deepcopy(model_of(name)), config).double().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in trained(model).values():
            p.copy_(torch.randn_like(p) / 8)
    model.float().save_pretrained(where)
    return model


@pytest.mark.parametrize("saved", [None, "lm_head"])
def test_an_adapter_of_some_layers_is_the_same_everywhere(directory, tmp_path, saved):  # noqa: F811
    """Also with weights in place of the model's own, which are not trained."""
    where, adapter, out = directory("qwen3"), tmp_path / "adapter", tmp_path / "merged"
    model = only_some("qwen3", adapter, modules_to_save=saved and [saved])
    want, lora = loss_of(model.double(), *plain(0)).item(), Lora.read(adapter)
    words = [str(w) for w in ("--model", where, "--adapter", adapter, "--out", out, "--quiet")]
    assert merge.main(words) == 0
    with Generator(where, adapter=adapter, dtype="fp32", batch=1, context=32) as g:
        tokens = g.run([[1, 2, 3]], max_new_tokens=12)
    with Generator(out, dtype="fp32", batch=1, context=32) as g:
        assert tokens == g.run([[1, 2, 3]], max_new_tokens=12)
    evaluation = make_plan(where, lora=lora, forward_only=True)
    for model_dir, plan, options in (
        (where, evaluation, {"adapter": adapter}),
        (out, make_plan(out, lora=None), {}),
    ):
        with Trainer(model_dir, plan, plain, **options) as trainer:
            assert near(next(iter(trainer.steps(1))).loss, want)
    plan = make_plan(where, lora=lora)
    if saved:
        with pytest.raises(InvalidError, match="modules_to_save.*penstock merge"):
            Trainer(where, plan, plain, adapter=adapter)
        return
    with Trainer(where, plan, plain, adapter=adapter) as trainer:
        assert near(next(iter(trainer.steps(1))).loss, want)
        trainer.save(tmp_path / "again")
    # what has no adapter in a layer stays without
    again = load_file(tmp_path / "again/adapter_model.safetensors")
    zero = {n for n, t in again.items() if not t.any()}
    assert again.keys() - zero == load_file(adapter / "adapter_model.safetensors").keys()


def test_the_same_adapters_are_refused_everywhere(directory, tmp_path, capsys):  # noqa: F811
    where, adapter = directory("qwen3"), tmp_path / "adapter"
    only_some("qwen3", adapter)
    lora, weights = Lora.read(adapter), adapter / "adapter_model.safetensors"
    good, config = load_file(weights), json.loads((adapter / "adapter_config.json").read_text())
    a = next(n for n in good if "lora_A" in n)
    cases = (
        ({n: t for n, t in good.items() if n != a}, {}, "has no tensor .*lora_A"),
        (
            good | {a.replace("layers.0", "layers.9"): good[a].clone()},
            {},
            "layers.9.* has no place",
        ),
        (good | {"base_model.model.x.weight": good[a].clone()}, {}, "x.weight has no place"),
        (good, {"target_modules": ["q_proj", "down_proj"]}, "has no tensor .* of another model"),
        (None, {}, "adapter_model.bin: is a pickle.*safe_serialization=True"),
    )
    for tensors, changes, words in cases:
        (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
        if tensors:
            save_file(tensors, weights)
        else:
            weights.rename(adapter / "adapter_model.bin")
        for use in (
            lambda: Trainer(where, make_plan(where, lora=lora), plain, adapter=adapter),
            lambda: Generator(where, adapter=adapter, batch=1, context=32),
        ):
            with pytest.raises((InvalidError, FormatError), match=words):
                use()
        words_of = ["--model", where, "--adapter", adapter, "--out", tmp_path / "out"]
        assert merge.main([str(w) for w in words_of]) == 2
        assert re.search(words, capsys.readouterr().err) and not (tmp_path / "out").exists()


def test_an_adapter_of_another_base_is_told(directory, tmp_path, capsys):  # noqa: F811
    where, adapter, other = directory("qwen3"), tmp_path / "adapter", tmp_path / "other"
    with open_trainer(where, plan=make_plan(where), data=plain) as trainer:
        write_adapters(trainer, adapters("qwen3"))
        trainer.save(adapter)
    half = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")  # of the same weights, in another dtype
    half.model.layers[2].mlp.down_proj.weight.data += 0.25
    half.save_pretrained(other)
    for folder in ("half", "other"):
        (tmp_path / folder / "config.json").write_text(json.dumps(ALL["qwen3"]))

    def merged(base, name):
        words = ["--model", base, "--adapter", adapter, "--out", tmp_path / name, "--quiet"]
        return merge.main([str(w) for w in words]), capsys.readouterr().err

    assert merged(tmp_path / "half", "a") == (0, "")
    code, said = merged(other, "b")
    assert code == 2 and "with other weights than" in said
    with pytest.raises(InvalidError, match="with other weights than"):
        Generator(other, adapter=adapter, batch=1, context=32)
    with pytest.raises(InvalidError, match="with other weights than"):
        Trainer(other, make_plan(other), plain, adapter=adapter)
    weights = adapter / "adapter_model.safetensors"
    save_file(load_file(weights), weights)  # as PEFT's, without the hash
    code, said = merged(other, "c")
    assert code == 0 and said.count(f"names the model {where}") == 1


@pytest.mark.oldest
def test_a_training_goes_on_from_a_saved_adapter(directory, tmp_path):  # noqa: F811
    """Also from one that PEFT wrote: it is the same file."""
    where = directory("qwen3")
    peft_model("qwen3", adapters("qwen3")).float().save_pretrained(tmp_path / "peft")
    lora = Lora.read(tmp_path / "peft")
    assert (lora.rank, lora.alpha, lora.rslora) == (4, 12, False)
    assert set(lora.targets.split(",")) == {n.split(".")[-3] for n in adapters("qwen3")}
    want = train(where, make_plan(where), 2, adapters("qwen3"))
    with Trainer(
        where, make_plan(where, lora=lora), plain, lr=3e-3, seed=11, adapter=tmp_path / "peft"
    ) as t:
        assert ([m.loss for m in t.steps(2)], {n: t.read(n).tobytes() for n in t.params}) == want


@pytest.mark.parametrize("name", ["qwen2", "qwen3_5"])
def test_a_resumed_training_has_the_bits_of_one_that_was_not_stopped(directory, tmp_path, name):  # noqa: F811
    where, plan = directory(name), make_plan(directory(name), recipe="fp32-master")
    with Trainer(where, plan, plain, lr=3e-3, seed=11) as t:
        list(t.steps(4))
        want = {n: t.read(n).tobytes() for n in t.params}
    with Trainer(where, plan, plain, lr=3e-3, seed=11) as t:
        list(t.steps(2))
        path = t.checkpoint(tmp_path / "checkpoints")
    files = {f.name for f in pathlib.Path(path).iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    checkpoint = Checkpoint(path)
    options = checkpoint.plan_options
    assert options["lora"].rank == 4 and options["lora"].alpha == 12
    small = Plan(
        ModelConfig.read(where), threads=2, hardware=Hardware.estimate(2, "cpu"), **options
    )
    with Trainer.resume(checkpoint, where, small, plain) as t:
        list(t.steps(2))
        assert {n: t.read(n).tobytes() for n in t.params} == want
    # its weights are of another model
    other = tmp_path / "other"
    model = copy.deepcopy(model_of(name))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 1
    model.save_pretrained(other)
    (other / "config.json").write_text((where / "config.json").read_text())
    with pytest.raises(InvalidError, match="other weights than .*other"):
        Trainer.resume(checkpoint, other, small, plain)


# ---- what is refused -----------------------------------------------------------------------------

BAD = {
    "rank-0": (Lora(0), "rank is 0"),
    "rank-too-large": (Lora(65537, targets="k_proj"), "rank is 65537: at most 65536"),
    "unknown-target": (Lora(4, targets="q_proj,w_proj"), "'w_proj' is unknown.*q_proj, k_proj"),
    "a-fused-target": (Lora(4, targets="qkv_proj"), "llama block has no LoRA target qkv_proj"),
    "all-of-experts": (
        Lora(8),
        "give lora.targets o_proj,q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj",
    ),
    "an-odd-cut": (Lora(3, targets="kv_a_proj_with_mqa"), "is 24 x 3: .* a multiple of 64"),
    "alpha-0": (Lora(4, 0), "alpha is 0"),
    "alpha-nan": (Lora(4, math.nan), "alpha is nan"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_lora_is_refused(directory, case):  # noqa: F811
    lora, words = BAD[case]
    name = "deepseek_v3" if case in ("all-of-experts", "an-odd-cut") else "llama"
    with pytest.raises(InvalidError, match=words):
        make_plan(directory(name), lora=lora)


def test_frozen_layers_and_lora_exclude_each_other(directory):  # noqa: F811
    with pytest.raises(InvalidError, match="2 layers would be frozen, but with LoRA"):
        make_plan(directory("llama"), frozen_layers=2)


@pytest.fixture(scope="module")
def adapter(tiny_model, tiny_shard, tmp_path_factory):
    """A trained adapter of tiny_model, by the command."""
    out = tmp_path_factory.mktemp("lora") / "adapter"
    done = command(tiny_model, tiny_shard, "--steps", 2, "--lora-rank", 4, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def command(model, data, *more):
    words = words_of_training(model, data, *more)
    return subprocess.run([BUILD / "bin/penstock", *words], capture_output=True, text=True)


def test_the_command_trains_an_adapter(adapter, tiny_model):
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0)
    assert config["base_model_name_or_path"] == str(tiny_model)
    assert not list(adapter.glob("model*.safetensors"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    model = peft.PeftModel.from_pretrained(base, adapter)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}


def test_the_command_goes_on_from_a_checkpoint(tiny_model, tiny_shard, tmp_path):
    """Also beside weights that are drawn: the checkpoint has none of them."""
    options = ["--lora-rank", 4, "--init-weights", "--seed", 5, "--checkpoint-every", 2]
    runs = {"whole": [4], "stopped": [2, 4]}
    for name, steps in runs.items():
        for n in steps:
            more = ["--out", tmp_path / name, "--steps", n, "--resume", "auto", "--force"]
            done = command(tiny_model, tiny_shard, *options, *more)
            assert done.returncode == 0, done.stderr
    files = [tmp_path / name / "adapter_model.safetensors" for name in runs]
    assert files[0].read_bytes() == files[1].read_bytes()


def edited(adapter, tmp_path, **changes):
    """A copy with another adapter_config.json."""
    out = tmp_path / "edited"
    out.mkdir()
    for f in adapter.iterdir():
        if f.name.startswith("adapter_"):
            (out / f.name).write_bytes(f.read_bytes())
    config = json.loads((out / "adapter_config.json").read_text()) | changes
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


REFUSED = {
    "rank-0": (["--lora-rank", 0], None, "lora-rank"),
    "alpha-alone": (["--lora-alpha", 8], None, "--lora-alpha needs --lora-rank"),
    "another-rank": (["--lora-rank", 8], {}, "--lora-rank is 8, but the adapter .* has 4"),
    "no-adapter": ([], "missing", "missing/adapter_config.json"),
    "no-lora": ([], {"peft_type": "IA3"}, "peft_type is IA3"),
    "dora": ([], {"use_dora": True}, "use_dora is set"),
    "ranks-by-layer": ([], {"rank_pattern": {"q_proj": 2}}, "rank_pattern is set"),
    "wrong-rank": ([], {"r": 5}, "another model or rank"),
    "no-rank": ([], {"r": "four"}, "r is no whole number"),
    "no-alpha": ([], {"lora_alpha": None}, "lora_alpha is nan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_command_refuses_bad_adapters(adapter, tiny_model, tiny_shard, tmp_path, case):
    options, changes, words = REFUSED[case]
    if changes == "missing":
        options = [*options, "--adapter", tmp_path / "missing"]
    elif changes is not None:
        options = [*options, "--adapter", edited(adapter, tmp_path, **changes)]
    out = tmp_path / "out"
    done = command(tiny_model, tiny_shard, "--steps", 1, "--out", out, *options)
    assert done.returncode == 2 and not out.exists()
    assert re.search(words, done.stderr), done.stderr
    assert done.stderr.count("penstock: ") == 1


def test_all_linear_is_not_what_an_adapter_of_fewer_projections_has(
    tiny_model, tiny_shard, tmp_path
):
    def train(name, *options):
        options = ["--steps", 1, "--out", tmp_path / name, *options]
        return command(tiny_model, tiny_shard, *options)

    for name, targets, code in (("all", "all-linear", 0), ("few", "q_proj,v_proj", 2)):
        assert train(name, "--lora-rank", 2, "--lora-targets", targets).returncode == 0
        again = ["--adapter", tmp_path / name, "--lora-targets"]
        assert train(f"{name}-again", *again, targets).returncode == 0
        assert train(f"{name}-all", *again, "all-linear").returncode == code
    (tmp_path / "delta").mkdir()
    (tmp_path / "delta/config.json").write_text(json.dumps(ALL["qwen3_5"]))
    for model, adapter in ((tiny_model, "few"), (tmp_path / "delta", "all")):
        options = ["--adapter", tmp_path / adapter, "--lora-targets", "all-linear"]
        done = command(model, tiny_shard, "--steps", 1, "--out", tmp_path / "no", *options)
        assert "--lora-targets all-linear differs from the adapter" in done.stderr
