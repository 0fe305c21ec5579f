"""Experts beside what tests/test_families.py compares with transformers: the router's terms of the
loss, counts, the same bits under every plan, and what is refused."""

import contextlib
import functools
import hashlib
import json
import pathlib
import re

import numpy as np
import pytest
import torch
from families import EXPERTS, as_on_disk, random_model
from penstock import (
    Checkpoint,
    FormatError,
    Generator,
    Hardware,
    InvalidError,
    ModelConfig,
    Plan,
    Trainer,
    compare,
    export,
)
from penstock.files import DataError
from penstock.tolerance import delta, loss_noise
from safetensors.torch import load_file, save_file
from test_parity import N_SEQ, SEQ, plain
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

TOKENS = N_SEQ * SEQ
ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    @functools.cache
    def make(name, layers=3):
        where = tmp_path_factory.mktemp("experts") / f"{name}{layers}"
        cfg = dict(EXPERTS[name], num_hidden_layers=layers)
        if layers > 3:  # so that the smallest arena does not hold everything
            cfg |= dict(moe_intermediate_size=120)
        random_model(cfg).save_pretrained(where)
        (where / "config.json").write_text(json.dumps(cfg))
        return where, cfg

    return make


def make_plan(where, chunk=TOKENS, recipe="fp32", **more):
    more = {"chunks_per_round": 1, "threads": 2, "router_aux_loss": 0.0, "clip_norm": 0.0} | more
    return Plan(
        ModelConfig.read(where),
        recipe=recipe,
        chunk_tokens=chunk,
        hardware=Hardware.estimate(2, "cpu"),
        **{"seq_len": SEQ, "tokens_per_step": TOKENS} | more,
    )


def terms_of(logits, n_used, chunk, alpha, beta):
    """The routers' terms of the loss: means over the blocks of each chunk's, by its tokens."""
    total = 0.0
    for z in logits:
        n = z.shape[1]
        for rows in z.split(chunk):
            part = len(rows) / len(z) / len(logits)
            chosen = rows.topk(n_used).indices
            f = torch.nn.functional.one_hot(chosen, n).sum(1).double().mean(0)
            aux = n * (f * rows.softmax(1).mean(0)).sum()
            total = total + part * (alpha * aux + beta * rows.logsumexp(1).square().mean())
    return total


def oracle(cfg, alpha, beta, chunk, of_transformers=False):
    model = random_model(cfg).double()
    tokens, targets = (torch.as_tensor(x).long() for x in plain(0))
    out = model(tokens, output_router_logits=True, use_cache=False)
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    n_used = cfg["num_experts_per_tok"]
    if of_transformers:
        n = cfg.get("num_experts") or cfg["num_local_experts"]
        extra = alpha * load_balancing_loss_func(out.router_logits, n, n_used)
    else:
        extra = terms_of(out.router_logits, n_used, chunk, alpha, beta)
    (loss + extra).backward()
    return loss.item(), as_on_disk(
        {k: p.grad for k, p in model.named_parameters()}, cfg["model_type"]
    )


