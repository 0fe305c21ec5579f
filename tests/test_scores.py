"""Models with a `score`: classifiers, regression, reward models; pooled embeddings. The oracle is
transformers' ...ForSequenceClassification, on documents that each are a row of their own."""

import functools
import json
import shutil
import subprocess

import numpy as np
import peft
import pytest
import torch
from conftest import BUILD, called, write_shard
from families import llama, qwen3
from penstock import (
    Dataset,
    FormatError,
    Generator,
    Hardware,
    InvalidError,
    Lora,
    ModelConfig,
    Plan,
    Trainer,
    data,
    embed,
    merge,
    score,
)
from penstock.files import DataError
from penstock.labels import Labels, document, pair
from penstock.packing import Packer
from penstock.score import embeddings, scores
from penstock.shards import BEGINS_DOCUMENT, IS_TARGET, ShardWriter
from penstock.tokenizer import train_tokenizer
from penstock.tolerance import note_spread
from safetensors.torch import load_file, save_file
from test_hosts import trained
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

ROW, PAD = 24, 1
HARDWARE = Hardware.estimate(2, "cpu")
LABELS = {"single-label": 3, "multi-label": 5, "regression": 1, "pairs": 1}
TYPES = {
    "single-label": "single_label_classification",
    "multi-label": "multi_label_classification",
    "regression": "regression",
    "pairs": None,
}
FAMILIES = {"llama": llama(tie_word_embeddings=True), "qwen3": qwen3()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """make(family, problem): a classifier's directory; problem None: the language model's."""

    @functools.cache
    def make(family, problem):
        where = tmp_path_factory.mktemp("scores") / "model"
        torch.manual_seed(3)
        cfg = FAMILIES[family]
        cfg = AutoConfig.for_model(**{k: v for k, v in cfg.items() if k != "architectures"})
        auto = AutoModelForCausalLM
        if problem:
            auto = AutoModelForSequenceClassification
            cfg.num_labels, cfg.problem_type = LABELS[problem], TYPES[problem]
        model = auto.from_config(cfg)
        for name, p in model.named_parameters():
            if p.ndim > 1:  # scores far from 0
                torch.nn.init.normal_(p, std=0.3 if name == "score.weight" else 0.08)
        model.save_pretrained(where)
        return where

    return make


@functools.cache
def documents(problem, seed=5):
    """(tokens, target as its float or number) of documents; of pairs, (chosen, rejected)."""
    rng = np.random.default_rng(seed)

    def tokens(n):
        return rng.integers(3, 512, n).astype(np.uint32)

    lengths = [1, 5, 7, 11, 9, 2, 13, 8, 6, 10, 4]
    if problem == "pairs":
        return [(tokens(n), tokens(m)) for n, m in zip(lengths, lengths[::-1]) if n + m <= ROW]
    draw = {
        "single-label": lambda: int(rng.integers(3)),
        "multi-label": lambda: [int(x) for x in np.flatnonzero(rng.integers(2, size=5))],
        "regression": lambda: float(rng.normal()),
    }[problem]
    return [(tokens(n), draw()) for n in lengths]


def write(where, problem, docs, seq_len=ROW):
    labels = Labels(problem, given=LABELS[problem] if problem.endswith("label") else 0)
    writer = ShardWriter(
        where, "train", "penstock", 512, 10**6, True, row_tokens=seq_len, pad=PAD, labels=labels
    )
    packer = Packer(writer, seq_len, PAD, "drop")
    for doc in docs:
        if problem == "pairs":
            ids = np.concatenate(doc)
            judged, targets = pair(*map(len, doc))
            begins = [0, len(doc[0])]
        else:
            ids, begins = doc[0], [0]
            judged, targets = document(ids, labels.target({"label": doc[1]}, "here"))
        flags = judged * np.uint8(IS_TARGET)
        flags[begins] |= BEGINS_DOCUMENT
        packer.append(ids, flags, targets)
    packer.end()
    writer.close()
    return where


def scores_of(model, docs):
    """Each document alone, padded at the right."""
    n = max(map(len, docs))
    ids = torch.full((len(docs), n), PAD)
    for row, d in zip(ids, docs):
        row[: len(d)] = torch.as_tensor(d.astype(np.int64))
    return model(input_ids=ids, attention_mask=(ids != PAD).long())


def expected(where, problem, docs, spread=None):
    """(loss, what is right, scores, gradients) in fp64. spread: gets the squares of every
    gradient's spread (tolerance.py)."""
    model = AutoModelForSequenceClassification.from_pretrained(where, dtype=torch.float64)
    if spread is not None:
        note_spread(model, spread)
    flat = [d for pair in docs for d in pair] if problem == "pairs" else [d for d, _ in docs]
    z = scores_of(model, flat).logits
    if problem == "pairs":
        loss = -torch.nn.functional.logsigmoid(z[::2] - z[1::2]).mean()
        right = (z[::2] > z[1::2]).double().mean()
    else:
        y = [t for _, t in docs]
        if problem == "multi-label":
            y = [[float(i in t) for i in range(5)] for t in y]
        y = torch.tensor(y, dtype=torch.long if problem == "single-label" else torch.float64)
        loss = model.loss_function(logits=z, labels=y, pooled_logits=z, config=model.config)
        right = {
            "single-label": lambda: (z.argmax(1) == y).double().mean(),
            "multi-label": lambda: ((z > 0) == (y > 0)).double().mean(),
            "regression": lambda: (z[:, 0] - y).abs().mean(),
        }[problem]()
    loss.backward()
    grads = {n: p.grad.numpy() for n, p in model.named_parameters()}
    return loss.item(), right.item(), z.detach().numpy(), grads


def plan_for(where, problem, **more):
    model = ModelConfig.read(where).score(problem, LABELS[problem])
    options = {"seq_len": ROW, "recipe": "fp32", "clip_norm": 0.0, "hardware": HARDWARE, **more}
    if options.pop("small", False):
        options["device_mem"] = Plan.smallest(model, **options)[0]
    return Plan(model, **options)


LAYOUTS = {
    "whole": {},
    "rounds": {"chunk_tokens": ROW, "chunks_per_round": 2, "head_slice_tokens": 10},
    "slices": {"chunk_tokens": 10, "small": True},  # of a sequence
    "devices": {"chunk_tokens": ROW, "chunks_per_round": 1, "gpus": 2},
}
CASES = [("llama", problem, "whole") for problem in ("single-label", "pairs")]
CASES += [("qwen3", problem, "rounds") for problem in ("multi-label", "regression", "pairs")]
CASES += [("qwen3", "single-label", "slices"), ("llama", "pairs", "devices")]


def check(trainer, where, problem, docs):
    """fp32 leaves 2^-24 of each of 20 roundings a layer, sums of 512 terms and cancelled ones."""
    loss, right, _, grads = expected(where, problem, docs)
    (m,) = trainer.steps(1)
    assert m.valid_tokens == len(docs)
    assert m.loss == pytest.approx(loss, rel=3e-6, abs=1e-6)
    assert m.right == pytest.approx(right, rel=3e-6)
    assert set(trainer.params) == set(grads)
    for name, want in grads.items():
        error = np.linalg.norm(trainer.grad(name) - want) / np.linalg.norm(want)
        assert error < 2e-5, name


@pytest.mark.parametrize("family, problem, layout", CASES)
def test_loss_and_every_gradient(directory, tmp_path, family, problem, layout):
    where, docs = directory(family, problem), documents(problem)
    n = Dataset(write(tmp_path, problem, docs), 512).n_sequences(ROW)
    plan = plan_for(where, problem, tokens_per_step=n * ROW, **LAYOUTS[layout])
    with Trainer(where, plan, data=tmp_path, lr=0.0) as trainer:
        check(trainer, where, problem, docs)


def test_scores_and_embeddings_are_those_of_transformers(directory):
    """Packed documents are unaffected by their neighbours: each has the bits that it has alone."""
    where = directory("qwen3", "single-label")
    docs = [d for d, _ in documents("single-label")]
    options = {"recipe": "fp32", "hardware": HARDWARE}
    model = AutoModelForSequenceClassification.from_pretrained(where, dtype=torch.float64)
    with torch.no_grad():
        states = [model.model(torch.as_tensor(d.astype(int))[None])[0][0].numpy() for d in docs]
        want = scores_of(model, docs).logits.numpy()
    got = scores(where, docs, ROW, **options)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    assert all((scores(where, [d], ROW, **options) == row).all() for d, row in zip(docs[:3], got))
    for pool, of in (("mean", lambda x: x.mean(0)), ("last", lambda x: x[-1])):
        got = embeddings(where, docs, ROW, pool, pool == "last", **options)
        want = np.stack([of(x) for x in states])
        if pool == "last":
            want /= np.linalg.norm(want, axis=1, keepdims=True)
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    tied = directory("llama", None)  # a language model whose head is its table
    assert embeddings(tied, docs[:2], ROW, **options).shape == (2, 64)


@pytest.mark.parametrize("problem", ["single-label", "pairs"])
def test_two_hosts_train_a_score_as_one(directory, tmp_path, problem):
    """A language model's, whose head each task draws. A total is the same sum of two contributions;
    a loss is added in two parts, of so many documents as a step has at most."""
    shards = write(tmp_path / "shards", problem, documents(problem))
    cut = ("--seq-len", ROW, "--chunk-tokens", ROW, "--tokens-per-step", 2 * ROW)
    more = (*cut, "--recipe", "fp32", "--steps", 2)
    model = directory("llama", None)
    one, two = (trained(model, shards, tmp_path / str(n), *more, n=n) for n in (1, 2))
    assert (two[0], two[1][1:]) == (one[0], one[1][1:]) and len(one[0]) == 2
    assert np.allclose(two[1][0], one[1][0], rtol=2 * 2 * ROW * 2.0**-53, atol=0)
    rights = [
        [json.loads(line)["accuracy"] for line in open(tmp_path / n / "metrics.jsonl")]
        for n in ("1", "2")
    ]
    assert rights[0] == rights[1]


@pytest.mark.parametrize("problem", ["multi-label", "pairs"])
def test_a_language_model_becomes_one_that_opens_in_transformers(directory, tmp_path, problem):
    """The head is drawn from the seed; what is saved has the trained scores, and goes on."""
    where, docs = directory("llama", None), documents(problem)
    write(tmp_path / "data", problem, docs)
    plan = plan_for(where, problem, tokens_per_step=2 * ROW)
    with Trainer(where, plan, data=tmp_path / "data", lr=1e-3, seed=7) as trainer:
        first = trainer.read("score.weight")
        assert abs(first.std() - 0.02) < 4e-3
        list(trainer.steps(3))
        trainer.save(tmp_path / "out", "fp32")
        checkpoint = trainer.checkpoint(tmp_path / "checkpoints")
        (later,) = trainer.steps(1)
    with Trainer.resume(checkpoint, where, plan, data=tmp_path / "data") as trainer:
        (resumed,) = trainer.steps(1)
    assert resumed.loss == later.loss
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.num_labels == LABELS[problem]
    assert model.config.problem_type == TYPES[problem]
    flat = [d for pair in docs for d in pair] if problem == "pairs" else [d for d, _ in docs]
    want = scores_of(model, flat).logits.detach().numpy()
    got = scores(tmp_path / "out", flat, ROW, recipe="fp32", hardware=HARDWARE)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("base", [None, "regression"])
def test_lora_trains_the_score_as_peft_saves_it(directory, tmp_path, base):
    where, docs = directory("llama", base), documents("regression")
    write(tmp_path / "data", "regression", docs)
    lora = Lora(3, alpha=6.0, targets="q_proj,v_proj")
    plan = plan_for(where, "regression", tokens_per_step=2 * ROW, lora=lora)
    with Trainer(where, plan, data=tmp_path / "data", lr=1e-2, seed=7) as trainer:
        assert [n for n in trainer.params if n == "score.weight"]
        if base:
            own = AutoModelForSequenceClassification.from_pretrained(where).score.weight
            assert (trainer.read("score.weight") == own.detach().numpy()).all()
        list(trainer.steps(2))
        trainer.save(tmp_path / "adapter")
    flat = [d for d, _ in docs]
    got = scores(where, flat, ROW, tmp_path / "adapter", recipe="fp32", hardware=HARDWARE)
    model = AutoModelForSequenceClassification.from_pretrained(where, num_labels=1)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    want = scores_of(model, flat).logits.detach().numpy()
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    words = ["--model", where, "--adapter", tmp_path / "adapter", "--out", tmp_path / "merged"]
    assert called(merge.main, *words, "--quiet").returncode == 0
    merged = scores(tmp_path / "merged", flat, ROW, recipe="fp32", hardware=HARDWARE)
    assert np.abs(merged - want).max() < 1e-5 * np.abs(want).max()
    if base:
        return
    with pytest.raises(InvalidError, match="was trained on labelled data .* language model here"):
        Generator(where, adapter=tmp_path / "adapter", batch=1, context=32)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if "score" not in n}, file)
    with pytest.raises(InvalidError, match="has no head for labels .* trained on labelled data"):
        Trainer(where, plan, data=tmp_path / "data", adapter=tmp_path / "adapter")


