"""FP8 training on the CPU backend: a whole step against an oracle that shares no code
(fp8_reference.py) and against bf16, what is refused, checkpoints and validation. The ops:
test_fp8_ops.py; the same bits under every cap: tests/native/test_plan.c.
"""

import itertools
import json
import shutil
from pathlib import Path

import families
import numpy as np
import penstock as ps
import pytest
from conftest import ROOT
from penstock import Checkpoint, Hardware, Lora, ModelConfig, Plan, Trainer
from test_cli import job, penstock, refused, words  # noqa: F401 (job is a fixture)

torch = pytest.importorskip("torch")
import reference as ref  # noqa: E402
from fp8_reference import Fp8DeltaNet, Fp8Latent, Fp8Llama, Fp8Product  # noqa: E402
from penstock import tolerance  # noqa: E402

SEQ, N_SEQ, A_CHUNK = 48, 4, 2
CONFIG = json.loads((ROOT / "models/tiny-llama.json").read_text())
WEIGHTS = ref.random_weights(CONFIG, seed=1)
HARDWARE = Hardware.estimate(2, "cpu")
SLOW_LINK = Hardware.estimate(2, "cpu")  # under a cap, plans recompute what they would offload
for link in SLOW_LINK._ptr.link[0:2]:  # to the device, to the host
    link.bytes_per_s = link.duplex_bytes_per_s = 1e7
# Errors of an FP8 step relative to a gradient, from those of its products: 8 forward in 2 blocks,
# each 3.7% off (at most 4.5%), and 9 backward, 5.8% (6.5%), all independent.
GATE = (8 * 0.045**2 + 9 * 0.065**2) ** 0.5


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return ref.write_directory(tmp_path_factory.mktemp("fp8") / "m", CONFIG, WEIGHTS)


def batch(step=0):
    t = np.random.default_rng([3, step]).integers(0, 512, (N_SEQ, SEQ + 1)).astype(np.int32)
    targets = t[:, 1:].copy()
    targets[:, ::7] = -1
    return t[:, :-1].copy(), targets


def make_plan(directory, recipe="fp8", **more):
    options = {"chunk_tokens": A_CHUNK * SEQ, "chunks_per_round": 2, "clip_norm": 0}
    options |= {"hardware": SLOW_LINK if more.get("device_mem") else HARDWARE} | more
    return Plan(
        ModelConfig.read(directory),
        seq_len=SEQ,
        tokens_per_step=SEQ * N_SEQ,
        recipe=recipe,
        threads=2,
        **options,
    )


def first_step(directory, recipe, **more):
    """(loss, {name: gradient})"""
    plan = make_plan(directory, recipe, **more)
    with Trainer(directory, plan, batch, lr=0.0) as trainer:
        (m,) = trainer.steps(1)
        return m.loss, {k: torch.as_tensor(trainer.grad(k)).double() for k in trainer.params}


@pytest.fixture(scope="module")
def exact():
    rounded = {k: v.bfloat16() for k, v in WEIGHTS.items()}
    loss, grads, _ = ref.Reference(CONFIG, rounded).gradients(*batch())
    return loss, grads


def errors(found, expected):
    return {k: ((found[k] - g).norm() / g.norm()).item() for k, g in expected.items()}


def passes(found, expected):
    """The gate of a whole step: loss, direction and size of every gradient."""
    (loss, grads), (want, true) = found, expected
    cosine = {
        k: torch.nn.functional.cosine_similarity(grads[k].flatten(), g.flatten(), 0).item()
        for k, g in true.items()
    }
    ratio = {k: (grads[k].norm() / g.norm()).item() for k, g in true.items()}
    n_valid = int((batch()[1] >= 0).sum())
    return (
        abs(loss - want) < tolerance.loss_noise(GATE, n_valid)
        and max(errors(grads, true).values()) < GATE
        and min(cosine.values()) > 1 - GATE**2 / 2
        and all(abs(r - 1) < 0.05 for r in ratio.values())
    )