@pytest.mark.parametrize(
    "name, layers, alpha, beta, chunk",
    [
        ("olmoe", 1, 0.5, 0.0, TOKENS),  # transformers' own formula, of one block and one chunk
        ("olmoe", 3, 0.5, 0.0, 80),
        ("qwen3_moe", 3, 0.5, 0.2, 80),  # its dense block counts for nothing
        ("mixtral", 3, 0.0, 0.3, 20),
    ],
)
def test_the_terms_of_the_router(directory, name, layers, alpha, beta, chunk):
    where, cfg = directory(name, layers)
    loss, grads = oracle(cfg, alpha, beta, chunk, layers == 1)
    _, without = oracle(cfg, 0.0, 0.0, chunk)
    plan = make_plan(where, chunk, router_aux_loss=alpha, router_z_loss=beta)
    bound = 2 * delta("fp32", layers, TOKENS // chunk, 512)
    with Trainer(where, plan, plain, lr=0.0) as trainer:
        (first,) = trainer.steps(1)
        for key, g in grads.items():
            error = np.linalg.norm(trainer.grad(key) - g.numpy())
            assert error <= bound * max(g.norm().item(), 1e-3), key
            if "gate.weight" in key:
                assert (g - without[key]).norm() > 100 * bound * g.norm(), key
    assert abs(first.loss - loss) < 1e-5  # it is the cross-entropy alone


@pytest.mark.parametrize(
    "name, changes, alpha, beta",
    [
        ("olmoe", dict(norm_topk_prob=False), 1.0, 0.2),
        ("olmoe", dict(norm_topk_prob=True), 1.0, 0.2),
        ("qwen3_moe", dict(norm_topk_prob=False), 0.0, 0.0),
        ("mixtral", {}, 0.5, 0.0),
    ],
    ids=str,
)
def test_finite_differences_through_the_router(tmp_path, name, changes, alpha, beta):
    """As test_parity.py's, of the loss and of the router's terms, which the reported loss lacks:
    these are transformers', in fp64. Along a direction the loss changes by 0.003, so that every
    token keeps its experts."""
    seq = 8  # tokens of a sequence and of a chunk
    cfg = {**EXPERTS[name], **changes, "num_hidden_layers": 2, "mlp_only_layers": []}
    random_model(cfg).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    tokens, targets = (x[:2, :seq].copy() for x in plain(0))
    how = dict(seq_len=seq, tokens_per_step=2 * seq, chunk_tokens=seq, chunks_per_round=1)
    how |= dict(recipe="fp32", threads=2, hardware=Hardware.estimate(2, "cpu"), clip_norm=0.0)
    config = ModelConfig.read(tmp_path)
    how["device_mem"], _ = Plan.smallest(config, **how)  # updates run on the host
    plan = Plan(config, **how, router_aux_loss=alpha, router_z_loss=beta)
    model = random_model(cfg).double().requires_grad_(False)
    theirs = as_on_disk(dict(model.named_parameters()), name)
    ids, n_used = torch.as_tensor(tokens).long(), cfg["num_experts_per_tok"]
    rng, chosen = np.random.default_rng(3), []

    def terms():
        out = model(ids, output_router_logits=True, use_cache=False)
        chosen.append(str([z.topk(n_used).indices.sort().values for z in out.router_logits]))
        return terms_of(out.router_logits, n_used, seq, alpha, beta)

    with Trainer(tmp_path, plan, lambda _: (tokens, targets), lr=0.0) as trainer:
        list(trainer.steps(1))
        begun, grads = (
            {n: read(n) for n in trainer.params} for read in (trainer.read, trainer.grad)
        )

        def loss_at(direction, by):
            for n, d in direction.items():
                trainer.write(n, begun[n] + by * d)
                theirs[n].copy_(torch.as_tensor(trainer.read(n)))
            return next(trainer.steps(1)).loss + float(terms())

        terms()
        for part in (r"gate\.weight", "experts", "self_attn"):
            direction = {}
            for n in (n for n in begun if re.search(part, n) and grads[n].any()):
                uphill = grads[n] / np.sqrt(np.mean(grads[n] ** 2))
                noise = rng.standard_normal(uphill.shape)
                direction[n] = np.sqrt(np.mean(begun[n] ** 2)) * (noise + uphill)
            slope = sum(np.sum(grads[n].astype(float) * d) for n, d in direction.items())
            h = 0.003 / abs(slope)
            found = (loss_at(direction, h) - loss_at(direction, -h)) / (2 * h)
            loss_at(direction, 0.0)
            assert abs(found - slope) < loss_noise(delta("fp32", 2, 2, 512), 2 * seq) / h, part
    assert len(set(chosen)) == 1


def state_of(trainer):
    weights = [trainer.read(name).tobytes() for name in trainer.params]
    return hashlib.sha256(b"".join(weights)).hexdigest()


@pytest.mark.parametrize(
    "name, recipe",
    [pytest.param("qwen3_moe", "fp32", marks=pytest.mark.long), ("deepseek_v3", "bf16")],
)
def test_the_same_bits_under_every_plan(directory, name, recipe, tmp_path):
    """Caps, so placements and what is made again; threads; two devices; a resume. Each chunk is of
    two sequences, but the last."""
    where, _ = directory(name, 5)
    terms = 0.02 if name == "qwen3_moe" else 0.0
    train = dict(lr=1e-2, seed=1)
    how = dict(clip_norm=1.0, chunk=2 * SEQ, recipe=recipe, router_aux_loss=None)
    how["router_z_loss"] = terms / 20
    least, _ = Plan.smallest(
        ModelConfig.read(where),
        seq_len=SEQ,
        tokens_per_step=TOKENS,
        recipe=recipe,
        chunk_tokens=2 * SEQ,
        chunks_per_round=1,
        threads=2,
        hardware=Hardware.estimate(2, "cpu"),
    )
    plans = [dict(device_mem=least), {}, dict(gpus=2)]
    plans += [dict(device_mem=least + (2 << 20)), dict(threads=1)] if recipe == "fp32" else []
    bits, kept = set(), set()
    for more in plans:
        plan = make_plan(where, **(how | more))
        kept.add((plan.report["saved_recompute_bytes"], plan.report["resident_param_units"]))
        with Trainer(where, plan, plain, **train) as trainer:
            m = list(trainer.steps(2))
            counts = [(x.expert_load, x.expert_entropy, x.experts_unused) for x in m]
            bits.add((state_of(trainer), m[1].loss, str(counts)))
    assert len(bits) == 1 and len(kept) > 1
    with Trainer(where, make_plan(where, **how), plain, **train) as trainer:
        list(trainer.steps(1))
        checkpoint = Checkpoint(trainer.checkpoint(tmp_path / "c"))
    assert abs(checkpoint.plan_options["router_aux_loss"] - terms) < 1e-8
    with Trainer.resume(checkpoint, where, make_plan(where, **how, device_mem=least), plain) as t:
        list(t.steps(1))
        assert {state_of(t)} == {b[0] for b in bits}


def changed(where, out, change):
    """The directory with other weights."""
    out.mkdir()
    tensors = load_file(where / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_bytes((where / "config.json").read_bytes())
    return out


def set_routers(value):
    def change(tensors):
        for key, x in tensors.items():
            if key.endswith("gate.weight"):
                x.fill_(value)

    return change


def test_equal_logits_choose_the_first_experts(directory, tmp_path):
    where, cfg = directory("olmoe")
    tied = changed(where, tmp_path / "tied", set_routers(0.0))
    n, k = cfg["num_experts"], cfg["num_experts_per_tok"]
    with Trainer(tied, make_plan(tied, 80), plain, lr=0.0) as trainer:
        (m,) = trainer.steps(1)
        for e in (0, k - 1, k):
            grad = trainer.grad(f"model.layers.1.mlp.experts.{e}.down_proj.weight")
            assert grad.any() == (e < k)
    assert m.expert_load == n / k
    assert m.experts_unused == (n - k) * cfg["num_hidden_layers"]
    assert abs(m.expert_entropy - np.log(k) / np.log(n)) < 1e-12


def test_a_correction_bias_stays_fp32_in_bf16(directory, tmp_path):
    """Logits are equal, and bf16 rounds all of the biases to 1: then the first experts are chosen."""
    where, cfg = directory("deepseek_v3")
    n, bias = cfg["n_routed_experts"], "model.layers.1.mlp.gate.e_score_correction_bias"
    values = 1 + 1e-4 * torch.arange(n)

    def change(tensors):
        for key, x in tensors.items():
            tensors[key] = x.bfloat16() if x.dtype == torch.float32 else x
            if key.endswith("gate.weight"):
                tensors[key].fill_(0)
            if key.endswith("correction_bias"):
                tensors[key] = values.clone()

    def rounded(tensors):
        change(tensors)
        for key in (k for k in tensors if k.endswith("correction_bias")):
            tensors[key] = tensors[key].bfloat16()

    exact, other = (changed(where, tmp_path / c.__name__, c) for c in (change, rounded))
    how = dict(router_aux_loss=None, recipe="bf16")
    with Trainer(exact, make_plan(exact, 80, **how), plain, lr=1e-3) as trainer:
        list(trainer.steps(1))
        used = [
            e
            for e in range(n)
            if trainer.grad(f"model.layers.1.mlp.experts.{e}.down_proj.weight").any()
        ]
        trainer.save(tmp_path / "saved", "bf16")
        checkpoint = Checkpoint(trainer.checkpoint(tmp_path / "c"))
    assert used == list(range(n))[-cfg["num_experts_per_tok"] :]
    out = tmp_path / "exported"
    assert export.main(["--model", str(tmp_path / "saved"), "--to", "hf", "--out", str(out)]) == 0
    for folder in (tmp_path / "saved", out, checkpoint.path):
        tensors = load_file(f"{folder}/model.safetensors")
        assert torch.equal(tensors[bias], values)
        assert tensors["model.norm.weight"].dtype == torch.bfloat16
    with Trainer.resume(checkpoint, exact, make_plan(exact, 80, **how), plain) as trainer:
        assert np.array_equal(trainer.read(bias), values.numpy())
    texts = []
    for folder in (exact, other):
        with Generator(folder, batch=1, context=32) as generator:
            texts.append(generator.run([[1, 2, 3]], max_new_tokens=12))
    assert texts[0] != texts[1]


def test_on_a_gpu_experts_get_larger_chunks_of_short_sequences(directory, tiny_model):
    chunk = [
        Plan(
            ModelConfig.read(where),
            seq_len=SEQ,
            tokens_per_step=819 * SEQ,
            chunks_per_round=1,
            hardware=Hardware.read(ROOT / "docs/hardware-h200.json"),
        ).report["chunk_tokens"]
        for where in (directory("olmoe")[0], tiny_model)
    ]
    assert chunk == [819 * SEQ, 409 * SEQ]  # below 32768 and 16384


def test_a_router_that_is_not_finite_stops_the_run(directory, tmp_path):
    where, _ = directory("olmoe")
    broken = changed(where, tmp_path / "broken", set_routers(float("inf")))
    with Trainer(broken, make_plan(broken, 80), plain, lr=0.0) as trainer:
        with pytest.raises(Exception, match="not finite|NaN|nan"):
            list(trainer.steps(2))


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("olmoe", dict(num_experts=0), ["num_experts", "0"]),
        ("olmoe", dict(num_experts=513), ["num_experts", "513", "512"]),
        ("olmoe", dict(num_experts_per_tok=17), ["num_experts_per_tok", "17"]),
        ("olmoe", dict(num_experts=4, num_experts_per_tok=5), ["num_experts_per_tok", "5", "4"]),
        ("olmoe", dict(clip_qkv=8.0), ["clip_qkv", "8"]),
        ("olmoe", dict(num_local_experts=8), ["num_local_experts", "16", "8"]),
        ("olmoe", dict(quantization_config={"quant_method": "x"}), ["quantization_config"]),
        ("olmoe", dict(router_aux_loss_coef=-1), ["router_aux_loss_coef", "-1"]),
        ("mixtral", dict(router_jitter_noise=0.1), ["router_jitter_noise", "0.1"]),
        ("mixtral", dict(capacity_factor=1.25), ["capacity_factor", "1.25"]),
        ("mixtral", dict(clip_qkv=8.0), ["clip_qkv", "8"]),
        ("qwen3_moe", dict(n_shared_experts=1), ["n_shared_experts", "1"]),
        ("qwen3_moe", dict(n_group=4), ["n_group", "4"]),
        ("qwen3_moe", dict(mlp_only_layers=[3]), ["mlp_only_layers[0]", "3"]),
        ("qwen3_moe", dict(mlp_only_layers=[0, 1, 2]), ["no layer has experts"]),
        ("qwen3_moe", dict(decoder_sparse_step=0), ["decoder_sparse_step", "0"]),
        ("qwen3_moe", dict(norm_topk_prob=2), ["norm_topk_prob"]),
        ("deepseek_v2", dict(q_lora_rank=0), ["q_lora_rank is 0"]),
        ("deepseek_v2", dict(kv_lora_rank=0), ["kv_lora_rank is 0"]),
        ("deepseek_v2", dict(v_head_dim=25), ["v_head_dim is 25", "24"]),
        ("deepseek_v2", dict(qk_rope_head_dim=7), ["qk_rope_head_dim is 7", "even"]),
        ("deepseek_v2", dict(qk_nope_head_dim=0), ["qk_nope_head_dim is 0"]),
        ("deepseek_v2", dict(num_key_value_heads=2), ["num_key_value_heads is 2", "4"]),
        ("deepseek_v2", dict(head_dim=9), ["head_dim is 9", "8"]),
        ("deepseek_v2", dict(norm_topk_prob=True), ["norm_topk_prob is true"]),
        ("deepseek_v2", dict(topk_method="noaux_tc"), ["topk_method", "noaux_tc"]),
        ("deepseek_v2", dict(scoring_func="sigmoid"), ["scoring_func", "sigmoid"]),
        ("deepseek_v2", dict(attention_bias=True), ["attention_bias"]),
        ("deepseek_v2", dict(moe_layer_freq=2), ["moe_layer_freq is 2"]),
        ("deepseek_v2", dict(n_shared_experts=0), ["n_shared_experts is 0"]),
        ("deepseek_v3", dict(n_group=5), ["n_group is 5", "12"]),
        ("deepseek_v3", dict(n_group=6, num_experts_per_tok=4), ["topk_group is 1", "2 experts"]),
        ("deepseek_v3", dict(topk_group=3), ["topk_group is 3", "2"]),
        ("deepseek_v3", dict(routed_scaling_factor=0), ["routed_scaling_factor is 0"]),
        ("deepseek_v3", dict(first_k_dense_replace=3), ["first_k_dense_replace is 3"]),
        ("deepseek_v3", dict(router_aux_loss_coef=0.1), ["router_aux_loss_coef is 0.1"]),
        ("gemma4-moe", dict(num_experts=None), ["num_experts is missing"]),
        ("gemma4-moe", dict(top_k_experts=8), ["top_k_experts is 8", "num_experts, 7"]),
        ("glm4_moe_lite", dict(mlp_layer_types=["sparse"]), ["mlp_layer_types", "3"]),
        ("glm4_moe_lite", dict(mlp_layer_types=["moe"] * 3), ["mlp_layer_types[0]", "moe"]),
        (
            "glm4_moe_lite",
            dict(mlp_layer_types=None, first_k_dense_replace=2),
            ["first_k_dense_replace is 2", "mlp_layer_types"],
        ),
    ],
    ids=str,
)
def test_what_a_config_may_not_say(name, changes, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**EXPERTS[name], **changes}))
    with pytest.raises(FormatError) as e:
        ModelConfig.read(tmp_path)
    assert all(w in str(e.value) for w in words), e.value