# ---- commands ------------------------------------------------------------------------------------


def program(*words):
    run = [BUILD / "bin/penstock", *map(str, words)]
    return subprocess.run(run, capture_output=True, text=True)


@pytest.fixture(scope="module")
def texts(directory, tmp_path_factory):
    """A folder with a language model, its tokenizer, and records of each problem."""
    where = tmp_path_factory.mktemp("texts")
    shutil.copytree(directory("llama", None), where / "model")
    words = [f"{w} number {i}" for i, w in enumerate(("good", "bad", "fine", "awful") * 6)]
    record = {
        "single-label": lambda i: {"text": words[i], "label": i % 3},
        "multi-label": lambda i: {"text": words[i], "label": [i % 2, 2]},
        "regression": lambda i: {"text": words[i], "label": i / 4},
        "pairs": lambda i: {"prompt": "say: ", "chosen": words[i], "rejected": words[i - 1]},
    }
    for problem, make in record.items():
        lines = "".join(json.dumps(make(i)) + "\n" for i in range(24))
        (where / f"{problem}.jsonl").write_text(lines)
    (where / "words.txt").write_text("\n".join(words))
    tokenizer = train_tokenizer([where / "words.txt"], 300)
    tokenizer.save(str(where / "model" / "tokenizer.json"))
    return where


