"""What `penstock train` does where it is given no option for it."""

import signal

import numpy as np
import pytest
import tomllib
from conftest import BUILD, ROOT, words_of_training, write_shard
from penstock import InvalidError, Lora, ModelConfig, Plan
from penstock._lib import check, ffi, lib, struct
from penstock.plan import Hardware
from penstock.shards import BEGINS_DOCUMENT, IS_TARGET, write_mask
from test_run import call, ended, started, tree

BINARY = BUILD / "bin/penstock"


def train(cwd, model, data, *more, code=0):
    words = [w for w in words_of_training(model, data, *more) if w != "--quiet"]
    done = call([str(BINARY), *words, "--threads", "2"], cwd)
    assert done.returncode == code, done.stderr
    return done.stderr


def run_of(cwd, run="."):
    text = (cwd / run / "run.toml").read_text()
    return {k: v for table in tomllib.loads(text).values() for k, v in table.items()}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """37 rows of 64 tokens, each of which a document begins."""
    path = tmp_path_factory.mktemp("records") / "a.bin"
    write_shard(path, np.arange(37 * 64 + 1) % 200)
    flags = np.full(37 * 64 + 1, IS_TARGET)
    flags[::64] |= BEGINS_DOCUMENT
    write_mask(path, flags, 64)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model, tiny_shard, cache_of_this_run):
    out = tmp_path_factory.mktemp("trained")
    train(out, tiny_model, tiny_shard, "--steps", 1)
    return out / "model"


LORA = ("--lora-rank", 2)
RATE = [  # model, options, learning rate
    ("tiny_model", (), 3e-4),
    ("tiny_model", LORA, 2e-4),
    ("tiny_model", ("--optimizer", "lion"), 1e-4),
    ("tiny_model", ("--lr", 7e-4), 7e-4),
    ("trained", (), 1e-5),
    ("trained", ("--init-weights",), 3e-4),
    ("trained", ("--optimizer", "lion"), 3e-6),
    ("trained", ("--optimizer", "lion", *LORA), 6e-5),
    ("trained", ("--optimizer", "sgd"), 1e-3),
]


@pytest.mark.parametrize("model, options, lr", RATE)
def test_the_learning_rate_follows_what_is_trained(
    request, tiny_shard, tmp_path, model, options, lr
):
    model = request.getfixturevalue(model)
    said = train(tmp_path, model, tiny_shard, "--steps", 1, "--no-save", *options)
    assert run_of(tmp_path)["lr"] == lr and f"lr {lr:g}" in said


SCHEDULE = [  # data, options, steps, warm-up, shuffled
    ("records", (), 14, 1, True),  # 3 x 37 rows, 8 a step, rounded up
    ("records", ("--epochs", 0.5, "--shuffle=false"), 3, 1, False),
    ("records", ("--epochs", 10, "--warmup-ratio", 0.5), 47, 24, True),
    ("records", ("--steps", 2, "--warmup-steps", 0), 2, 0, True),
    ("tiny_shard", (), 39, 2, False),  # 312 sequences once
    ("tiny_shard", ("--epochs", 0.1, "--shuffle"), 4, 1, True),
    ("tiny_shard", ("--steps", 2, "--lr-schedule", "constant"), 2, 0, False),
]


@pytest.mark.parametrize("data, options, steps, warmup, shuffled", SCHEDULE)
def test_steps_warm_up_and_order_follow_the_data(
    request, tiny_model, tmp_path, data, options, steps, warmup, shuffled
):
    data = request.getfixturevalue(data)
    said = train(tmp_path, tiny_model, data, "--no-save", *options)
    run = run_of(tmp_path)
    got = run["steps"], run["warmup-steps"], run["shuffle"], run["tokens-per-step"]
    assert got == (steps, warmup, shuffled, 512)
    assert run["lr-schedule"] == ("constant" if "constant" in options else "cosine")
    assert ("lower --tokens-per-step" in said) == (steps < 10 and "--steps" not in options)
    assert f"step {steps}/{steps} " in said