def test_layers_past_the_last_are_passed_over(directory, tmp_path):
    """Those that predict several tokens at once, as transformers; others are refused, as are terms of
    the loss that a router with sigmoids has not."""
    where, _ = directory("deepseek_v3")
    with pytest.raises(InvalidError, match="sigmoids: they must be 0"):
        make_plan(where, router_z_loss=0.1)
    for name, words in [("model.layers.3.eh_proj.weight", ""), ("model.layers.2.x", "not part")]:
        other = changed(
            where, tmp_path / name, lambda t, name=name: t.update({name: torch.ones(2)})
        )
        with contextlib.nullcontext() if not words else pytest.raises(FormatError, match=words):
            Trainer(other, make_plan(other, 80), plain).close()


def test_what_is_refused_of_experts(directory, tmp_path):
    from penstock import Lora

    where, _ = directory("olmoe")
    for words, how in [
        ("LoRA of experts", dict(lora=Lora(rank=2, targets="gate_proj"), recipe="fp32")),
        ("router_aux_loss 2", dict(router_aux_loss=2.0)),
    ]:
        with pytest.raises(InvalidError, match=words):
            make_plan(where, **how)
    with pytest.raises(DataError, match="has experts, whose tensors are not compared"):
        compare.compare(where, where, *plain(0))
    missing = "model.layers.1.mlp.experts.3.up_proj.weight"
    for change, words in [
        (lambda t: t.pop(missing), missing),
        (lambda t: t.update({missing: t[missing][1:].clone()}), missing),
        (lambda t: t.update({missing.replace(".3.", ".16."): t[missing].clone()}), r"\.16\."),
    ]:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        other = changed(where, out, change)
        with pytest.raises(FormatError, match=words):
            Trainer(other, make_plan(other, 80), plain)