@pytest.mark.parametrize("problem", LABELS)
def test_the_commands(texts, tmp_path, problem):
    pack = ["--pack", "best-fit", "--seq-len", 32, "--problem", problem]
    if problem == "single-label":
        pack += ["--labels", 4]
    words = ["--out", tmp_path / "data", "--tokenizer", texts / "model", *pack]
    done = called(data.main, texts / f"{problem}.jsonl", *words, "--val-fraction", 0.2)
    assert done.returncode == 0, done.stderr
    about = json.loads((tmp_path / "data" / "dataset.json").read_text())
    n = {"single-label": 4, "multi-label": 3}.get(problem, 1)
    assert (about["problem"], about["labels"]) == (problem, n)
    assert about["train"]["targets"] + about["val"]["targets"] == 24
    assert Dataset(tmp_path / "data", 512).labels == (problem, n)
    common = ["--data", tmp_path / "data", "--seq-len", 32, "--backend", "cpu", "--threads", 1]
    words = ["--steps", 2, "--out", tmp_path / "out", "--recipe", "fp32"]
    run = program("train", "--model", texts / "model", *common, *words)
    assert run.returncode == 0, run.stderr
    assert "has no score.weight: the head of" in run.stderr
    found = "mean_absolute_error" if problem == "regression" else "accuracy"
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert found in json.loads(lines[0]) and f"val_{found}" in json.loads(lines[-1])
    run = program("eval", "--model", tmp_path / "out", *common, "--json", "--quiet")
    assert run.returncode == 0, run.stderr
    got = json.loads(run.stdout)
    assert found in got and "perplexity" not in got
    assert got["valid_tokens"] == about["train"]["targets"]
    if problem != "single-label":
        return
    words = ["--model", tmp_path / "out", "--recipe", "fp32", "--backend", "cpu", "--quiet"]
    done = called(score.main, texts / "words.txt", *words)
    assert done.returncode == 0, done.stderr
    lines = [[float(x) for x in line.split("\t")] for line in done.stdout.splitlines()]
    assert np.shape(lines) == (24, 4)
    done = called(embed.main, texts / "words.txt", *words, "--out", tmp_path / "x.npy")
    assert done.returncode == 0 and np.load(tmp_path / "x.npy").shape == (24, 64)
    # what does not go together
    plain = ["--model", tmp_path / "out", "--seq-len", 16, "--steps", 1, "--no-save"]
    (tmp_path / "plain").mkdir()
    write_shard(tmp_path / "plain" / "a.bin", np.arange(100) % 300)
    for run, why in (
        (program("train", "--data", tmp_path / "plain", *plain), "has no labels"),
        (program("generate", "--model", tmp_path / "out", "--tokens", "3"), "writes no text"),
    ):
        assert run.returncode == 2 and why in run.stderr, run.stderr


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"recipe": "fp8", "fp8_head": True}, "fp8_head"),
        ({"z_loss": 1e-4}, "z_loss"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"sample_sequences": 1, "sample_context": 8}, "sample_sequences"),
        ({"chunk_tokens": 10}, "both documents of a pair"),
    ],
)
def test_what_does_not_go_together_is_refused(directory, changes, why):
    with pytest.raises(InvalidError, match=why):
        plan_for(directory("llama", None), "pairs", tokens_per_step=2 * ROW, **changes)