BLOCKS = {
    "default": ({}, {"fp8": (1, 2)}),
    "all blocks": ({"fp8_bf16_first": 0, "fp8_bf16_last": 0}, {"fp8": (0, 1, 2, 3)}),
    "down in bf16": ({"fp8_bf16_down": True}, {"fp8": (1, 2), "down": False}),
    "head": ({"fp8_head": True, "head_slice_tokens": 32}, {"fp8": (1, 2), "head": True}),
}


@pytest.mark.parametrize("recipe", ["fp8", "fp8-master"])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_a_step_is_that_of_pytorch_with_fp8_operands(directory, blocks, recipe):
    """Both round to bf16 at the same places, but fp32 and fp64 sums round to other bf16 neighbours
    now and then, after which a value may go to another FP8 neighbour: every gradient is nearer to
    the oracle than FP8 is to bf16. A loss is as near as that of a bf16 recipe."""
    options, same = BLOCKS[blocks]
    loss, grads = first_step(directory, recipe, **options)
    want, true = Fp8Llama(CONFIG, WEIGHTS, **same).gradients(*batch(), A_CHUNK)
    noise = tolerance.delta("bf16", n_layers=4, n_chunks=2, longest_sum=352)
    assert abs(loss - want) < tolerance.loss_noise(noise, int((batch()[1] >= 0).sum()))
    off = errors(grads, true)
    assert max(off.values()) < GATE and np.mean(list(off.values())) < GATE / 2


def test_it_is_not_that_of_other_blocks(directory):
    _, grads = first_step(directory, "fp8")
    for blocks in ("all blocks", "down in bf16", "head"):
        _, other = Fp8Llama(CONFIG, WEIGHTS, **BLOCKS[blocks][1]).gradients(*batch(), A_CHUNK)
        _, same = Fp8Llama(CONFIG, WEIGHTS, **BLOCKS["default"][1]).gradients(*batch(), A_CHUNK)
        far, near = (np.mean(list(errors(grads, g).values())) for g in (other, same))
        assert near < 0.8 * far


def test_a_step_is_within_the_gate_of_bf16(directory, exact):
    found = first_step(directory, "fp8")
    assert passes(found, exact)
    # and it is no bf16 in disguise
    assert min(errors(found[1], exact[1]).values()) > 0.02


@pytest.mark.parametrize("wrong", [2.0**-3, 2.0**14], ids=["saturating", "flushing"])
def test_a_broken_fp8_fails_the_gate(exact, wrong):
    broken = Fp8Llama(CONFIG, WEIGHTS, fp8=(1, 2), wrong=wrong)
    assert not passes(broken.gradients(*batch(), A_CHUNK), exact)