def test_few_steps_of_a_trained_model_at_the_default_rate_are_told(trained, records, tmp_path):
    says = "14 steps at this learning rate change a model little"
    for given, told in (((), True), (("--lr", 1e-4), False), (LORA, False)):
        said = train(tmp_path, trained, records, "--no-save", "--force", *given)
        assert (says in said) == told


def test_the_model_is_saved_in_the_run_directory_and_moves_with_it(
    tiny_model, tiny_shard, tmp_path
):
    words = (tiny_model, tiny_shard, "--steps", 2, "--run-dir", "run")
    train(tmp_path, *words, "--checkpoint-every", 1)
    assert "out" not in run_of(tmp_path, "run")  # so that a run of the file has its own
    model = tree(tmp_path / "run/model")
    assert "checkpoints of another run" in train(tmp_path, *words, code=2)
    train(tmp_path, *words, "--force")
    assert tree(tmp_path / "run/earlier-1/model") == model
    (tmp_path / "run/earlier-1").rename(tmp_path / "moved")
    on = (tiny_model, tiny_shard, "--steps", 3, "--run-dir", "moved", "--resume", "auto")
    train(tmp_path, *on)
    assert tree(tmp_path / "moved/model").keys() == model.keys() != 0
    train(tmp_path, *words[:-1], "none", "--no-save")
    assert not (tmp_path / "none/model").exists()


def test_a_stopped_run_leaves_a_checkpoint_and_goes_on_as_it_began(
    tiny_model, tiny_shard, tmp_path
):
    """Also where the options that it began with are not given again. A long run gets checkpoints."""
    begun = ("--lr", "1e-2", "--warmup-steps", 3, "--shuffle", "--min-lr", "1e-3")
    words = [str(BINARY), *words_of_training(tiny_model, tiny_shard, "--run-dir", "run")]
    words = [w for w in words if w != "--quiet"]
    steps = ("--steps", 10**7)
    first = started([*words, *map(str, (*begun, *steps))], tmp_path)
    first.send_signal(signal.SIGTERM)
    said = ended(first, 130)
    assert "a checkpoint every 30 minutes" in said and "--resume auto goes on" in said
    assert run_of(tmp_path, "run")["checkpoint-every"] == "30m"
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    before = run_of(tmp_path, "run")
    (tmp_path / "run/metrics.jsonl").rename(tmp_path / "run/before")  # what started() looks at
    second = started([*words, "--resume", "auto"], tmp_path)
    second.send_signal(signal.SIGINT)
    said = ended(second, 130)
    assert "other bits" not in said and f"goes on from run/checkpoints/{checkpoint.name}" in said
    after = run_of(tmp_path, "run")
    assert after.pop("resume") == "auto" and after == before


def test_without_an_interval_of_checkpoints_a_stopped_run_writes_none(
    tiny_model, tiny_shard, tmp_path
):
    words = words_of_training(tiny_model, tiny_shard, "--run-dir", "run", "--steps", 10**6)
    run = started([str(BINARY), *words, "--checkpoint-every", "0", "--no-save"], tmp_path)
    run.send_signal(signal.SIGINT)
    ended(run, 130)
    assert not (tmp_path / "run/checkpoints").exists()


REFUSED = [
    (("--steps", 3, "--epochs", 1), "--steps and --epochs both say how long"),
    (("--epochs", 0), "--epochs 0: give a number from 1e-06"),
    (("--warmup-ratio", 1.5), "--warmup-ratio 1.5: give a number from 0 to 1"),
    (("--warmup-ratio", 0.1, "--warmup-steps", 3), "--warmup-steps and --warmup-ratio both say"),
    (("--out", "x", "--no-save"), "--out says where to save the model, and --no-save not to"),
]


@pytest.mark.parametrize("options, words", REFUSED)
def test_options_that_contradict_are_refused(tiny_model, tiny_shard, tmp_path, options, words):
    said = train(tmp_path, tiny_model, tiny_shard, "--tokens-per-step", 64, *options, code=2)
    assert words in said and said.count("penstock:") == 1 and not list(tmp_path.iterdir())


