"""The Python shell over plans and training: budgets, metrics, parameters, callables as data,
leaving a loop early, saving."""

import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import penstock
import pytest
from penstock import Dataset, Hardware, ModelConfig, Plan, Trainer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python/examples"))
SEQ = 64
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model(tiny_model):
    return ModelConfig.read(tiny_model)


@pytest.fixture(scope="module")
def plan(model):
    return Plan(model, seq_len=SEQ, recipe="fp32")


def test_config_and_parameters_are_those_of_the_directory(model, tiny_model):
    assert (model.architecture, model.vocab_size, model.n_layers, model.dim) == (
        "llama",
        512,
        4,
        128,
    )
    assert sum(int(np.prod(p.shape)) for p in model.params()) == model.n_elements == 836736
    on_disk = penstock.TensorFile(tiny_model)
    assert {p.name for p in model.params()} == set(on_disk.names)
    assert all(on_disk.read(p.name).shape == p.shape for p in model.params())
    with pytest.raises(KeyError):
        on_disk.read("no.such.tensor")


def test_host_memory_is_measured_in_place(tiny_model, tmp_path):
    """Where the arena is larger than caches; the plan takes sums to be a thousand times as fast."""
    text = json.loads(Path(tiny_model, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(text | {"vocab_size": 80000}))
    machine = Hardware.estimate(2, "cpu")
    machine._ptr.accumulate_bytes_per_s *= 1000
    machine._ptr.optimizer_bytes_per_s *= 10  # no machine is so much faster than the estimate
    plan = Plan(
        ModelConfig.read(tmp_path), seq_len=SEQ, tokens_per_step=SEQ, recipe="fp32",
        hardware=machine,
    )  # fmt: skip
    assert plan.report["host_arena_bytes"] >= 256 << 20

    def arena(**kw):
        tokens = np.zeros(SEQ, np.int32)
        with Trainer(tmp_path, plan, lambda _: (tokens, tokens), init_weights=True, **kw) as t:
            return t.arena()

    rates, most = arena()
    assert (most["kinds"], most["kind"]) == (4, 4) and 0.9 < most["part"] < 1
    assert most["seen_bytes_per_s"] == pytest.approx((1 - most["part"]) * most["known_bytes_per_s"])
    assert rates.accumulate_bytes_per_s == most["seen_bytes_per_s"]
    assert rates.optimizer_bytes_per_s != machine.optimizer_bytes_per_s
    trusted, most = arena(trust_rates=True)
    assert most["kind"] == 0 and trusted.as_dict() == plan.hardware.as_dict()


def test_sizes_are_read_as_people_write_them():
    from penstock.plan import parse_bytes

    read = {
        None: 0,
        0: 0,
        1 << 20: 1 << 20,
        "20GiB": 20 << 30,
        "1.5 MiB": 3 << 19,
        "2e9": 2 * 10**9,
        9e17: 9 * 10**17,
        "3MB": 3 * 10**6,
        "7B": 7,
    }
    assert {size: parse_bytes(size, "device_mem") for size in read} == read
    for bad in ("20Gi", "", "GiB", "1..5GB", -5, float("inf")):
        with pytest.raises(ValueError, match="device_mem=.* is not a size"):
            parse_bytes(bad, "device_mem")


@pytest.mark.parametrize(
    "size,says",
    [
        (24, 'device_mem=24 is 24 bytes: write "24GiB"'),
        ("24", "device_mem='24' is 24 bytes: write \"24GiB\""),
        (1.5, 'device_mem=1.5 is 1 byte: write "1.5GiB"'),
        (1 << 19, 'device_mem=524288 is 524288 bytes: write "524288MiB"'),
    ],
)
def test_a_size_that_lacks_its_unit_is_refused(model, size, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        Plan(model, seq_len=SEQ, device_mem=size)


def test_plan_reports_fits_its_caps_and_refuses_one_byte_less_than_the_smallest(model):
    device, host = Plan.smallest(model, seq_len=SEQ)
    plan = Plan(model, seq_len=SEQ, device_mem=device)
    report = plan.report
    assert (
        report["device_used_bytes"] <= device
        and report["tokens_per_step"] == 8 * SEQ
        and report["step_s"] > 0
    )
    assert plan.json()["device_used_bytes"] == report["device_used_bytes"] and "predicted" in str(
        plan
    )
    with pytest.raises(penstock.BudgetError, match="device memory"):
        Plan(model, seq_len=SEQ, device_mem=device - 1)
    assert host > 0


def test_simulated_trace_has_every_op_of_the_schedule(plan):
    events, ends = plan.simulate(3)
    assert len(events) == 3 * plan.schedule.n_ops and len(ends) == 3 and (np.diff(ends) > 0).all()
    assert len(plan.stream_names) == plan.schedule.n_streams and plan.stream_names[0] == "compute"


def test_hardware_is_measured_once_and_cached():
    first, second = Hardware.cached(), Hardware.cached()
    assert Hardware.cache_path().exists() and first.as_dict() == second.as_dict() and first.measured


def test_losses_do_not_depend_on_the_budget_and_metrics_are_complete(model, tiny_model, tiny_shard):
    device, _ = Plan.smallest(model, seq_len=SEQ, chunk_tokens=SEQ, chunks_per_round=2)
    runs = []
    for cap in (None, device):
        plan = Plan(model, seq_len=SEQ, device_mem=cap, chunk_tokens=SEQ, chunks_per_round=2)
        with Trainer(tiny_model, plan, tiny_shard, lr=1e-3, seed=3) as trainer:
            metrics = list(trainer.steps(4))
            runs.append(([m.loss for m in metrics], trainer.read(Q_PROJ)))
            assert [m.step for m in metrics] == [0, 1, 2, 3] and trainer.steps_done == 4
            assert all(
                m.device_peak_bytes == plan.report["device_used_bytes"]
                and m.tokens == 512
                and m.grad_norm > 0
                for m in metrics
            )
    assert runs[0][0] == runs[1][0] and (runs[0][1] == runs[1][1]).all()


def test_parameters_are_read_written_and_have_gradients(plan, tiny_model, tiny_shard):
    with Trainer(tiny_model, plan, tiny_shard) as trainer:
        before = trainer.read(Q_PROJ)
        assert (before == penstock.TensorFile(tiny_model).read(Q_PROJ)).all()
        trainer.write(Q_PROJ, before * 2)
        assert (trainer.read(Q_PROJ) == before * 2).all()
        with pytest.raises(ValueError, match="has shape"):
            trainer.write(Q_PROJ, before[:1])
        list(trainer.steps(1))
        assert trainer.grad(Q_PROJ).shape == before.shape and np.abs(trainer.grad(Q_PROJ)).max() > 0
        assert not (trainer.read(Q_PROJ) == before * 2).all()


def test_a_callable_is_as_good_as_a_dataset(plan, model, tiny_model, tiny_shard):
    data = Dataset(tiny_shard, model.vocab_size)

    def batch(step):
        windows = [data.read(SEQ, 8 * step + i) for i in range(8)]
        return np.concatenate([w[0] for w in windows]), np.concatenate([w[1] for w in windows])

    losses = []
    for source in (data, batch):
        with Trainer(tiny_model, plan, source, seed=1) as trainer:
            losses.append([m.loss for m in trainer.steps(3)])
    assert losses[0] == losses[1]


def test_an_exception_in_the_batch_function_is_raised_by_the_loop(plan, tiny_model):
    def batch(step):
        if step == 1:
            raise LookupError("no more data")
        return np.zeros(512, np.int32), np.ones(512, np.int32)

    with (
        Trainer(tiny_model, plan, batch) as trainer,
        pytest.raises(LookupError, match="no more data"),
    ):
        list(trainer.steps(3))


TOKENS, TARGETS = np.zeros(512, np.int64), np.ones(512, np.int64)


@pytest.mark.parametrize(
    "batch,error",
    [
        (
            TOKENS,
            "batch\\(0\\) is a ndarray of 512: return \\(tokens, targets\\), 512 integers each",
        ),
        ((TOKENS,), "batch\\(0\\) is a tuple of 1: return"),
        (TOKENS[None], "batch\\(0\\) is a ndarray of 1: return"),
        ({"tokens": TOKENS, "targets": TARGETS}, "is a dict of 2: return"),
        (None, "is a NoneType: return"),
        (
            (TOKENS, TARGETS + 2**32),
            "the targets of batch\\(0\\): 4294967297 at position 0 is past int32",
        ),
        (
            (TOKENS - 2**31 - 1, TARGETS),
            "the tokens of batch\\(0\\): -2147483649 at position 0 is past int32",
        ),
        (
            ([0] * 511 + [2**70], TARGETS),
            "the tokens of batch\\(0\\) have dtype object, and the first is 0: give integers",
        ),
        (
            (TOKENS + 1.5, TARGETS),
            "the tokens of batch\\(0\\) have dtype float64, and the first is 1.5: give integers",
        ),
        (
            (TOKENS, TARGETS > 0),
            "the targets of batch\\(0\\) have dtype bool, and the first is True: give integers",
        ),
        ((TOKENS, TARGETS[1:]), "the targets of batch\\(0\\) are 511: give 512"),
    ],
)
def test_a_batch_that_is_none_is_refused_with_what_it_has(plan, tiny_model, batch, error):
    with (
        Trainer(tiny_model, plan, lambda step: batch) as trainer,
        pytest.raises(ValueError, match=error),
    ):
        list(trainer.steps(1))


def test_integers_of_any_width_and_lists_are_batches(plan, tiny_model):
    losses = []
    for tokens, targets in (
        (TOKENS, TARGETS),
        (TOKENS.astype(np.uint8), TARGETS.tolist()),
        (TOKENS.reshape(8, 64), np.ones((8, 64), np.int16)[:, ::-1]),
    ):
        batch = tokens, targets
        with Trainer(tiny_model, plan, lambda step, batch=batch: batch) as trainer:
            losses.append([m.loss for m in trainer.steps(2)])
    assert losses[0] == losses[1] == losses[2]


def test_a_trainer_dropped_with_steps_in_flight_waits_for_them(plan, tiny_model):
    def batch(step):
        time.sleep(0.01)
        return np.zeros(512, np.int32), np.ones(512, np.int32)

    trainer = Trainer(tiny_model, plan, batch)
    penstock._lib.check(penstock._lib.lib.ps_trainer_submit(trainer._handle.ptr, 3))
    del trainer, batch  # a callback freed under a running step would crash here
    gc.collect()


def test_progress_hears_of_the_loading_and_its_exception_is_raised(plan, tiny_model, tiny_shard):
    heard = []
    with Trainer(tiny_model, plan, tiny_shard, progress=lambda *args: heard.append(args)):
        assert heard and heard[-1][1] == heard[-1][2] > 0
    with pytest.raises(ZeroDivisionError):
        Trainer(tiny_model, plan, tiny_shard, progress=lambda *args: 1 / 0)
    Trainer(tiny_model, plan, tiny_shard).close()  # the plan is free again


def test_leaving_the_loop_early_finishes_the_step_in_flight(plan, tiny_model, tiny_shard, tmp_path):
    with Trainer(tiny_model, plan, tiny_shard) as trainer:
        for metrics in trainer.steps(100):
            if metrics.step == 2:
                break
        assert trainer.steps_done in (3, 4)
        trainer.read(Q_PROJ)  # StateError if anything were in flight
        trainer.save(tmp_path / "saved")
        assert [m.step for m in itertools.islice(trainer.steps(2), 2)][0] == trainer.steps_done - 2


def test_an_exception_in_the_loop_body_passes_through_and_a_closed_trainer_is_refused(
    plan, tiny_model, tiny_shard
):
    with pytest.raises(ZeroDivisionError), Trainer(tiny_model, plan, tiny_shard) as trainer:
        loop = trainer.steps(5)
        for _ in loop:
            _ = 1 / 0
    loop.close()  # after the trainer: nothing is left to wait for
    for use in (
        lambda: trainer.read(Q_PROJ),
        lambda: trainer.save("nowhere"),
        lambda: trainer.where(),
        lambda: trainer.steps_done,
    ):
        with pytest.raises(
            penstock.StateError, match=r"the trainer is closed: use it before close\(\)"
        ):
            use()


def test_ctrl_c_ends_the_loop_with_a_state_that_can_be_saved(
    plan, tiny_model, tiny_shard, tmp_path
):
    with Trainer(tiny_model, plan, tiny_shard) as trainer:
        with pytest.raises(KeyboardInterrupt):
            for metrics in trainer.steps(10**6):
                if metrics.step == 1:
                    threading.Thread(
                        target=lambda: (time.sleep(0.05), os.kill(os.getpid(), signal.SIGINT))
                    ).start()
        assert 2 <= trainer.steps_done < 10**6
        trainer.save(tmp_path / "saved", "fp32")
        assert (penstock.TensorFile(tmp_path / "saved").read(Q_PROJ) == trainer.read(Q_PROJ)).all()


def test_cancelling_from_another_thread_raises_cancelled(plan, tiny_model, tiny_shard):
    with Trainer(tiny_model, plan, tiny_shard) as trainer, pytest.raises(penstock.CancelledError):
        for metrics in trainer.steps(10**6):
            if metrics.step == 1:
                threading.Timer(0.05, trainer.cancel).start()


def test_cancelling_may_meet_closing(plan, tiny_model, tiny_shard):
    for _ in range(12):
        with Trainer(tiny_model, plan, tiny_shard) as trainer:
            next(trainer.steps(1))
            threads = [threading.Thread(target=trainer.cancel) for _ in range(3)]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
        trainer.cancel()  # nothing is left to stop


def test_trace_of_a_training_is_written(plan, tiny_model, tiny_shard, tmp_path):
    from penstock import trace

    with Trainer(tiny_model, plan, tiny_shard) as trainer:
        list(trainer.steps(3))
        assert len(trainer.trace()) == 2 * plan.schedule.n_ops
        trainer.write_trace(tmp_path / "timeline.json")
    shares = {s.name: s for s in trace.stream_times(trace.load(tmp_path / "timeline.json"))}
    assert shares["compute"].busy > 0.3


@pytest.mark.parametrize(
    "change,error",
    [
        ({"lr_schedule": "step"}, "lr_schedule"),
        ({"replan": "maybe"}, "replan .maybe.: one of off, auto, cut"),
        ({"beta1": 2.0}, "beta1"),
    ],
)
def test_bad_training_options_are_refused(plan, tiny_model, tiny_shard, change, error):
    with pytest.raises(ValueError, match=error):
        Trainer(tiny_model, plan, tiny_shard, **change)


def test_the_training_example_learns_and_saves(tiny_model, tiny_shard, tmp_path, capsys):
    import train_model

    losses = train_model.main(str(tiny_model), str(tiny_shard), str(tmp_path / "out"), "6")
    assert losses[-1] < losses[0] and (tmp_path / "out/model.safetensors").exists()
    assert "one byte less than the smallest plan is refused" in capsys.readouterr().out


# Each recipe, and with clipping or without; all pairs with the long ones.
@pytest.mark.parametrize(
    "recipe, clip_norm",
    [
        pytest.param(r, c, marks=pytest.mark.long if (r == "fp32-master") == (c == 0) else ())
        for r in ("fp32", "fp32-master", "bf16")
        for c in (0.0, 0.5)
    ],
)
def test_an_embedding_at_home_is_updated_to_the_same_bits(recipe, clip_norm, tmp_path):
    """Its rows are updated by whoever needs them first, the next step's gathers on the io stream or
    the host stream: beside a plan that keeps the table on the device."""
    vocab, seq, steps = 1024, 256, 12
    config = json.loads((ROOT / "models/tiny-llama.json").read_text()) | {
        "vocab_size": vocab,
        "num_hidden_layers": 1,
    }
    (tmp_path / "shape.json").write_text(json.dumps(config))
    folder = tmp_path / "model"
    subprocess.run(
        [
            sys.executable,
            ROOT / "models/init_model.py",
            tmp_path / "shape.json",
            folder,
            "--seed",
            "5",
        ],
        check=True,
        capture_output=True,
    )
    model = ModelConfig.read(folder)
    hardware = Hardware.estimate(8, "cpu")  # so that two threads gather
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, vocab, (steps, 8 * seq), np.int32) // rng.integers(
        1, 50, (steps, 8 * seq), np.int32
    )  # small ones often

    ask = {
        "seq_len": seq,
        "tokens_per_step": 8 * seq,
        "recipe": recipe,
        "chunk_tokens": seq,
        "chunks_per_round": 1,
        "clip_norm": clip_norm,
    }

    def run(device_mem):
        plan = Plan(model, hardware=hardware, device_mem=device_mem, **ask)
        with Trainer(
            folder,
            plan,
            lambda step: (tokens[step], np.roll(tokens[step], -1)),
            lr=0.01,
            seed=2,
        ) as trainer:
            losses = [m.loss for m in trainer.steps(steps)]
            return (
                plan.json()["embed_on_host"],
                losses,
                trainer.read("model.embed_tokens.weight"),
                trainer.read("lm_head.weight"),
            )

    least, _ = Plan.smallest(model, hardware=hardware, **ask)
    home, there = run(least), run(None)
    assert (home[0], there[0]) == (True, False)
    assert home[1] == there[1] and (home[2] == there[2]).all() and (home[3] == there[3]).all()


def test_plan_is_the_one_that_runs(model, tiny_model, tiny_shard):
    """The library switches by itself; here the test makes it."""
    from penstock._lib import check, ffi, lib

    plan = Plan(model, seq_len=SEQ, recipe="fp32")
    trainer = Trainer(tiny_model, plan, Dataset(tiny_shard, model.vocab_size))
    shown = [plan]
    for i in range(2):
        out = ffi.new("ps_plan **")
        check(lib.ps_plan_again(out, trainer.plan._handle.ptr, plan.hardware._ptr, 0))
        check(lib.ps_trainer_switch(trainer._handle.ptr, out[0]))
        (metrics,) = trainer.steps(1)
        assert metrics.n_switches == i + 1
        assert trainer.plan not in shown and trainer.plan._handle.ptr == out[0]
        assert trainer.plan.report["step_s"] == metrics.predicted_step_s
        shown.append(trainer.plan)
    schedule = trainer.plan.schedule
    trainer.close()  # plans that it left live as long as somebody has them
    assert len({each.json()["n_ops"] for each in shown}) == 1 and schedule.n_ops