def test_in_fp8_recipes_experts_stay_in_bf16(tmp_path):
    """Blocks sparse, dense, sparse: attention and the dense MLP have FP8 products, 3 each. All
    experts are used, so that FP8 sends no token to others: then gradients are as near to those of
    bf16 as 8 products forward and as many backward let them be (test_fp8.py's GATE)."""
    cfg = EXPERTS["qwen3_moe"] | dict(num_experts=4, num_experts_per_tok=4)
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    seq, losses, grads = 32, [], []
    tokens, targets = (x[:, :seq].copy() for x in plain(0))
    for recipe, more in (("bf16", {}), ("fp8", dict(fp8_bf16_first=0, fp8_bf16_last=0))):
        how = dict(seq_len=seq, tokens_per_step=5 * seq, router_aux_loss=None)
        plan = make_plan(tmp_path, 5 * seq, recipe, **how, **more)
        with Trainer(
            tmp_path, plan, lambda _: (tokens, targets), lr=0.0, init_weights=True
        ) as trainer:
            (m,) = trainer.steps(1)
            losses.append(m.loss)
            grads.append({key: trainer.grad(key) for key in trainer.params})
    ops = [plan.schedule.op(i) for i in range(plan.schedule.n_ops)]
    ops = [(op["tag"]["layer"], op["name"]) for op in ops]
    count = [[ops.count((at, name)) for at in (1, 2, 3)] for name in ("gemm_fp8", "gemm_grouped")]
    assert count == [[6, 12, 6], [6, 0, 6]]
    assert m.fp8_flushed > 0 and m.expert_load == 1
    gate = (8 * 0.045**2 + 8 * 0.065**2) ** 0.5
    off = [np.linalg.norm(grads[1][k] - g) / np.linalg.norm(g) for k, g in grads[0].items()]
    assert 0.02 < np.mean(off) < gate and max(off) < 2 * gate
    assert 0 < abs(losses[1] - losses[0]) < loss_noise(gate, 5 * seq)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2"])