def test_the_command_line_chooses_among_options_that_exclude_each_other(
    tiny_model, tiny_shard, tmp_path
):
    file = tmp_path / "run.toml"
    file.write_text('[run]\nsteps = 9\nout = "a"\nrun-dir = "b"\n[schedule]\nwarmup-ratio = 0.5\n')
    more = ("--epochs", 0.02, "--no-save", "--warmup-steps", 0)
    train(tmp_path, tiny_model, tiny_shard, "--config", file, *more)
    run = run_of(tmp_path, "b")
    assert (run["steps"], run["warmup-steps"], run.get("out")) == (1, 0, None)


ENOUGH = [  # model, GPU or None, seq_len, cap in GiB, more of the plan's config, sequences
    ("8b", "rtx4090", 1024, 22, {}, 32),
    ("8b", "rtx4090", 512, 22, {}, 64),
    ("8b", "rtx4090", 4096, 22, {}, 8),
    ("8b", "h200", 1024, 24, {}, 64),
    ("8b", "h200", 1024, 0, {}, 8),  # all fits
    ("8b", "rtx4090", 512, 22, {"n_devices": 2, "n_hosts": 2}, 256),
    ("1b", "h200", 4096, 0, {"n_devices": 8, "n_hosts": 2}, 16),
    ("8b", None, 512, 0, {}, 8),
]


@pytest.mark.parametrize("model, gpu, seq_len, gib, more, want", ENOUGH)
def test_a_gpu_that_streams_the_model_gets_larger_steps(model, gpu, seq_len, gib, more, want):
    hw = Hardware.of_gpu(gpu) if gpu else Hardware.estimate(backend="cpu")
    cfg = struct("ps_plan_config")
    lib.ps_plan_config_init(cfg)
    cfg.recipe, cfg.seq_len, cfg.device_mem_bytes = lib.PS_RECIPE_BF16, seq_len, gib << 30
    for key, value in more.items():
        setattr(cfg, key, value)
    out = ffi.new("uint64_t *")
    config = ModelConfig.read(ROOT / f"models/{model}.json")
    check(lib.ps_plan_enough_tokens(config._ptr, cfg, hw._ptr, out))
    assert out[0] == want * seq_len


@pytest.mark.parametrize("given, want", [
    ({}, ("bf16", 0, 0, 0, 0.0)),
    ({"recipe": "fp8"}, ("fp8", 1, 1, 0, 0.0)),
    ({"recipe": "fp8", "fp8_bf16_last": 0}, ("fp8", 1, 0, 0, 0.0)),
    ({"lora": Lora(4)}, ("fp32-master", 0, 0, lib.PS_LORA_ALL, 8.0)),
    ({"lora": Lora(4, 3.0, "q_proj"), "recipe": "bf16"}, ("bf16", 0, 0, lib.PS_LORA_Q_PROJ, 3.0)),
])  # fmt: skip
def test_a_default_follows_from_other_fields(given, want):
    model, hardware = ModelConfig.read(ROOT / "models/tiny-llama.json"), Hardware.estimate(1, "cpu")
    c = Plan(model, seq_len=64, hardware=hardware, **given).config
    recipe = ffi.string(lib.ps_recipe_name(c.recipe)).decode()
    assert (recipe, c.fp8_bf16_first, c.fp8_bf16_last, c.lora.targets, c.lora.alpha) == want
    assert (c.clip_norm, c.trace_steps, c.document_token, c.optimizer) == (1, 2, -1, 0)


def test_a_document_token_in_a_plan_for_one_document_is_refused():
    model, hardware = ModelConfig.read(ROOT / "models/tiny-llama.json"), Hardware.estimate(1, "cpu")
    with pytest.raises(InvalidError, match="document token 3 that it has several"):
        Plan(model, seq_len=64, hardware=hardware, one_document=True, document_token=3)