@pytest.mark.parametrize(
    "label, why",
    [
        (float("nan"), "give a number$"),
        ("1", "give a number$"),
        (1e39, "give a number from -3.4e38 to 3.4e38$"),
        (-(10**400), "give a number from -3.4e38 to 3.4e38$"),
    ],
    ids=["nan", "text", "large", "no double"],
)
def test_labels_that_are_no_fp32_are_refused(label, why):
    with pytest.raises(DataError, match="line 1: 'label' is .{1,80}: " + why):
        Labels("regression").target({"label": label}, "line 1")


def test_heads_that_are_none_are_refused(directory, tmp_path):
    labels = ModelConfig.read(directory("llama", "single-label"))
    for problem, n, why in (
        ("regression", 1, "for single-label with 3 labels"),
        ("single-label", 4, "for single-label with 3 labels, and the data"),
        ("multi-label", 40, "multi-label has 1 to 31"),
    ):
        with pytest.raises(InvalidError, match=why):
            labels.score(problem, n)
    config = json.loads((directory("llama", "single-label") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"problem_type": "other"}))
    with pytest.raises(FormatError, match='problem_type is "other"'):
        ModelConfig.read(tmp_path)
    write(tmp_path / "data", "regression", documents("regression"))
    words = ["--model", directory("llama", "single-label"), "--data", tmp_path / "data"]
    run = program("eval", *words, "--seq-len", ROW, "--backend", "cpu")
    assert run.returncode == 2 and "penstock: --data: the model has a head for" in run.stderr
    words[1] = directory("llama", None)
    run = program("eval", *words, "--seq-len", ROW, "--backend", "cpu")
    why = "has no head for regression (tensor score.weight): train it on labelled data first"
    assert run.returncode == 2 and f"penstock: {words[1]}: {why}" in run.stderr, run.stderr
    file = tmp_path / "data" / "train-00000.labels"
    raw = file.read_bytes()
    for at, byte, why in ((0, 1, "begins with the words"), (8, 9, "for problem 9"), (24, 7, "CRC")):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 255 if at == 24 else byte]) + raw[at + 1 :])
        with pytest.raises(FormatError, match=why):
            Dataset(tmp_path / "data", 512)