def test_adapters_of_attention(directory, name, tmp_path):
    """The router and the experts stay as they are, and gradients go through them: those of the
    first block's adapter are transformers' of the merged product."""
    from penstock import Lora

    where, cfg = directory(name)
    lora = Lora(rank=2, alpha=2, targets="q_proj,o_proj")
    plan = make_plan(where, 80, lora=lora, router_aux_loss=None)
    with Trainer(where, plan, plain, lr=0.0) as trainer:
        list(trainer.steps(1))
        (b,) = [n for n in trainer.params if "layers.0." in n and "q_proj" in n and "lora_B" in n]
        (a,) = [n for n in trainer.params if "layers.0." in n and "q_proj" in n and "lora_A" in n]
        got, factor = trainer.grad(b), trainer.read(a)
    _, grads = oracle(cfg, 0.0, 0.0, 80)  # with adapters there is no auxiliary loss
    want = grads["model.layers.0.self_attn.q_proj.weight"].numpy() @ factor.T * (2 / 2)
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)


def test_a_forward_pass_alone_has_no_router_terms(directory):
    where, _ = directory("olmoe")
    losses = []
    for more in (dict(router_aux_loss=0.5), dict(router_aux_loss=None, forward_only=True)):
        with Trainer(where, make_plan(where, 80, **more), plain, lr=0.0) as trainer:
            losses += [m.loss for m in trainer.steps(1)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name, n_sparse", [("qwen3_moe", 2), ("mixtral", 3)])
def test_fused_files_are_read_and_written_as_they_are(directory, tmp_path, name, n_sparse):
    """transformers' other form: the same weights, the same step, and saved in that form again."""
    where, cfg = directory(name)
    fused = tmp_path / "fused"
    random_model(cfg).save_pretrained(fused, save_original_format=False)
    (fused / "config.json").write_text(json.dumps(cfg))
    given = load_file(fused / "model.safetensors")
    assert sum(key.endswith("experts.gate_up_proj") for key in given) == n_sparse
    saved, losses = [], []
    for k, folder in enumerate((where, fused)):
        with Trainer(folder, make_plan(folder, 80), plain, lr=1e-2) as trainer:
            losses += [m.loss for m in trainer.steps(2)]
            saved.append(state_of(trainer))
            trainer.save(tmp_path / f"out{k}", "fp32")
    assert saved[0] == saved[1] and losses[:2] == losses[2:]
    out = [load_file(tmp_path / f"out{k}" / "model.safetensors") for k in range(2)]
    assert {k: v.shape for k, v in out[1].items()} == {k: v.shape for k, v in given.items()}
    split = as_on_disk(out[1], name)
    assert set(split) == set(out[0]) and all(torch.equal(split[k], x) for k, x in out[0].items())
    twice = next(key for key in out[0] if ".experts.3." in key)
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / f"out{k}").eval()(torch.arange(40)[None])
        for k in range(2)
    )
    assert torch.equal(ours.logits, theirs.logits)
    both = given | {twice: out[0][twice]}
    save_file(both, fused / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=re.escape(f'"{twice}" is also in')):
        Trainer(fused, make_plan(fused, 80), plain)
