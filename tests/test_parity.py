"""Penstock against PyTorch, transformers and finite differences: gradients of every tensor, losses
over 20 steps, directories.

Tolerances are those of tolerance.py. Observed at most: gradients in fp32 0.19 of the bound (PyTorch
in fp32: the same), in bf16 0.73; losses in fp32 1e-7 (bound 2.9e-6).
"""

import contextlib
import functools
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import reference as ref
import tolerance
import torch
import transformers
from families import LLAMA3
from penstock.model import ModelConfig
from penstock.plan import Hardware, Plan
from penstock.train import Trainer
from tolerance import UNIT, check_gradients

ROOT = pathlib.Path(__file__).resolve().parent.parent

SEQ, N_SEQ, END = 40, 5, 0  # tokens a sequence, sequences a step, the token that ends a document
STEPS, PEAK, FLOOR, WARMUP, CLIP, EPS = 20, 2e-3, 2e-4, 3, 4.0, 1e-5
MODELS = {
    "llama": ("tiny-llama", {}),
    "llama3": ("tiny-llama", {"rope_scaling": LLAMA3}),
    "linear": ("tiny-llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "qwen2": ("tiny-qwen2", {}),
    "qwen3": ("tiny-qwen3", {}),
}
FAMILIES = ["llama", "llama3", "qwen2", "qwen3"]
# name: (tokens a chunk, chunks a round, rounds that it gives, chunks in a step)
LAYOUTS = {
    "one-a-chunk": (40, 5, 1, 5),
    "packed": (120, 2, 1, 2),
    "sliced-4": (10, 20, 1, 20),
    "uneven-slices": (16, 6, 3, 15),
    "rounds": (40, 2, 3, 5),
    "packed-rounds": (80, 1, 3, 3),
    "sliced-rounds": (10, 4, 5, 20),
}


# ---- what is trained -----------------------------------------------------------------------------


@functools.cache
def config(name):
    base, changes = MODELS[name]
    return {**json.loads((ROOT / "models" / f"{base}.json").read_text()), **changes}


@functools.cache
def weights(name):
    return ref.random_weights(config(name), seed=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    @functools.cache
    def make(name):
        return ref.write_directory(
            tmp_path_factory.mktemp("parity") / name, config(name), weights(name)
        )

    return make


@functools.cache
def batch(step, documents=True, vocab=512):
    """(tokens, targets) of a step. Documents of about 12 tokens end anywhere, so in every layout
    some cross a slice's edge and some end on one; the token that ends one predicts nothing, and a
    tenth of the other targets is masked as well."""
    r = np.random.default_rng([7, step])
    t = np.minimum((vocab * r.random((N_SEQ, SEQ + 1)) ** 2).astype(np.int32), vocab - 1)
    for i in range(
        1, SEQ + 1
    ):  # half of the tokens follow from the one before: there is something to learn
        follows = r.random(N_SEQ) < 0.5
        t[follows, i] = (5 * t[follows, i - 1] + 3) % vocab
    ends, masked = r.random((N_SEQ, SEQ + 1)) < 0.08, r.random((N_SEQ, SEQ)) < 0.1
    if documents:
        t[ends] = END
    tokens, targets = t[:, :-1].copy(), t[:, 1:].copy()
    if documents:
        targets[(tokens == END) | masked] = -1
    return tokens, targets


def documented(step):
    return batch(step, True)


def plain(step):
    return batch(step, False)


def lr_at(step):
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    return FLOOR + (PEAK - FLOOR) * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2


def make_plan(where, layout="one-a-chunk", recipe="fp32", **more):
    chunk, a_round, n_rounds, n_chunks = LAYOUTS[layout]
    plan = Plan(
        ModelConfig.read(where),
        seq_len=SEQ,
        tokens_per_step=SEQ * N_SEQ,
        recipe=recipe,
        chunk_tokens=chunk,
        chunks_per_round=a_round,
        threads=2,
        hardware=Hardware.estimate(2, "cpu"),
        **{"clip_norm": CLIP, "document_end_token": END, "router_aux_loss": 0.0} | more,
    )
    assert (plan.report["n_rounds"], plan.report["n_chunks"]) == (n_rounds, n_chunks)
    return plan


def smallest_plan(where, layout):
    """The plan of the least device memory: everything is streamed or recomputed, updates run at
    home, the head goes in slices of 7 tokens."""
    chunk, a_round, _, _ = LAYOUTS[layout]
    least, _ = Plan.smallest(
        ModelConfig.read(where),
        seq_len=SEQ,
        tokens_per_step=SEQ * N_SEQ,
        recipe="fp32",
        chunk_tokens=chunk,
        chunks_per_round=a_round,
        head_slice_tokens=7,
        threads=2,
        hardware=Hardware.estimate(2, "cpu"),
    )
    plan = make_plan(where, layout, device_mem=least, head_slice_tokens=7)
    assert (
        plan.report["resident_param_units"] < plan.report["n_units"]
        and plan.report["resident_update_units"] == 0
    )
    return plan


@contextlib.contextmanager
def open_trainer(where, layout="one-a-chunk", recipe="fp32", data=documented, plan=None, **more):
    options = {
        "lr": PEAK,
        "min_lr": FLOOR,
        "lr_schedule": "cosine",
        "warmup_steps": WARMUP,
        "total_steps": STEPS,
        **more,
    }
    end = END if data is documented else -1
    plan = plan or make_plan(where, layout, recipe, document_end_token=end)
    with Trainer(where, plan, data, **options) as trainer:
        yield trainer


def run(trainer, n):
    return list(trainer.steps(n))


def gradients_of(trainer):
    """Of all that is trained: a router's correction bias is not."""
    names = [name for name in trainer.params if not name.endswith("correction_bias")]
    return {name: trainer.grad(name) for name in names}


# ---- the other side ------------------------------------------------------------------------------


def oracle(name, documents=True, rounded=False):
    w = {k: v.bfloat16() for k, v in weights(name).items()} if rounded else weights(name)
    return ref.Reference(config(name), w, document_end_token=END if documents else None)


@functools.cache
def gradients(name, documents, rounded=False):
    return oracle(name, documents, rounded).gradients(*batch(0, documents))


@functools.cache
def training(name, eps):
    """The 20 steps in fp64: figures of the steps, weights after the last."""
    model = oracle(name)
    figures = model.train(documented, STEPS, lr_at, CLIP, eps=eps)
    return figures, {k: v.detach().numpy() for k, v in model.w.items()}


def delta(recipe, layout):
    return tolerance.delta(recipe, n_layers=4, n_chunks=LAYOUTS[layout][3], longest_sum=512)


def loss_noise(recipe, layout, n_valid):
    return tolerance.loss_noise(delta(recipe, layout), n_valid)


# ---- gradients -----------------------------------------------------------------------------------

GRADIENT_CASES = (
    [(m, layout, True) for m in ("llama", "qwen2", "qwen3") for layout in LAYOUTS]
    + [(m, layout, False) for m in FAMILIES for layout in ("packed", "sliced-4")]
    + [
        (m, layout, True)
        for m in ("linear", "llama3")
        for layout in ("one-a-chunk", "uneven-slices")
    ]
)


@pytest.mark.parametrize(
    "name, layout, documents",
    GRADIENT_CASES,
    ids=[f"{m}-{layout}-{'documents' if d else 'plain'}" for m, layout, d in GRADIENT_CASES],
)
def test_gradients_of_every_tensor(directory, name, layout, documents):
    expected = gradients(name, documents)
    with open_trainer(directory(name), layout, data=documented if documents else plain) as trainer:
        (first,) = run(trainer, 1)
        check_gradients(gradients_of(trainer), expected, delta("fp32", layout))
    assert abs(first.loss - expected[0]) < loss_noise("fp32", layout, first.valid_tokens)
    assert first.valid_tokens == (batch(0, documents)[1] >= 0).sum()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", ["rounds", "sliced-4"])
def test_gradients_in_the_smallest_device(directory, name, layout):
    with open_trainer(
        directory(name), layout, plan=smallest_plan(directory(name), layout)
    ) as trainer:
        run(trainer, 1)
        check_gradients(gradients_of(trainer), gradients(name, True), delta("fp32", layout))


@pytest.mark.parametrize("layout", ["packed", "uneven-slices"])
def test_a_token_that_begins_documents(directory, layout):
    model = ref.Reference(config("llama"), weights("llama"), document_token=END)
    where = directory("llama")
    plan = make_plan(where, layout, document_end_token=-1, document_token=END)
    with open_trainer(where, plan=plan) as trainer:
        run(trainer, 1)
        check_gradients(
            gradients_of(trainer), model.gradients(*documented(0)), delta("fp32", layout)
        )


@pytest.mark.parametrize("recipe", ["bf16", "fp32-master"])
@pytest.mark.parametrize("layout", ["one-a-chunk", "uneven-slices"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_gradients_in_bf16(directory, name, layout, recipe):
    with open_trainer(directory(name), layout, recipe) as trainer:
        run(trainer, 1)
        check_gradients(
            gradients_of(trainer), gradients(name, True, rounded=True), delta(recipe, layout)
        )


# ---- twenty steps --------------------------------------------------------------------------------
# AdamW divides by |g| + eps: an element whose gradient is as small as the rounding noise n = delta
# rms(g) moves anyhow. With |g| spread evenly near 0 (density about 0.4 / rms), the mean square
# error of an update, in units of lr, is integral of (n / max(|g|, eps))^2 = 1.6 delta^2 rms / eps,
# so its root is kappa = delta sqrt(1.6 rms / eps) (at least delta). Here EPS = 1e-5: with rms(g) =
# |g| / sqrt(N) = 5e-3 and delta = 1.2e-5 kappa is 3e-4. The errors of the elements have random
# signs, so that after k steps the loss is wrong by kappa * |g| * sqrt(sum of lr^2), taken three
# times for 3 sigma: 2e-5 at the end. With PyTorch's eps = 1e-8 the problem is ill-posed in itself:
# the elements below the noise, a share of delta, move by lr either way, so that kappa is
# sqrt(delta).


def check_steps(steps, figures, recipe, layout, kappa, weights_noise=0.0):
    """kappa: relative error of an update; weights_noise: error of a loss by rounded weights."""
    walk = 0.0
    for m, (loss, norm, lr) in zip(steps, figures, strict=True):
        bound = math.hypot(
            loss_noise(recipe, layout, m.valid_tokens),
            3 * kappa * norm * math.sqrt(walk),
            3 * weights_noise,
        )
        assert abs(m.loss - loss) < bound, (
            f"step {m.step}: {m.loss} against {loss}, bound {bound:.2g}"
        )
        # what is an error of the loss in nats is for the norm one relative to itself
        assert abs(m.grad_norm / norm - 1) < bound, (
            f"step {m.step}: norm {m.grad_norm} against {norm}, bound {bound:.2g}"
        )
        assert m.lr == pytest.approx(lr, rel=1e-12)
        walk += lr * lr


def check_twenty_steps(where, name, layout, plan):
    """Losses (observed within 4e-7), gradient norms (4e-7), and how far each tensor went (3e-4 of
    its way, biases of k; others 3e-5)."""
    figures, final = training(name, EPS)
    assert figures[0][1] > CLIP > figures[-1][1]  # clipped at first, not at the end
    assert figures[0][0] - figures[-1][0] > 0.3  # it learns
    d, grads = delta("fp32", layout), gradients(name, True)[1]
    rms = figures[0][1] / math.sqrt(sum(w.numel() for w in weights(name).values()))
    with open_trainer(where, layout, plan=plan, eps=EPS) as trainer:
        check_steps(run(trainer, STEPS), figures, "fp32", layout, d * math.sqrt(1.6 * rms / EPS))
        for tensor, begun in weights(name).items():
            way = np.linalg.norm(final[tensor] - begun.numpy())
            # k updates, each wrong by its tensor's kappa in the same direction, and k roundings of
            # the weights in fp32
            kappa = d * math.sqrt(1.6 * max(grads[tensor].square().mean().sqrt().item() / EPS, 1))
            bound = kappa + UNIT["fp32"] * math.sqrt(STEPS) * begun.norm().item() / way
            error = np.linalg.norm(trainer.read(tensor) - final[tensor]) / way
            assert error < bound, f"{tensor}: {error:.2g} of its way, bound {bound:.2g}"


@pytest.mark.parametrize(
    "layout", ["one-a-chunk", "packed", "sliced-4", "uneven-slices", "packed-rounds"]
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_twenty_steps(directory, name, layout):
    check_twenty_steps(directory(name), name, layout, None)


@pytest.mark.parametrize("layout", ["packed", "sliced-4"])
def test_twenty_steps_with_scaled_rope(directory, layout):
    check_twenty_steps(directory("llama3"), "llama3", layout, None)


@pytest.mark.parametrize(
    "name, layout", [("llama", "sliced-rounds"), ("qwen2", "rounds"), ("qwen3", "sliced-4")]
)
def test_twenty_steps_in_the_smallest_device(directory, name, layout):
    check_twenty_steps(directory(name), name, layout, smallest_plan(directory(name), layout))


def test_twenty_steps_with_the_eps_that_people_use(directory):
    figures, _ = training("llama", 1e-8)
    with open_trainer(directory("llama"), "packed", eps=1e-8) as trainer:
        check_steps(
            run(trainer, STEPS), figures, "fp32", "packed", math.sqrt(delta("fp32", "packed"))
        )


@pytest.mark.parametrize("recipe", ["bf16", "fp32-master"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_twenty_steps_in_bf16(directory, name, recipe):
    """Beside the noise of a loss (8e-3), rounded weights: each carries u |w|, in fp32-master once,
    in bf16 (stored rounded, stochastically) once a step. The loss feels u sqrt(k) |g w|, |g w|
    being the norm of gradient times weight (0.5), three times for 3 sigma: 6e-3 and 2.6e-2.
    Observed: losses within 3e-3 (fp32-master) and 8e-3 (bf16); the loss itself falls by 0.6."""
    figures, _ = training(name, EPS)
    _, grads, _ = gradients(name, True)
    product = math.sqrt(sum((g * weights(name)[n]).square().sum().item() for n, g in grads.items()))
    k = STEPS if recipe == "bf16" else 1
    with open_trainer(directory(name), "uneven-slices", recipe, eps=EPS) as trainer:
        check_steps(
            run(trainer, STEPS),
            figures,
            recipe,
            "uneven-slices",
            0.0,
            weights_noise=UNIT[recipe] * math.sqrt(k) * product,
        )


def test_stochastic_rounding_follows_the_seed(directory):
    def train(seed):
        with open_trainer(directory("llama"), "packed", "bf16", seed=seed) as trainer:
            losses = [m.loss for m in run(trainer, 5)]
            return losses, {n: trainer.read(n) for n in trainer.params}

    (losses, a), (again, b), (other, c) = train(1), train(1), train(2)
    assert losses == again and all(np.array_equal(a[n], b[n]) for n in a)
    assert (
        losses[0] == other[0] and losses[1:] != other[1:]
    )  # the first loss comes before the first rounding
    matrices = [n for n in a if a[n].ndim == 2]
    assert all(not np.array_equal(a[n], c[n]) for n in matrices)
    # unbiased: over all elements the two differ with mean 0 (each by at most two roundings' u |w| a
    # step; 6 sigma)
    diff = np.concatenate([((a[n] - c[n]) / UNIT["bf16"]).ravel() for n in matrices])
    assert abs(diff.mean()) < 6 * diff.std() / math.sqrt(diff.size)


# ---- finite differences --------------------------------------------------------------------------

PARTS = [
    "embed_tokens",
    "input_layernorm",
    "post_attention_layernorm",
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "k_proj.bias",
    "q_norm",
    "k_norm",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "model.norm",
    "lm_head",
    "",
]


@pytest.mark.parametrize("name", [pytest.param("qwen2", marks=pytest.mark.long), "qwen3"])
def test_finite_differences(directory, name):
    """The loss along random directions, through one kind of tensor or all of them, against gradient
    times direction. A direction moves each weight by a random share of its tensor's rms and as much
    along the gradient, so that the slope is not near 0. Two central differences, at h and h/2, are
    extrapolated: D = (4 D(h/2) - D(h)) / 3. What is left is smaller than their difference by about
    h^2 (taken: a tenth of it), and the loss's own noise over h. h is such that the loss changes by
    at most 0.1. The smallest device, so that updates run on the host and parameters may be written
    between steps."""
    rng, (tokens, targets) = np.random.default_rng(3), documented(0)
    with open_trainer(
        directory(name),
        plan=smallest_plan(directory(name), "sliced-4"),
        data=lambda step: (tokens, targets),
        lr=0.0,
        min_lr=0.0,
        weight_decay=0.0,
    ) as trainer:
        run(trainer, 1)
        begun, grads = (
            {n: read(n) for n in trainer.params} for read in (trainer.read, trainer.grad)
        )
        noise = loss_noise("fp32", "sliced-4", (targets >= 0).sum())

        def loss_at(direction, by):
            for n, d in direction.items():
                trainer.write(n, begun[n] + by * d)
            return run(trainer, 1)[0].loss

        for part in PARTS:
            direction = {}
            for n in (n for n in begun if part in n):
                uphill = grads[n] / np.sqrt(np.mean(grads[n] ** 2))
                direction[n] = (
                    0.5
                    * np.sqrt(np.mean(begun[n] ** 2))
                    * (rng.standard_normal(uphill.shape) + uphill)
                )
            if not direction:
                continue
            slope = sum(
                float(np.sum(grads[n].astype(np.float64) * d)) for n, d in direction.items()
            )
            h = min(0.02, 0.1 / abs(slope))
            coarse, fine = (
                (loss_at(direction, by) - loss_at(direction, -by)) / (2 * by) for by in (h, h / 2)
            )
            loss_at(direction, 0.0)
            bound = 0.1 * abs(fine - coarse) + noise / h
            assert abs((4 * fine - coarse) / 3 - slope) < bound, (
                f"{part or 'all'}: {fine} against {slope}, bound {bound:.2g}"
            )
            assert bound < 0.02 * abs(slope), (
                f"{part or 'all'}: the bound {bound:.2g} says little about a slope of {slope:.2g}"
            )


# ---- transformers --------------------------------------------------------------------------------


def transformers_loss(where, tokens, targets):
    """The loss of a directory as transformers computes it, in fp64; nothing may be missing or left
    over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        where, output_loading_info=True, dtype=torch.float64, attn_implementation="eager"
    )
    assert not any(
        info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    ), info
    model.config._experts_implementation = "eager"  # the others have no fp64
    with torch.no_grad():
        logits = model(torch.as_tensor(tokens).long()).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.as_tensor(targets).long().flatten(), ignore_index=-1
    ).item()


def near(a, b):
    """transformers itself takes norms and RoPE in fp32, even in an fp64 model: twice the noise of a
    loss."""
    return abs(a - b) < 2 * loss_noise("fp32", "packed", SEQ * N_SEQ)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_a_fresh_directory_gives_transformers_the_same_loss(tmp_path, name):
    subprocess.run(
        [
            sys.executable,
            ROOT / "models/init_model.py",
            ROOT / f"models/{name}.json",
            tmp_path / "m",
            "--seed",
            "3",
        ],
        check=True,
    )
    with open_trainer(tmp_path / "m", "packed", data=plain) as trainer:
        (first,) = run(trainer, 1)
    assert near(first.loss, transformers_loss(tmp_path / "m", *plain(0)))


@pytest.mark.parametrize(
    "recipe, dtype", [("fp32", "fp32"), ("fp32-master", "fp32"), ("bf16", "bf16")]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_trained_model_opens_in_transformers(directory, tmp_path, name, recipe, dtype):
    with open_trainer(directory(name), "packed", recipe, data=plain) as trainer:
        run(trainer, 3)
        trainer.save(tmp_path / "saved", dtype)
        read = {n: trainer.read(n) for n in trainer.params}
        (after,) = run(trainer, 1)  # the loss of the fourth step is that of the saved weights
    _, saved = ref.read_directory(tmp_path / "saved", torch.float32)
    assert set(saved) == set(read)
    config, given = (
        json.loads((d / "config.json").read_text()) for d in (tmp_path / "saved", directory(name))
    )
    assert config.pop("torch_dtype") == {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    given.pop("torch_dtype", None)
    assert config == given
    assert all(saved[n].numpy().tobytes() == read[n].tobytes() for n in read)
    assert any(not np.array_equal(read[n], weights(name)[n].numpy()) for n in read)
    loss = transformers_loss(tmp_path / "saved", *plain(3))
    if recipe == "fp32":
        assert near(after.loss, loss)
    # and the rounded weights, u |g w| with |g w| = 0.5 (see above), where the directory has the
    # master's
    else:
        assert abs(after.loss - loss) < math.hypot(
            loss_noise(recipe, "packed", SEQ * N_SEQ), 3 * UNIT[recipe] * 0.5
        )


HF = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama3": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    ),
    "llama-tied": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"tie_word_embeddings": True},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen2-tied": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"tie_word_embeddings": True},
    ),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 24}),
    "qwen3-tied": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {"head_dim": 24, "tie_word_embeddings": True},
    ),
}


@pytest.mark.oldest
@pytest.mark.parametrize("name", list(HF))
def test_a_directory_of_transformers_trains_as_it_is(tmp_path, name):
    make_config, make_model, more = HF[name]
    torch.manual_seed(0)
    model = make_model(
        make_config(
            **{
                "vocab_size": 512,
                "hidden_size": 64,
                "intermediate_size": 176,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "tie_word_embeddings": False,
                **more,
            }
        )
    )
    with torch.no_grad():
        for p in model.parameters():  # norm weights and biases too
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(tmp_path / "m", max_shard_size="200KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    losses = []
    with open_trainer(tmp_path / "m", "packed", data=plain) as trainer:
        losses = [m.loss for m in run(trainer, 2)]
        trainer.save(tmp_path / "saved", "fp32")
        (third,) = run(trainer, 1)
    assert near(losses[0], transformers_loss(tmp_path / "m", *plain(0)))
    assert near(third.loss, transformers_loss(tmp_path / "saved", *plain(2)))
