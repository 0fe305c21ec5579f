"""Several GPUs: --gpus N gives the bits of one GPU with the same chunks and rounds, here on the CPU
backend, which has an arena in place of each; so does a ring of layers; what is refused; the table
of `penstock plan`."""

import hashlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, words_of_training, write_shard
from penstock import (
    BudgetError,
    Checkpoint,
    DeviceError,
    Hardware,
    InvalidError,
    Lora,
    ModelConfig,
    Plan,
    RunLog,
    Trainer,
)
from penstock._lib import ffi, lib
from safetensors.numpy import load_file, save_file
from test_cli import BINARY, penstock, refused
from test_watch import command

SEQ, STEPS = 64, 3
ROUNDS = {"chunk_tokens": SEQ, "chunks_per_round": 1}  # 7: no multiple of 2, 3 or 4
SLICES = {"chunk_tokens": SEQ // 4, "chunks_per_round": 4}
FIRST = {"chunk_tokens": SEQ, "chunks_per_round": 2, "first_round_chunks": 3}
FIRSTS = ROUNDS | {"first_round_chunks": 2, "first_rounds": 2}
# a round of one sequence, whose head the GPUs of a ring share: 2 chunks have 8 slices of it
SHARED = {"chunk_tokens": 8, "chunks_per_round": 8, "head_slice_tokens": 2, "tokens_per_step": SEQ}
VAL = {"val_tokens": 3 * SEQ, "sample_sequences": 1, "sample_context": 12}
# what the plan has beside the batch
CASES = {
    "untied": ROUNDS | {"recipe": "bf16"},
    "tied-slices": SLICES | {"recipe": "fp32-master"},
    "tied": ROUNDS | {"recipe": "bf16", "clip_norm": 0.0},
    "first-round": FIRST | {"recipe": "fp32", "optimizer": "lion"},
    "first-rounds": FIRSTS | {"recipe": "bf16"},
    "lora": ROUNDS | {"lora": Lora(4, 8)},
    "ramp": ROUNDS | {"recipe": "bf16", "batch_ramp": [(SEQ, 1), (3 * SEQ, 1)]},
    "beside": ROUNDS | VAL | {"recipe": "bf16"},
    "fp24-8-bits": ROUNDS | {"recipe": "fp24-master", "state_bits": 8},
    "clip-by-previous": ROUNDS
    | {"recipe": "fp32-master", "clip_norm": 0.5, "clip_by": "previous", "keep_grads": False},
    "skip": ROUNDS | {"recipe": "fp32", "non_finite": "skip"},
    "one-sequence": SLICES | {"recipe": "bf16", "tokens_per_step": SEQ},
    "one-sequence-shared-head": SHARED | {"recipe": "bf16"},
    "beside-shared-head": SHARED | VAL | {"recipe": "bf16"},
    "one-sequence-fp8": SLICES | {"recipe": "fp8", "tokens_per_step": SEQ},
}
SEVERAL = ("untied", "one-sequence-shared-head")
CUT = ("--tokens-per-step", 7 * SEQ, "--chunk-tokens", SEQ, "--chunks-per-round", 1)
CPU = ("--backend", "cpu", "--threads", 2)


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory):
    out = tmp_path_factory.mktemp("tied") / "model"
    words = [ROOT / "models/init_model.py", ROOT / "models/tiny-qwen2.json", out, "--seed", "1"]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def spoiled(tiny_model, tmp_path_factory):
    """A model and data whose loss is infinite in the second step, in the sixth round."""
    out = tmp_path_factory.mktemp("spoiled")
    (file,) = tiny_model.glob("*.safetensors")
    tensors = {name: np.array(x) for name, x in load_file(file).items()}
    tensors["model.embed_tokens.weight"][300] = np.inf
    save_file(tensors, out / file.name)
    (out / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    tokens = np.arange(2000) % 200
    tokens[12 * SEQ + 5] = 300
    return out, write_shard(out / "data.bin", tokens)


def plan_on(folder, peer_bytes_per_s, sequences, layout, model="1b", gpus=2, **options):
    """Of a step on H200s."""
    machine = json.loads((ROOT / "docs/hardware-h200.json").read_text())
    file = folder / "machine.json"
    file.write_text(json.dumps(machine | {"peer_bytes_per_s": peer_bytes_per_s}))
    (folder / "config.json").write_text((ROOT / f"models/{model}.json").read_text())
    return Plan(
        ModelConfig.read(folder),
        seq_len=8192,
        tokens_per_step=sequences * 8192,
        hardware=Hardware.read(file),
        gpus=gpus,
        layout=layout,
        **options,
    )


def planned_on(*args, **options):
    return plan_on(*args, **options).report


@pytest.mark.parametrize(
    "sequences, faster", [(1, "ring"), pytest.param(4, "data-parallel", marks=pytest.mark.long)]
)
def test_the_planner_takes_the_faster_layout(sequences, faster, tmp_path):
    """One sequence is one round, which leaves a GPU idle without a ring."""
    auto, *each = (
        planned_on(tmp_path, 370e9, sequences, layout, chunk_tokens=4096, chunks_per_round=2)
        for layout in ("auto", "data-parallel", "ring")
    )
    times = [report["step_s"] for report in each]
    assert auto["step_s"] == min(times) < max(times)
    assert ffi.string(lib.ps_layout_name(auto["layout"])).decode() == faster


@pytest.mark.long
@pytest.mark.parametrize("model, sequences, caps", [("1b", 16, (6, 40)), ("8b", 32, (24, 200))])
def test_the_search_of_a_ring_finds_a_fast_cut(model, sequences, caps, tmp_path):
    """Free, it has some 90,000 candidates, of which few fit."""
    options = {"recipe": "bf16", "device_mem": caps[0] << 30, "host_mem": caps[1] << 30}
    found, pinned = (
        planned_on(tmp_path, 370e9, sequences, "ring", model, **options, **cut)
        for cut in ({}, {"chunk_tokens": 16384, "chunks_per_round": 1})
    )
    assert found["step_s"] < 1.02 * pinned["step_s"]


@pytest.mark.long
def test_a_ring_keeps_as_much_on_every_gpu(tmp_path):
    machine = json.loads((ROOT / "docs/hardware-h200.json").read_text())
    (tmp_path / "machine.json").write_text(json.dumps(machine | {"peer_bytes_per_s": 370e9}))
    (tmp_path / "config.json").write_text((ROOT / "models/8b.json").read_text())
    done = penstock(
        *("plan", "--model", tmp_path, "--hardware", tmp_path / "machine.json"),
        *("--seq-len", 8192, "--tokens-per-step", 262144, "--gpus", 2, "--layout", "ring"),
        *("--device-mem", "24GiB", "--host-mem", "200GiB", "--json"),
        *("--chunk-tokens", 16384, "--chunks-per-round", 1),
    )
    layers = [policies[0] for policies in json.loads(done.stdout)["layers"]]
    for what in layers[0]:
        kept = [sum(layer[what] == "device" for layer in layers[gpu::2]) for gpu in (0, 1)]
        assert abs(kept[0] - kept[1]) <= 1, what
    assert sum(layer["gate_up"] == "device" for layer in layers) > 4  # the largest


def test_a_rings_inputs_leave_with_their_own_chunks(tmp_path):
    """A chunk's input that comes late from the other GPU must not hold up what chunks before it
    have to send to the host: a GPU copies to the host in one order."""
    plan = plan_on(tmp_path, 370e9, 1, "ring", recipe="bf16", device_mem=4 << 30, chunk_tokens=1024)
    ops = [plan.schedule.op(i) for i in range(plan.schedule.n_ops)]
    n_inputs = 0
    for gpu in range(2):
        d2h = plan.stream_names.index(f"d2h {gpu}")
        tags = [op["tag"] for op in ops if op["stream"] == d2h and op["tag"]["phase"] == 0]
        saved = [t for t in tags if t["what"] in ("x", "q", "kv", "attn_out", "h", "gate_up")]
        order = [(t["layer"], t["chunk"]) for t in saved if t["layer"] > 1]
        assert order == sorted(order)
        n_inputs += sum(t["what"] == "x" for t in saved)
    assert n_inputs > 32


def test_a_ring_of_one_sequence_receives_into_memory_of_its_own(tmp_path):
    """A GPU may be some chunks ahead of the next one. Where it sends must not be memory that the
    receiver's running layer pass uses: it would wait for the end of that pass."""
    plan = plan_on(tmp_path, 370e9, 1, "ring", recipe="bf16", device_mem=6 << 30, chunk_tokens=512)
    ops = [plan.schedule.op(i) for i in range(plan.schedule.n_ops)]
    at = {(op["stream"], op["position"]): op["tag"] for op in ops}
    compute = [plan.stream_names.index(f"compute {gpu}") for gpu in range(2)]
    n_sent = {0: 0, 2: 0}
    for gpu in range(2):
        p2p = plan.stream_names.index(f"p2p {gpu}")
        for op in ops:
            phase, layer = op["tag"]["phase"], op["tag"]["layer"]
            running = layer - 1 if phase == 0 else layer + 1  # of the receiver, by program order
            if op["stream"] != p2p or phase not in n_sent or not 2 < layer < 15:
                continue
            n_sent[phase] += 1
            for stream, steps_back, value in op["waits"]:
                if stream == compute[1 - gpu] and steps_back == 0:
                    tag = at[stream, value - 1]
                    assert (tag["layer"], tag["phase"]) != (running, phase), (op["tag"], tag)
    assert min(n_sent.values()) > 100


def test_units_come_from_the_host_where_other_gpus_are_slower(tmp_path):
    """Pieces from another GPU would take a thousand times as long as from the host."""
    cut = {"chunk_tokens": 8192, "chunks_per_round": 1}
    none, slow, fast = (
        planned_on(tmp_path, rate, 8, "data-parallel", **cut) for rate in (0, 1e6, 370e9)
    )
    assert fast["step_s"] < slow["step_s"] <= none["step_s"]


def figures(m):
    return (m.step, m.tokens, str(m.loss), str(m.grad_norm), m.n_skipped, m.samples) + (
        (m.validation.loss,) if m.validation else ()
    )


def run_case(name, gpus, model, shard, folder, layout="data-parallel"):
    """Figures of each step, and the SHA-256 of the checkpoint's files: weights and state."""
    planned, settings = CASES[name], {}
    plan = Plan(
        ModelConfig.read(model),
        seq_len=SEQ,
        hardware=Hardware.estimate(2, "cpu"),
        gpus=gpus,
        layout=layout,
        **{"tokens_per_step": 7 * SEQ} | planned,
    )
    beside = {}
    if name.startswith("beside"):
        settings = {"val": str(shard)}
        prompts = {"prompts": [[1, 2, 3]], "max_new_tokens": 5}
        beside = {"validate_every": 2, "sample_every": 2, "samples": prompts}
    with Trainer(model, plan, str(shard), lr=1e-3, total_steps=STEPS, **settings) as trainer:
        seen = [figures(m) for m in trainer.steps(STEPS, **beside)]
        manifest = trainer.checkpoint(folder / f"{name}-{gpus}-{layout}") + "/manifest.json"
    with open(manifest) as file:
        digests = re.findall(r"\b[0-9a-f]{64}\b", file.read())
    assert plan.report["n_devices"] == gpus and len(digests) > 1
    return seen, digests


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_the_number_of_gpus(
    name, tiny_model, tied_model, spoiled, tiny_shard, tmp_path
):
    tied = (tied_model, tiny_shard)
    several = (2, 3, 4) if name in SEVERAL else (3,)
    data = {"tied": tied, "tied-slices": tied, "skip": spoiled}.get(name, (tiny_model, tiny_shard))
    one = run_case(name, 1, *data, tmp_path)
    for gpus in several:
        assert run_case(name, gpus, *data, tmp_path) == one, gpus
        assert run_case(name, gpus, *data, tmp_path, "ring") == one, gpus
    assert len({f[2] for f in one[0]}) == STEPS
    if name == "skip":
        assert [f[4] for f in one[0]] == [0, 1, 1] and one[0][1][2] == "nan"
    if name.startswith("beside"):
        assert [len(f) for f in one[0]] == [6, 7, 6] and one[0][1][5]


# ---- the binary ----------------------------------------------------------------------------------


def train(model, shard, *more):
    done = subprocess.run(
        [BINARY, *words_of_training(model, shard, *CUT, *CPU, *more)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def of_run(folder):
    """Steps, losses and norms, and the SHA-256 of the saved weights."""
    (weights,) = (folder / "out").glob("*.safetensors")
    return [(m["step"], m["loss"], m["grad_norm"]) for m in metrics_of(folder)], hashlib.sha256(
        weights.read_bytes()
    ).hexdigest()


@pytest.fixture(scope="module")
def alone(tiny_model, tiny_shard, tmp_path_factory):
    """The run directory of a training of four steps on one GPU."""
    folder = tmp_path_factory.mktemp("alone")
    train(tiny_model, tiny_shard, "--steps", 4, "--run-dir", folder, "--out", folder / "out")
    return folder


def test_a_run_resumes_on_another_number_of_gpus_and_in_a_ring(
    alone, tiny_model, tiny_shard, tmp_path
):
    """The run's file keeps the layout."""
    where = ("--run-dir", tmp_path, "--out", tmp_path / "out", "--force")
    train(tiny_model, tiny_shard, *where, "--gpus", 2, "--steps", 2, "--checkpoint-every", 2)
    assert '\ngpus = 2\nlayout = "auto"\n' in (tmp_path / "run.toml").read_text()
    ring = ("--gpus", 4, "--layout", "ring", "--steps", 4, "--resume", "latest")
    train(tiny_model, tiny_shard, *where, *ring)
    assert '\ngpus = 4\nlayout = "ring"\n' in (tmp_path / "run.toml").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["layout"] == "ring"
    assert of_run(tmp_path) == of_run(alone)
    assert [m["gpus"] for m in metrics_of(tmp_path)] == [2, 2, 4, 4]
    done = command("report", "--recipe-table", tmp_path, "--window", "1:4")
    assert done.returncode == 2 and "ran on 2 to 4 GPUs: give --window" in done.stderr


@pytest.mark.parametrize("before, after", [(2, 1)])
def test_a_resumed_run_keeps_its_first_rounds(before, after, tiny_model, tiny_shard, tmp_path):
    """The checkpoint says how many rounds are larger: 2, 2, 1, 1 and 1 chunks."""
    cut = ("--first-round-chunks", 2, "--first-rounds", 2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny_model, tiny_shard, *cut, "--steps", 4, "--run-dir", whole, "--out", whole / "out")
    where = ("--run-dir", parts, "--out", parts / "out", "--force")
    first = ("--gpus", before, "--steps", 2, "--checkpoint-every", 2)
    train(tiny_model, tiny_shard, *where, *cut, *first)
    more = ("--gpus", after, "--steps", 4, "--resume", "latest")
    train(tiny_model, tiny_shard, *where, *more)
    assert of_run(parts) == of_run(whole)
    plan = json.loads((parts / "plan.json").read_text())
    assert (plan["n_rounds"], plan["first_rounds"]) == (5, 2)
    assert "\nfirst-rounds = 2\n" in (parts / "run.toml").read_text()


def test_an_older_checkpoint_has_one_larger_round(tiny_model, tiny_shard, tmp_path):
    cut = ("--first-round-chunks", 2, "--steps", 2, "--checkpoint-every", 2, "--gpus", 2)
    train(tiny_model, tiny_shard, *cut, "--run-dir", tmp_path, "--out", tmp_path / "out")
    (folder,) = (tmp_path / "checkpoints").glob("step-*")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["batch"].pop("first_rounds") == 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with Checkpoint(folder) as older:
        cut = older.plan_options
    assert (cut["first_round_chunks"], cut["first_rounds"]) == (2, 1)


@pytest.mark.parametrize("layout", ["data-parallel", "ring"])
def test_the_smallest_plan_takes_its_caps_and_no_less_is_enough(layout, tiny_model):
    """Two arenas; whatever way units come to each of them counts."""
    options = {"seq_len": 64, "tokens_per_step": 256, "gpus": 2, "layout": layout, "threads": 2}
    options |= {"hardware": Hardware.read(ROOT / "tests/golden/hardware-cpu.json")}
    model = ModelConfig.read(tiny_model)
    _, host = Plan.smallest(model, **options)
    assert Plan(model, host_mem=host, **options).report["host_used_bytes"] == host
    with pytest.raises(BudgetError):
        Plan(model, host_mem=host - 1, **options)


@pytest.mark.long
@pytest.mark.parametrize("gpus", [1, 2])
def test_all_first_rounds_are_larger_where_updates_would_not_be_hidden(gpus, tmp_path):
    """8B: AdamW on the host takes longer than a forward pass of one chunk."""
    caps = {"device_mem": "24GiB", "host_mem": "110GiB", "recipe": "bf16"}
    report, one = (
        planned_on(tmp_path, 370e9, 16, "data-parallel", model="8b", gpus=gpus, **caps, **cut)
        for cut in ({}, {"chunk_tokens": 8192, "chunks_per_round": 1})
    )
    assert report["first_round_chunks"] > report["chunks_per_round"]
    assert report["first_rounds"] == gpus and one["first_rounds"] == 1
    assert report["step_s"] < one["step_s"]


def test_figures_are_a_gpu_everywhere(alone, tiny_model, tiny_shard, tmp_path):
    """By a run's file; the resolved one has the number too."""
    text = (alone / "run.toml").read_text().replace("\ngpus = 1\n", "\ngpus = 2\n")
    text = re.sub(r'\b(run-dir|out) = "[^"]*"', rf'\1 = "{tmp_path}"', text)
    (tmp_path / "my.toml").write_text(text)
    done = penstock("train", "--config", tmp_path / "my.toml", "--quiet=false")
    assert done.returncode == 0, done.stderr
    row, summary = metrics_of(tmp_path)[-1], json.loads((tmp_path / "summary.json").read_text())
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert row["gpus"] == summary["gpus"] == 2
    assert row["tflops"] * 2 * row["step_s"] * 1e12 == pytest.approx(plan["model_flops"])
    peak = plan["model_flops"] / row["step_s"] / row["mfu"]
    first = metrics_of(alone)[0]
    assert peak == pytest.approx(2 * first["tflops"] * 1e12 / first["mfu"], rel=1e-6)
    assert re.search(r"tok/s  2 x \S+ TFLOP/s  MFU", done.stderr)
    assert " on 2 devices: " in done.stdout and "compute 1 waited" in done.stdout
    assert [s["name"] for s in summary["streams"]][:6:3] == ["compute 0", "compute 1"]
    done = command("report", "--recipe-table", tmp_path)
    assert done.returncode == 0 and re.search(r"\s2 x ", done.stdout), done.stdout
    assert re.search(r"TFLOP/s +2 x \d", command("watch", tmp_path, "--once").stdout)


def test_eval_is_that_of_one_gpu(tiny_model, tiny_shard):
    words = words_of_training(tiny_model, tiny_shard, *CUT, *CPU, "--steps", 2, "--json")
    words[0] = "eval"
    one, three, ring = (
        json.loads(penstock(*words, "--gpus", *n).stdout) | {"tokens_per_s": 0}
        for n in ((1,), (3,), (3, "--layout", "ring"))
    )
    sizes = {"device_used_bytes": 0, "host_used_bytes": 0}
    assert one | sizes == three | sizes == ring | sizes


@pytest.mark.parametrize("gpus", [2, 4])
def test_one_sequence_on_several_gpus_makes_a_ring(gpus, tiny_model, tiny_shard, tmp_path):
    """Without --layout, also where the plan without a ring is faster on this machine. A wait for
    other devices is one figure, however many streams it was for."""
    cut = ("--tokens-per-step", SEQ, "--chunk-tokens", 8, "--chunks-per-round", 8, "--steps", 4)
    words = words_of_training(tiny_model, tiny_shard, *cut, *CPU)
    words.remove("--quiet")
    done = penstock(*words, "--gpus", gpus, "--run-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["layout"] == "ring"
    waits = [line for line in done.stdout.splitlines() if " waited " in line]
    assert len(waits) == gpus
    for line in waits:
        what = re.findall(r" s for (.+?) \(planned", line)
        assert len(what) == len(set(what)), line


def test_gpus_that_idle_are_told_in_a_line(tiny_model, tiny_shard, tmp_path):
    words = words_of_training(tiny_model, tiny_shard, *CUT, *CPU, "--steps", 1)
    words.remove("--quiet")
    done = penstock(*words, "--chunks-per-round", 2, "--gpus", 6, "--run-dir", tmp_path)
    assert done.returncode == 0
    says = (
        "--gpus 6: 2 would idle, as a step has 4 rounds: raise --tokens-per-step, or lower --chunk"
    )
    assert done.stderr.count(says) == 1
    done = penstock(*words, "--gpus", 7, "--run-dir", tmp_path / "7")
    assert done.returncode == 0 and "would idle" not in done.stderr
    words[words.index("--tokens-per-step") + 1] = str(2 * SEQ)
    done = penstock(*words, "--gpus", 3, "--layout", "ring", "--run-dir", tmp_path / "3")
    assert done.returncode == 0 and "--gpus 3 in a ring: 1 would idle at a time" in done.stderr


@pytest.mark.parametrize("layout, idle", [("data-parallel", (2, 2, 1)), ("ring", (2, 1, 0))])
def test_a_plan_says_which_gpus_idle_in_a_ramp(layout, idle, tiny_model):
    """A stage has 1, 2 and 4 chunks in rounds of two. A ring takes chunks, else a GPU takes rounds."""
    steps = ("--batch-ramp", *(f"{n * SEQ}:1" for n in (1, 2, 4)), "--tokens-per-step", 8 * SEQ)
    cut = ("--seq-len", SEQ, "--chunk-tokens", SEQ, "--chunks-per-round", 2, "--layout", layout)
    done = penstock("plan", "--model", tiny_model, *cut, *steps, *CPU, "--gpus", 3)
    lines = re.findall("^batch ramp .* a step(.*)$", done.stdout, re.MULTILINE)
    assert lines == [f", with {n} of 3 GPUs idle" if n else "" for n in idle], done


@pytest.mark.parametrize(
    "more, says",
    [
        (("--gpus", 0, *CPU), r"--gpus 0: give a whole number from 1 to 8$"),
        (("--gpus", 9, *CPU), r"--gpus 9: give a whole number from 1 to 8$"),
        (("--gpus", "two", *CPU), r"--gpus two: give a whole number from 1 to 8$"),
        (("--gpus", "1,2", *CPU), r"--gpus 1,2: give a whole number"),
        (
            ("--layout", "ring", *CPU),
            r"--layout ring deals layers to several GPUs, and --gpus is 1",
        ),
        (
            ("--layout", "ring", "--gpus", 5, *CPU),
            r"--layout ring: 4 blocks cannot be dealt to 5 GPUs: lower --gpus, or leave --layout",
        ),
        (("--layout", "star", *CPU), r"--layout star: give auto, data-parallel or ring$"),
        (
            ("--gpus", 8, *CUT, *CPU),
            r"--gpus 8: a step has 7 sequences, and each GPU takes whole ones: raise "
            rf"--tokens-per-step to {8 * SEQ}, or lower --gpus$",
        ),
        (
            ("--gpus", 2, "--layout", "data-parallel", "--tokens-per-step", SEQ, *CPU),
            r"--gpus 2: a step has 1 sequence, and each GPU takes whole ones: raise "
            rf"--tokens-per-step to {2 * SEQ}, or lower --gpus, or give --layout ring$",
        ),
        (
            ("--gpus", 4, *CUT, "--device-mem", "64KiB", *CPU),
            r"needs [\d.]+ [KM]iB of device memory on each of 4 devices, 64.0 KiB given: raise",
        ),
        (("--gpus", 2, "--gpu", 1, *CPU), r"--gpu 1 and --backend cpu exclude each other"),
        (("--gpus", 2), r"--gpus 2: there is no GPU that can be used here: give --gpus 1, or --ba"),
        (
            ("--gpus", 2, "--backend", "cuda", "--gpu", 1, "--model", "nowhere"),
            r"--gpu 1 and --gpus 2 exclude each other: several GPUs are the first ones that CUDA_VI",
        ),
        (
            ("--gpus", 2, "--backend", "cuda", "--model", "nowhere"),
            r"--gpus 2: (this library was built without CUDA|(no|the) CUDA driver)",
        ),
    ],
)
def test_what_is_refused(more, says, tiny_model, tiny_shard, tmp_path):
    words = words_of_training(tiny_model, tiny_shard, "--steps", 1)
    refused(penstock(*words, *more, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}), says)
    assert list(tmp_path.iterdir()) == []


# ---- Python --------------------------------------------------------------------------------------


def test_python_takes_the_same_number(alone, tiny_model, tmp_path):
    kw = {"seq_len": SEQ, "hardware": Hardware.estimate(2, "cpu")}
    for gpus in (0, 9):
        with pytest.raises(InvalidError, match=f"gpus is {gpus}: give 1 to 8"):
            Plan(ModelConfig.read(tiny_model), gpus=gpus, **kw)
    with pytest.raises(
        InvalidError, match='the layout "star" is unknown: use auto, data-parallel or'
    ):
        Plan(ModelConfig.read(tiny_model), gpus=2, layout="star", **kw)
    with Trainer.from_file(alone / "run.toml", gpus=2) as trainer:
        with RunLog(tmp_path, trainer) as log:
            for m in trainer.steps(2):
                log.write(m)
        assert sum(name.startswith("compute") for name in trainer.plan.stream_names) == 2
    rows = metrics_of(tmp_path)
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in rows] == of_run(alone)[0][:2]
    flops = trainer.plan.json()["model_flops"]
    assert rows[0]["gpus"] == 2
    assert rows[0]["tflops"] * 2 * rows[0]["step_s"] * 1e12 == pytest.approx(flops)


# ---- penstock plan -------------------------------------------------------------------------------


def plan(*more):
    done = penstock("plan", "--seq-len", SEQ, "--chunk-tokens", SEQ, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A model of one block, and a machine whose GPU multiplies so slowly that products bind."""
    folder = tmp_path_factory.mktemp("slow")
    model = json.loads((ROOT / "models/tiny-llama.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(model))
    machine = json.loads((ROOT / "docs/hardware-h200.json").read_text())
    tables = ("gemm_bf16", "gemm_fp8", "attention_bf16")
    machine = {k: v for k, v in machine.items() if k not in tables}
    for name in machine:
        if re.match("(gemm|attention)_.*flops_per_s", name):
            machine[name] *= 1e-4
    (folder / "slow.json").write_text(json.dumps(machine))
    more = ("--chunks-per-round", 1, "--clip-norm", 0, "--quiet")
    return ("--model", folder, "--hardware", folder / "slow.json", *more)


def test_plan_prints_a_table_of_several_numbers(words):
    """Of two GPUs each has a round of a step's two."""
    text = plan(*words, "--gpus", 1, 2, "--tokens-per-step", 2 * SEQ)
    head, _, one, two, *notes = text.splitlines()
    assert head == "128 tokens a step, sequences of 64"
    columns = r" +{} +(\d+) +{} +products \d+% +\d+\.\d% +\S+ MiB +\S+ GiB +{}$"
    alone = re.match(columns.format(1, "1.00", "-"), one)
    both = re.match(columns.format(2, r"(?:0\.9[5-9]|1\.00)", 2 * SEQ), two)
    assert alone and both and 1.9 < int(both[1]) / int(alone[1]) < 2.01, text
    assert max(map(len, text.splitlines())) <= 100
    says = next(i for i, line in enumerate(notes) if line.startswith("Rows of several GPUs"))
    assert head_of_table(text).split() == (
        "GPUs tokens/s of N x one what binds recomputed memory a GPU host memory 0.95 from".split()
    )
    assert all(line.startswith(("advice: ", " " * 8)) for line in notes[says + 1 :]) and says > 3
    assert plan(*words, "--gpus", "1,2", "--tokens-per-step", 2 * SEQ) == text


@pytest.mark.parametrize(
    "rate, says",
    [
        pytest.param(
            0,
            "2 hosts with so many GPUs each; the exchange of gradients takes no time here:",
            marks=pytest.mark.long,
        ),
        (25e9, "2 hosts with so many GPUs each, which exchange gradients at 25 GB/s"),
    ],
)
def test_the_table_names_its_hosts(rate, says, tiny_model, tmp_path):
    machine = json.loads((ROOT / "docs/hardware-h200.json").read_text())
    (tmp_path / "m.json").write_text(json.dumps(machine | {"network_bytes_per_s": rate}))
    where = ("--model", tiny_model, "--hardware", tmp_path / "m.json")
    cut = ("--chunk-tokens", SEQ, "--chunks-per-round", 1)
    text = plan(*where, *cut, "--tokens-per-step", 2 * SEQ, "--hosts", 2, "--gpus", "1,2")
    assert "N times those of one GPU a host, with" in text
    assert max(len(line) for line in text.splitlines() if "advice" not in line) <= 100
    assert text.splitlines()[1] == says


def head_of_table(text):
    return text.splitlines()[1]


def advice(folder, config, machine, *more):
    """The lines that a plan ends with."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "machine.json").write_text(json.dumps(machine))
    done = penstock("plan", "--model", folder, "--hardware", folder / "machine.json", *more)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 140
    told = re.sub(r"\n {8}(?=\S)", " ", done.stdout)
    return re.findall(r"^advice: (.*)$", told, re.M)


def idle(m, n, sms):
    """Of tiles of 128 x 256, one an SM at a time: what the last wave leaves unused."""
    parts = []
    for rows, cols in ((128, 256), (256, 128)):
        tiles = -(-m // rows) * -(-n // cols)
        parts.append(1 - m * n / (-(-tiles // sms) * sms * rows * cols))
    return min(parts)


def test_advice_is_arithmetic_on_the_plan(tmp_path):
    """The products of a chunk of 1,024 tokens on 132 SMs, a vocabulary of 1,057, fewer rounds than
    GPUs, and blocks that fit a GPU's cap only when they are dealt."""
    config = json.loads((ROOT / "models/tiny-llama.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 1057, "head_dim": 64}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 4}
    config |= {"num_hidden_layers": 12}
    config |= {"max_position_embeddings": 4096}
    machine = json.loads((ROOT / "docs/hardware-h200.json").read_text())
    machine |= {"peer_bytes_per_s": 370e9, "device_overhead_bytes": 1 << 20}
    cut = ["--seq-len", 1024, "--chunk-tokens", 1024, "--head-slice-tokens", 512]
    step = [*cut, "--tokens-per-step", 4096]
    few = ["--chunks-per-round", 2, "--device-mem", "240MiB", "--gpus", 4]
    said = advice(tmp_path, config, machine, *step, *few, "--layout", "data-parallel")
    products = {
        "q, k, v": (1536, 1024, 1024),
        "attention's output": (1024, 1024, 1024),
        "gate, up": (5632, 1024, 1024),
        "down": (1024, 2816, 1024),
        "head": (1057, 1024, 512),
    }
    expected = []
    for name, (out, n_in, rows) in products.items():
        each = {"Y": (rows, out), "dX": (rows, n_in), "dW": (out, n_in)}
        told = [
            f"{y} [{m},{n}] {100 * idle(m, n, 132):.0f}%"
            for y, (m, n) in each.items()
            if idle(m, n, 132) >= 0.1
        ]
        says = "the last wave of tiles is not full, so part of the time of 132 SMs is unused"
        expected += [f"tiles of {name}: {says}: {', '.join(told)}"] if told else []
    block = 1024 * (2 * 1024 + 2 * 256 + 3 * 2816)
    sent = 4 * 2 * (3 / 4) * 2 * 1024 / machine["peer_bytes_per_s"]
    share = sent / (6 * block / 4 / machine["gemm_bf16_flops_per_s"])
    expected += [
        "vocab_size 1057 is no multiple of 64, so rows of its products are not aligned to 128 "
        "bytes: 1088 would be, and is 2.93% larger",
        "a step has 2 rounds for 4 GPUs: pipeline parallel, --layout ring, would keep all busy "
        "with its 4 chunks",
        "tensor parallel over 4 GPUs, which Penstock does not have, would add "
        f"{100 * share:.0f}% of the products' time for sending",
        f"the blocks have {12 * 2 * block / 2**20:.1f} MiB of bf16 parameters, which is more than "
        f"--device-mem; dealt to 4 GPUs they are {3 * 2 * block / 2**20:.1f} MiB on each: "
        "--layout ring can keep them there",
    ]
    assert said == expected and len(expected) >= 8
    chosen = advice(tmp_path, config, machine, *step, *few)
    assert not any("--layout ring" in line for line in chosen)
    config |= {"vocab_size": 1088}
    well = ["--chunks-per-round", 1, "--gpus", 2]
    said = advice(tmp_path, config, machine, *step, *well)
    assert said and all(line.startswith("tiles of ") for line in said)


def test_plan_takes_the_number_of_a_runs_file(words, tmp_path):
    (tmp_path / "my.toml").write_text("[run]\ngpus = 2\n")
    more = (*words[:-1], "--config", tmp_path / "my.toml", "--tokens-per-step", 4 * SEQ)
    assert "\ndevices          2, of which 2 have rounds" in plan(*more)
    assert "\ndevices          4, of which 4 have rounds" in plan(*more, "--gpus", 4)


@pytest.mark.long
def test_a_row_is_the_plan_of_its_number(words):
    """Of three GPUs one has 6 of 16 rounds, and 11 of 32: 0.89 and 0.97 of three times one."""
    table = json.loads(plan(*words, "--gpus", "1,3", "--tokens-per-step", 16 * SEQ, "--json"))
    one, three = table["rows"]
    for row in (one, three):
        alone = plan(*words, "--gpus", row["gpus"], "--tokens-per-step", 16 * SEQ, "--json")
        assert row["tokens_per_s"] == json.loads(alone)["predicted_tokens_per_s"]
        assert (row["binds"], row["n_rounds"]) == ("products", 16) and 0.9 < row["busy"] <= 1.001
        for size in ("device_used_bytes", "host_used_bytes"):
            assert row[size] == json.loads(alone)[size]
    assert three["share"] == three["tokens_per_s"] / (3 * one["tokens_per_s"]) < 0.95
    assert [one["enough_tokens_per_step"], three["enough_tokens_per_step"]] == [0, 32 * SEQ]


def test_a_number_of_gpus_that_does_not_fit_is_a_row_with_the_reason(tiny_model):
    words = ("--model", tiny_model, *CPU, "--quiet", "--chunks-per-round", 1)
    out = plan(*words, "--gpus", "1,2", "--device-mem", "64KiB")
    assert len(re.findall(r"^   [12]  no plan: .*device memory", out, re.M)) == 2
    out = json.loads(plan(*words, "--gpus", "1,2", "--device-mem", "64KiB", "--json"))
    assert all("device memory" in r["refused"] for r in out["rows"])


def test_what_plan_refuses(tiny_model):
    words = ("plan", "--model", tiny_model, "--seq-len", SEQ, *CPU)
    for more, says in (
        (("--gpus", "1,0"), r"--gpus 0: give a whole number from 1 to 8$"),
        (("--gpus", "1,"), r"--gpus : give a whole number from 1 to 8$"),
        (("--gpus", ",".join("1" * 17)), r"--gpus: more than 16 numbers given$"),
        (("--gpus", "1,2", "--smallest"), r"--gpus with several numbers prints a table of its own"),
        (("--gpus", "1,2", "--pairs", "1GiB:1GiB"), r"--gpus with several numbers"),
        (
            ("--gpus", "1,2", "--hosts", 2, "--tokens-per-step", SEQ),
            r"tokens per step 64 are 1 sequences of 64 tokens, for 2 hosts: raise --tokens-per-st",
        ),
    ):
        done = penstock(*words, *more)
        refused(done, says)
        assert done.stdout == ""


def test_a_trainer_refuses_a_plan_of_more_gpus_than_there_are(tiny_model):
    plan = Plan(
        ModelConfig.read(tiny_model),
        seq_len=SEQ,
        tokens_per_step=4 * SEQ,
        hardware=Hardware.read(ROOT / "docs/hardware-h200.json"),
        gpus=2,
    )
    with pytest.raises((DeviceError, InvalidError), match="built without CUDA|CUDA driver|visible"):
        Trainer(tiny_model, plan, lambda step: None)