@pytest.mark.parametrize("name", ["olmo2", "gemma2", "gemma3", "phi3", "granite", "qwen3-window"])
def test_blocks_of_every_kind(tmp_path, name):
    """With norms before, after, and both; biases, scales, caps, tied heads: all blocks and the head
    in FP8 against bf16, from the same fresh weights, with a z-loss. 3 blocks and a head have 13
    products forward and 14 backward."""
    config = families.CONFIGS[name] | {"hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    grads = {}
    all_fp8 = {"fp8_bf16_first": 0, "fp8_bf16_last": 0, "fp8_head": True}
    for recipe, options in {"bf16": {}, "fp8": all_fp8}.items():
        plan = make_plan(tmp_path, recipe, z_loss=1e-3, label_smoothing=0.1, **options)
        with Trainer(tmp_path, plan, batch, lr=0.0, init_weights=True) as trainer:
            list(trainer.steps(1))
            grads[recipe] = {k: torch.as_tensor(trainer.grad(k)).double() for k in trainer.params}
    off = errors(grads["fp8"], grads["bf16"])
    gate = (13 * 0.045**2 + 14 * 0.065**2) ** 0.5
    assert np.mean(list(off.values())) < gate and 0.02 < max(off.values()) < 2 * gate


WIDE = dict(hidden_size=64, intermediate_size=352, tie_word_embeddings=False)
DELTA_NET = dict(
    WIDE,
    layer_types=["linear_attention"] * 3,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
)
LATENT = dict(
    WIDE, q_lora_rank=16, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=20
)
LATENT |= dict(first_k_dense_replace=2, rope_scaling=None, rope_interleave=False)
LATENT |= dict(n_routed_experts=3, num_experts_per_tok=3, n_group=1, moe_intermediate_size=96)


def step_under_two_caps(where, n_layers, **options):
    """(weights, loss, gradients) of a step with all blocks in FP8, whose bits no cap changes."""
    options |= {"fp8_bf16_first": 0, "fp8_bf16_last": 0}
    plans = [make_plan(where, device_mem=cap, **options) for cap in (None, "2MiB")]
    resident, capped = (plan.report for plan in plans)
    assert capped["device_used_bytes"] < resident["device_used_bytes"]
    assert capped["saved_recompute_bytes"] > resident["saved_recompute_bytes"] == 0
    generator, weights, steps = torch.Generator().manual_seed(1), {}, []
    for p in plans[0].params():
        x = torch.randn(p.shape, generator=generator)
        weights[p.name] = x / p.shape[-1] ** 0.5 if len(p.shape) > 1 else 0.2 * x
        weights[p.name] *= 0.1 if "lora_B" in p.name else 1
        weights[p.name] += "_layernorm" in p.name
    trained = [k for k in weights if "lora_" in k]
    trained = trained or [k for k in weights if "correction_bias" not in k]
    for plan in plans:
        with Trainer(where, plan, batch, lr=0.0, init_weights=True) as trainer:
            for name, w in weights.items():
                trainer.write(name, w.numpy())
            (m,) = trainer.steps(1)
            grads = {k: torch.as_tensor(trainer.grad(k)).double() for k in trained}
            steps.append((m.loss, m.fp8_flushed, grads))
    (loss, flushed, grads), again = steps
    assert (loss, flushed) == again[:2] and flushed > 0
    assert all(torch.equal(again[2][k], g) for k, g in grads.items())
    return weights, loss, grads


@pytest.mark.parametrize(
    "oracle, config, products",
    [
        (Fp8DeltaNet, families.qwen3_5(**DELTA_NET), 5),
        (Fp8DeltaNet, families.qwen3_next(**DELTA_NET, mlp_only_layers=[0, 1, 2]), 4),
        (Fp8Latent, families.deepseek_v3(**LATENT), 8),
        (Fp8Latent, families.deepseek_v3(**LATENT | {"q_lora_rank": None}), 7),
    ],
    ids=["qwen3_5", "qwen3_next", "deepseek_v3", "deepseek_v3-q"],
)
def test_products_of_other_first_halves_have_fp8_operands(tmp_path, oracle, config, products):
    """3 blocks, each with so many products forward; and one product more backward."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights, loss, grads = step_under_two_caps(tmp_path, 3)
    near, far = (
        oracle(config, weights, fp8=(0, 1, 2), first=first).gradients(*batch(), A_CHUNK)
        for first in (True, False)
    )
    noise = tolerance.delta("bf16", n_layers=3, n_chunks=2, longest_sum=352)
    assert abs(loss - near[0]) < tolerance.loss_noise(noise, int((batch()[1] >= 0).sum()))
    gate = (3 * products * 0.045**2 + (3 * products + 1) * 0.065**2) ** 0.5
    off, of_bf16 = (list(errors(grads, x[1]).values()) for x in (near, far))
    assert max(off) < gate and np.mean(off) < min(gate / 2, 0.3 * np.mean(of_bf16))


OF_LATENT = "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"


@pytest.mark.parametrize(
    "oracle, config, targets, options",
    [
        (Fp8Llama, CONFIG, "all-linear", {}),
        (Fp8Llama, CONFIG, "q_proj,v_proj", {}),  # the MLP stores neither its input nor its product
        (Fp8Llama, CONFIG, "down_proj,o_proj", {}),
        (Fp8Llama, CONFIG, "gate_proj", {}),
        (Fp8Llama, CONFIG, "up_proj", {"fp8_bf16_down": True}),
        (Fp8DeltaNet, families.qwen3_5(**DELTA_NET), "all-linear", {}),
        (Fp8Latent, families.deepseek_v3(**LATENT), OF_LATENT, {}),
        (Fp8Latent, families.deepseek_v3(**LATENT | {"q_lora_rank": None}), "q_proj,kv_b_proj", {}),
    ],
    ids=["llama", "attention", "outputs", "gate", "up", "qwen3_5", "deepseek_v3", "deepseek_v3-q"],
)
def test_adapters_read_bf16_beside_products_in_fp8(tmp_path, oracle, config, targets, options):
    """Each product's frozen weights are in FP8 beside adapters in bf16. Attention's, the MLP's and
    a delta-net's blocks have at most 5 products of their own, latent attention's 8."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    n = config["num_hidden_layers"]
    lora = Lora(4, 12, targets)
    weights, loss, grads = step_under_two_caps(tmp_path, n, lora=lora, **options)
    same = {"down": not options, "lora_scale": 3.0}
    near, far = (
        oracle(config, weights, fp8=fp8, **same).gradients(*batch(), A_CHUNK)
        for fp8 in (range(n), ())
    )
    noise = tolerance.delta("bf16", n_layers=n, n_chunks=2, longest_sum=352)
    assert abs(loss - near[0]) < tolerance.loss_noise(noise, int((batch()[1] >= 0).sum()))
    off, of_bf16 = (list(errors(grads, {k: x[1][k] for k in grads}).values()) for x in (near, far))
    gate = (n * 4 * 0.045**2 + n * 4 * 0.065**2) ** 0.5
    assert max(off) < gate and np.mean(off) < min(gate / 2, 0.35 * np.mean(of_bf16))


def test_a_frozen_layer_of_the_family_with_the_most_tensors(tmp_path):
    """Gradients of frozen norms go to tensors that nobody reads: Gemma 3 has norms before, after,
    and of q and k."""
    config = families.CONFIGS["gemma3"] | {"hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    all_fp8 = {"fp8_bf16_first": 0, "fp8_bf16_last": 0, "fp8_head": True}
    assert make_plan(tmp_path, forward_only=True, **all_fp8).report["n_ops"] > 0
    seen = []
    for frozen in (0, 2):  # the embedding and the first block
        plan = make_plan(tmp_path, frozen_layers=frozen, **all_fp8)
        with Trainer(tmp_path, plan, batch, lr=0.0, init_weights=True) as trainer:
            (m,) = trainer.steps(1)
            last = [trainer.grad(k).tobytes() for k in trainer.params if ".layers.2." in k]
        seen.append((m.loss, last))
    assert seen[0] == seen[1] and len(seen[0][1]) > 8


def test_outliers_of_the_gated_product(directory, tmp_path):
    """Rows of gate and up that are 300 times the others: what is left of the rest keeps the loss.
    Most of it is lost: a warning says where, and the part is that of the oracle."""
    weights = {k: v.clone() for k, v in WEIGHTS.items()}
    for name in ("gate", "up"):
        weights[f"model.layers.1.mlp.{name}_proj.weight"][5] *= 17.0
    planted = ref.write_directory(tmp_path / "outliers", CONFIG, weights)
    bf16, fp8 = (first_step(planted, r) for r in ("bf16", "fp8"))
    oracle = Fp8Llama(CONFIG, weights, fp8=(1, 2)).gradients(*batch(), A_CHUNK)
    assert abs(fp8[0] - oracle[0]) < 0.02 and abs(fp8[0] - bf16[0]) < 0.1


PRODUCTS = 8  # of X in FP8 in a chunk: 2 blocks


def test_what_is_flushed_is_counted_and_warned_of(job, directory, tmp_path):  # noqa: F811
    """A row of gate and up that is 40000 times the others in the gated product. Fresh adapters
    change no value, whichever pass counts it."""
    weights = {k: v.clone() for k, v in WEIGHTS.items()}
    for name in ("gate", "up"):
        weights[f"model.layers.1.mlp.{name}_proj.weight"][5] *= 200.0
    planted = ref.write_directory(tmp_path / "outliers", CONFIG, weights)
    Fp8Product.flushed.clear()
    Fp8Llama(CONFIG, weights, fp8=(1, 2)).gradients(*batch(), A_CHUNK)
    want = torch.tensor(Fp8Product.flushed).view(-1, PRODUCTS).mean(0).max().item()
    seen = []
    adapters = (None, Lora(4), Lora(4, targets="q_proj"))
    for cap, lora in itertools.product((None, 3 << 20), adapters):
        plan = make_plan(planted, device_mem=cap, lora=lora)
        with Trainer(planted, plan, batch, lr=0.0) as trainer:
            (m,) = trainer.steps(1)
            seen.append((m.fp8_flushed, m.fp8_flushed_most))
    assert want > 0.01 and abs(seen[0][1] - want) < 0.05 * want
    assert seen[0][0] < seen[0][1] and len(set(seen)) == 1

    def run(model, *more):
        run_dir = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        options = job | {"--model": model, "--recipe": "fp8", "--steps": 2, "--run-dir": run_dir}
        done = penstock("train", *words(options), *more)
        assert done.returncode == 0, done.stderr
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return done.stderr, json.loads(lines[0]).get("fp8_flushed_most", 0)

    said, most = run(planted)
    assert said.count("of the gated product in block 1 became 0 in FP8") == 1 and most > 0.01
    said, most = run(planted, "--fp8", "bf16-down")
    assert "the gated product" not in said
    said, most = run(directory)
    assert "became 0 in FP8" not in said and most < 1e-3


# ---- around a step -------------------------------------------------------------------------------


def test_fast_accumulation_is_an_option_of_gpus_and_in_the_plan(directory):
    """Bits of the CPU backend do not depend on it. That it reaches a GPU's products is shown by
    tests/gpu/test_fp8_steps.py."""
    found = first_step(directory, "fp8")
    fast = first_step(directory, "fp8", fp8_fast_accumulation=True)
    assert found[0] == fast[0] and all(torch.equal(found[1][k], g) for k, g in fast[1].items())
    for given in (False, True):
        plan = make_plan(directory, fp8_fast_accumulation=given)
        assert plan.json()["fp8_fast_accumulation"] is given
        assert ("blocks, with fast accumulation; the first" in str(plan)) is given


@pytest.mark.parametrize("lora", [None, Lora(4)], ids=["all", "adapters"])
def test_a_resumed_run_has_the_same_bits(directory, tmp_path, lora):
    options = {"fp8_bf16_last": 0, "fp8_bf16_down": True, "fp8_head": True, "lora": lora}
    options |= {"fp8_fast_accumulation": True}
    kw = {"lr": 1e-3}
    with Trainer(directory, make_plan(directory, **options), batch, **kw) as trainer:
        list(trainer.steps(2))
        path = trainer.checkpoint(tmp_path / "c")
        want = [m.loss for m in trainer.steps(2)]
    checkpoint = Checkpoint(path)
    kept = checkpoint.plan_options
    assert kept["recipe"] == "fp8" and kept["fp8_bf16_last"] == 0
    assert kept["fp8_bf16_down"] == kept["fp8_head"] == kept["fp8_fast_accumulation"] == 1
    with Trainer.resume(checkpoint, directory, make_plan(directory, **options), batch) as trainer:
        assert [m.loss for m in trainer.steps(2)] == want
    for changed in ("fp8_bf16_down", "fp8_head", "fp8_fast_accumulation"):
        other = make_plan(directory, **options | {changed: False})
        name = changed.replace("_", "-")
        with pytest.raises(ps.InvalidError, match=f"{name} true, and this run has false"):
            Trainer.resume(checkpoint, directory, other, batch)


def test_a_checkpoint_of_what_was_taken_out_is_refused(directory, tmp_path):
    plan = make_plan(directory)
    with Trainer(directory, plan, batch, lr=1e-3) as trainer:
        list(trainer.steps(1))
        path = Path(trainer.checkpoint(tmp_path / "c"))
    manifest = json.loads((path / "manifest.json").read_text())
    for value, bad in ((0, False), (1, True)):  # older ones have the key
        manifest["batch"]["fp8_saved_gate_up"] = value
        (path / "manifest.json").write_text(json.dumps(manifest))
        if bad:
            with pytest.raises(ps.FormatError, match="with fp8-saved-gate-up, which this version"):
                Checkpoint(path)
        else:
            Checkpoint(path).close()


@pytest.mark.parametrize("exact", [None, 0, 1])
def test_older_checkpoints_have_fast_accumulation(directory, tmp_path, exact):
    """All trainings in FP8 had it before it was an option, but for those with fp8_exact, which was
    the option for a day."""
    with Trainer(directory, make_plan(directory), batch, lr=1e-3) as trainer:
        list(trainer.steps(1))
        path = Path(trainer.checkpoint(tmp_path / "c"))
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["batch"].pop("fp8_fast_accumulation") == 0
    manifest["batch"] |= {} if exact is None else {"fp8_exact": exact}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with Checkpoint(path) as older:
        assert older.plan_options["fp8_fast_accumulation"] == (0 if exact else 1)
        if exact:
            Trainer.resume(older, directory, make_plan(directory), batch).close()
            return
        with pytest.raises(
            ps.InvalidError, match="fp8-fast-accumulation true, and this run has false"
        ):
            Trainer.resume(older, directory, make_plan(directory), batch)


def test_weights_that_are_not_finite_stop_the_run(directory, tmp_path):
    """One infinite weight leaves its span without a scale: nothing saturates in silence."""
    weights = {k: v.clone() for k, v in WEIGHTS.items()}
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.inf
    bad = ref.write_directory(tmp_path / "bad", CONFIG, weights)
    with Trainer(bad, make_plan(bad, clip_norm=1), batch, lr=1e-3) as trainer:
        with pytest.raises(
            ps.NumericError, match="step 1: .*up_proj.weight had weights that are not"
        ):
            list(trainer.steps(1))


# ---- the command ---------------------------------------------------------------------------------


A100 = {"device_name": "NVIDIA A100-SXM4-80GB", "compute_capability": 80}


@pytest.mark.parametrize(
    "options,says",
    [
        ({"--seq-len": 40}, "--seq-len is 40, no multiple of 16"),
        ({"--chunk-tokens": 40}, "--chunk-tokens is 40, no multiple of 16"),
        (
            {"--fp8": "bf16-first=3"},
            "first 3 and the last 1 blocks stay in bf16, and the model has 4",
        ),
        ({"--recipe": "bf16", "--fp8": "bf16-last=2"}, "recipe bf16 has no FP8"),
        ({"--recipe": "bf16", "--fp8": "bf16-down"}, "recipe bf16 has no FP8"),
        ({"--recipe": "bf16", "--fp8": "head"}, "recipe bf16 has no FP8"),
        ({"--recipe": "bf16", "--fp8": "fast-accumulation"}, "recipe bf16 has no FP8"),
        (
            {"--fp8": "head", "--head-slice-tokens": 40},
            "--head-slice-tokens is 40, no multiple of 16",
        ),
        ({"--fp8": "bf16-first"}, "--fp8 bf16-first needs a value: --fp8 bf16-first=N"),
        ({"--fp8": "heads"}, "--fp8 has no key heads"),
        ({"--fp8-head": None}, "there is no option --fp8-head: give --fp8 head$"),
        ({"--hardware": A100}, "A100-SXM4-80GB has compute capability 8.0, and FP8 needs 8.9"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_fp8_does_not_take_is_refused(tiny_model, tmp_path, options, says):
    options = {"--model": tiny_model, "--seq-len": 64, "--recipe": "fp8"} | options
    if "--hardware" in options:
        rates = json.loads((ROOT / "docs/hardware-h200.json").read_text())
        (tmp_path / "a100.json").write_text(json.dumps(rates | options["--hardware"]))
        options["--hardware"] = tmp_path / "a100.json"
    refused(penstock("plan", *words(options)), says)


def test_a_size_that_is_no_multiple_of_16_is_refused(tiny_model, tmp_path):
    other = tmp_path / "model"
    shutil.copytree(tiny_model, other)
    (other / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 350}))
    done = penstock("plan", "--model", other, "--seq-len", 64, "--recipe", "fp8-master")
    refused(done, "intermediate_size is 350, no multiple of 16.*give --recipe fp32-master")
    for config, says in (
        (families.qwen3_5(**DELTA_NET | {"linear_key_head_dim": 5}), "twice .* is 20"),
        (families.qwen3_5(**DELTA_NET | {"linear_value_head_dim": 5}), "value_head_dim is 20"),
        (families.deepseek_v3(**LATENT | {"kv_lora_rank": 40}), "kv_lora_rank is 40"),
    ):
        (other / "config.json").write_text(json.dumps(config))
        refused(penstock("plan", "--model", other, "--seq-len", 64, "--recipe", "fp8"), says)
    (other / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 514}))
    plain = ["plan", "--model", other, "--seq-len", 64, "--recipe", "fp8-master"]
    refused(
        penstock(*plain, "--fp8", "head"), "vocab_size is 514, no multiple.*leave out --fp8 head"
    )
    assert penstock(*plain).returncode == 0


def test_rates_of_fp8_make_a_plan_for_a_gpu_faster(tiny_model, tmp_path):
    """Where a file has no rates of FP8, plans take 1.75 times bf16's."""
    (tmp_path / "big").mkdir()
    (tmp_path / "big/config.json").write_text((ROOT / "models/1b.json").read_text())
    rates = json.loads((ROOT / "docs/hardware-h200.json").read_text())
    bare = {k: v for k, v in rates.items() if not k.startswith("gemm_fp8")}
    step = {}
    for name, recipe, file in (
        ("bf16", "bf16", rates),
        ("fp8", "fp8", rates),
        ("head", "fp8", rates),
        ("bare", "fp8", bare),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(file))
        args = ["--model", tmp_path / "big", "--seq-len", 8192, "--recipe", recipe]
        args += ["--tokens-per-step", 8192, "--chunk-tokens", 8192, "--chunks-per-round", 1]
        args += ["--hardware", path, "--device-mem", "60GiB", "--json"]
        args += ["--fp8", "head"] if name == "head" else []
        step[name] = json.loads(penstock("plan", *args).stdout)["predicted_step_s"]
    assert 0.7 * step["bf16"] < step["fp8"] < 0.95 * step["bf16"]
    assert 0.8 * step["fp8"] < step["head"] < step["fp8"]
    assert abs(step["bare"] - step["fp8"]) < 0.05 * step["fp8"]


@pytest.mark.parametrize("adapts", [False, True], ids=["all", "adapters"])
def test_validation_samples_and_export_of_a_training(job, tmp_path, adapts):  # noqa: F811
    """A validation computes in FP8, as `eval` does with the recipe. Samples, `generate` and other
    programs compute in bf16, with the weights that an export or an adapter has."""
    run, out = tmp_path / "run", tmp_path / "out"
    data = ["--data", job["--data"], "--seq-len", 64]
    kept = ["--recipe", "fp8-master", "--fp8", "head,bf16-first=0"]
    kept += ["--fp8", "fast-accumulation"]
    lora = ["--lora-rank", 4] if adapts else []
    done = penstock(
        *("train", "--model", job["--model"], *data, *kept, *lora, "--steps", 2, "--lr", "1e-2"),
        *("--run-dir", run, "--val", job["--data"], "--val-every", 2, "--val-tokens", 128),
        *("--sample-every", 2, "--sample-ids", "5,6,7", "--sample", "tokens=6", "--out", out),
    )
    assert done.returncode == 0, done.stderr
    assert "\nfp8-bf16-first = 0\n" in (run / "run.toml").read_text()
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["fp8_bf16_first"], plan["fp8_head"]) == (0, True)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    model = ["--model", job["--model"], "--adapter", out] if adapts else ["--model", out]
    losses = {}
    for name, options in {"fp8": kept, "bf16": ["--recipe", "bf16"]}.items():
        args = ["eval", *model, *data, "--steps", 1, "--tokens-per-step", 128, *options, "--json"]
        losses[name] = json.loads(penstock(*args).stdout)["loss"]
    assert losses["fp8"] == last["val_loss"] and 0 < abs(losses["bf16"] - losses["fp8"]) < 0.05
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[-1])
    args = ["generate", *model, "--tokens", "5,6,7", "--max-new-tokens", 6, "--quiet"]
    told = penstock(*args).stdout
    assert [int(t) for t in told.replace(",", " ").split()][-6:] == sample["tokens"]
