"""Device memory as nvidia-smi shows it, held against the cap, and the GPU's sensors: training in a
process of its own, alone on the GPU, while nvidia-smi is asked several times a second. What it
prints (`pytest -s`) is for bench/log/2026-11-23-gpu-page-tables.md."""

import json
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import BUILD, ROOT, write_shard
from penstock import Hardware, ModelConfig, Plan, Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="there is no nvidia-smi"),
]
MIB, GIB = 1 << 20, 1 << 30
VOCAB = 32000
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}


def in_use():
    """MiB of the first visible GPU that nvidia-smi shows as used."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    done = subprocess.run(
        ["nvidia-smi", "-i", first, "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[0])


def test_every_limit_of_pinned_memory_gives_the_same_bits(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 4}))
    model = ModelConfig.read(folder)
    kw = {"seq_len": 512, "tokens_per_step": 4096, "chunk_tokens": 1024, "chunks_per_round": 2}
    kw |= {"device_mem": "3GiB", "deterministic": True, "one_document": True}
    seen = []
    for pinned in (None, "1600MiB", "1GiB", "600MiB"):
        plan = Plan(model, pinned_mem=pinned, **kw)
        r = plan.report
        n = r["tokens_per_step"]

        def batch(step, n=n):
            ids = np.random.default_rng(step).integers(0, VOCAB, n)
            return ids, np.roll(ids, -1)

        assert not pinned or r["pinned_bytes"] <= r["pinned_mem_bytes"]
        with Trainer(folder, plan, batch, lr=1e-3, seed=5, init_weights=True) as trainer:
            losses = [m.loss for m in trainer.steps(3)]
            weights = {p: hash(trainer.read(p).tobytes()) for p in trainer.params}
        seen.append((losses, weights))
        print(pinned, r["pinned_bytes"] >> 20, r["staged_bytes"] >> 20, losses)
    assert all(s == seen[0] for s in seen)


class Watching:
    """The most that nvidia-smi showed while a block ran, less what it showed before, in MiB."""

    def __enter__(self):
        self.before = self.most = in_use()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.wait(0.2):
            self.most = max(self.most, in_use())

    def __exit__(self, *exc):
        self._over.set()
        self._thread.join()

    @property
    def grown(self):
        return self.most - self.before


MEASURING = 4.6  # GiB, as include/penstock/hardware.h says


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """MiB that nvidia-smi showed, the plan, the rows of metrics.jsonl and what was printed: for
    each cap in GiB, and for "unmeasured", 4 GiB on a machine whose rates nobody has measured.
    "measuring": MiB while they are."""
    folder, out = tmp_path_factory.mktemp("memory"), {}
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(MODEL))
    tokens = np.random.default_rng(3).integers(0, VOCAB, 200_000)
    shard = write_shard(folder / "a.bin", tokens)
    program = [BUILD / "bin/penstock", "train", "--model", folder / "model", "--init-weights"]
    program += ["--data", shard, "--seq-len", 2048, "--tokens-per-step", 32768, "--steps", 4]
    program += ["--backend", "cuda", "--recipe", "fp32-master", "--json"]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}

    def watch(words):
        with Watching() as seen:
            done = subprocess.run(
                [str(w) for w in words], capture_output=True, text=True, env=environment
            )
        assert done.returncode == 0, done.stderr
        return seen.grown, done.stderr

    for name, cap in (("unmeasured", 4), ("measuring", 0), (4, 4), (8, 8)):
        if not cap:
            out[name], _ = watch([program[0], "profile", "--quick", "--backend", "cuda"])
            continue
        run_dir = folder / f"run-{name}"
        grown, says = watch([*program, "--run-dir", run_dir, "--device-mem", f"{cap}GiB"])
        rows = [json.loads(r) for r in (run_dir / "metrics.jsonl").read_text().splitlines()]
        out[name] = grown, json.loads((run_dir / "plan.json").read_text()), rows, says
    return out


def test_nobody_measures_beyond_a_cap(runs):
    print(f"measuring takes {runs['measuring']} MiB")
    assert 4 << 10 < runs["measuring"] <= MEASURING * 1024
    grown, _, _, says = runs["unmeasured"]
    assert "of device memory, 4.0 GiB are given: rates are estimated" in says
    assert grown <= 4 << 10
    assert "rates are estimated" not in runs[4][3] + runs[8][3]


@pytest.mark.parametrize("cap", [4, 8])
def test_nvidia_smi_shows_no_more_than_the_cap(runs, cap):
    grown, plan, rows, _ = runs[cap]
    ours, planned = rows[-1]["device_peak_bytes"], plan["device_used_bytes"]
    print(
        f"cap {cap << 10} MiB, planned {planned / MIB:.0f} (page tables "
        f"{plan['device_tables_bytes'] / MIB:.0f}, of {plan['host_arena_bytes'] / GIB:.1f} GiB), "
        f"our figure {ours / MIB:.0f}, nvidia-smi {grown}"
    )
    assert grown <= cap << 10
    assert abs(ours / MIB - grown) <= 8  # both are of the whole GPU; MiB are rounded
    assert ours <= planned <= cap * GIB


PIN = """
import sys
from penstock import Engine, Place, Space, Stream
gib = int(sys.argv[1])
spaces = [Space(2 << 20, 0), Space(gib << 30, 1)]
with Engine(spaces, [Stream("compute", 0)], [Place("device", "cuda"), Place()]):
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_pinned_memory_takes_no_more_tables_than_are_planned():
    grown = []
    for gib in (1, 9):
        before = in_use()
        process = subprocess.Popen(
            [sys.executable, "-c", PIN, str(gib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), *sys.path])},
        )
        assert process.stdout.readline() == "ready\n"
        grown.append(in_use() - before)
        process.communicate("\n")
    print(f"8 GiB of pinned host memory take {grown[1] - grown[0]} MiB of the GPU's")
    assert grown[1] - grown[0] <= 8 * (2 + 1 / 128) + 4  # MiB; allocations have units of 2


def test_the_sensors_are_plausible(runs):
    """Of any GPU: the limits are wide."""
    for cap in (4, 8):
        rows = runs[cap][2]
        for row in rows:
            assert 100 < row["gpu_clock_mhz"] < 5000, row
            assert 10 < row["gpu_power_w"] < 2000, row
            assert 10 < row["gpu_temperature_c"] < 110, row
            assert 1e6 < row["h2d_bytes_per_s"] < 2e12, row
        counted = [row for row in rows if "gpu_energy_j" in row]
        if counted:
            mean = sum(r["gpu_energy_j"] for r in counted) / sum(r["step_s"] for r in counted)
            print(f"mean power {mean:.0f} W, readings {[r['gpu_power_w'] for r in counted]}")
            assert 10 < mean < 2000
    state = Hardware.gpu_state()
    assert all(state[k] > 0 for k in ("clock_mhz", "power_w", "temperature_c")), state
