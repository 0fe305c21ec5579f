"""What NVML says of a GPU, and what is made of it, with tests/native/driver_standin.c in NVML's
place: neither a GPU nor a build with CUDA is needed."""

import json
import os
import re
import subprocess
import sys
from statistics import median

import pytest
from conftest import BUILD, ROOT, words_of_training

MIB = 1 << 20
# as in the run of 2026-11-22: 24,681 MiB in use by nvidia-smi, 24,506 in the process's entry
SEEN, ENTRY = 24681, 24506


def compiled(out, *words):
    done = subprocess.run(
        [os.environ.get("CC", "cc"), "-D_GNU_SOURCE", "-o", out, *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


NATIVE = ROOT / "tests/native"


def with_nvml(out, source, *options):
    """Compile a source beside native/backends/cuda/nvml.c."""
    sources = [ROOT / "native/backends/cuda/nvml.c", NATIVE / source]
    compiled(out, f"-I{ROOT}/include", f"-I{ROOT}/native", *options, *sources, "-ldl", "-pthread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the stand-in under NVML's name."""
    folder = tmp_path_factory.mktemp("nvml")
    compiled(folder / "libnvidia-ml.so.1", "-shared", "-fPIC", NATIVE / "driver_standin.c")
    return folder


@pytest.fixture(scope="module")
def reader(folder):
    """Runs tests/native/nvml_reader.c with settings of the stand-in before and now."""
    with_nvml(folder / "reader", "nvml_reader.c")

    def read(before, now="", libraries=folder):
        done = subprocess.run(
            [folder / "reader", before, now],
            capture_output=True,
            text=True,
            env=os.environ | {"LD_LIBRARY_PATH": str(libraries)},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return read


@pytest.mark.parametrize(
    "case,before,now,lost",
    [
        ("the list shows this process", "", f"own:{ENTRY}", SEEN),
        ("the list shows nobody, as in a container", "", "", SEEN),
        ("the list counts more than the GPU lost", "", f"own:{SEEN + 5}", SEEN + 5),
        ("another process came", "", f"own:{ENTRY},77:100", SEEN - 100),
        ("another process went", "77:100", f"own:{ENTRY}", SEEN + 100),
        ("another process grew", "77:100", f"own:{ENTRY},77:200", SEEN - 100),
        # under a number of another PID namespace: taking it for another process would hide it
        ("this process has another number in the list", "", f"77:{ENTRY}", SEEN),
    ],
)
def test_the_device_figure_is_what_the_whole_gpu_lost(reader, case, before, now, lost):
    seen = reader(
        f"STANDIN_USED_MIB=600 STANDIN_PROCESSES={before}",
        f"STANDIN_USED_MIB={600 + SEEN} STANDIN_PROCESSES={now}",
    )
    assert seen["known"] == 1 and seen["lost"] == lost * MIB, case


def test_memory_that_others_gave_back_is_not_less_than_nothing(reader):
    assert reader("STANDIN_USED_MIB=900", "STANDIN_USED_MIB=100")["lost"] == 0


def test_sensors_are_read_in_their_units_with_four_calls(reader):
    sensors = "STANDIN_CLOCK=1410 STANDIN_POWER=685500 STANDIN_TEMPERATURE=61 STANDIN_ENERGY=123456"
    seen = reader(sensors, "STANDIN_GENERATION=5 STANDIN_WIDTH=16")
    assert [seen[k] for k in ("clock_mhz", "power_w", "temperature_c", "energy_j")] == [
        1410,
        685.5,
        61,
        123.456,
    ]
    assert seen["calls"] == 4
    assert seen["link"] == pytest.approx(63.015e9, rel=1e-4)  # PCIe 5.0, 16 lanes


def test_a_sensor_that_is_not_supported_is_unknown(reader):
    seen = reader("STANDIN_POWER=250000")
    assert (seen["power_w"], seen["clock_mhz"], seen["temperature_c"], seen["energy_j"]) == (
        250,
        0,
        0,
        0,
    )
    assert seen["link"] == 0


def test_without_nvml_nothing_is_known(reader, tmp_path):
    try:
        import ctypes

        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        seen = reader("", libraries=tmp_path)
        assert set(seen.values()) == {0}
    else:
        pytest.skip("there is NVML here")


# ---- several GPUs: a training on arenas, of which each has the sensors of a GPU ------------------

# 400 W and 700 W, and counters that grow by 2 and 6 MW: a step of this model is short
OF_TWO = {
    "STANDIN_CLOCK": "1410,1275",
    "STANDIN_POWER": "400500,700000",
    "STANDIN_TEMPERATURE": "61,58",
    "STANDIN_ENERGY": "5+2e6,9+6e6",
}
STEPS = 12
RUN_LOG = """
import sys
from penstock import Hardware, ModelConfig, Plan, RunLog, Trainer
model, data, folder, gpus = sys.argv[1:]
kw = {"seq_len": 64, "hardware": Hardware.estimate(2, "cpu"), "gpus": int(gpus)}
plan = Plan(ModelConfig.read(model), **kw)
with Trainer(model, plan, data, lr=1e-3, total_steps=2) as t, RunLog(folder, t) as log:
    for metrics in t.steps(2):
        log.write(metrics)
"""


@pytest.fixture(scope="module")
def sensors(folder):
    """The environment in which a device of the CPU backend has the sensors of a stand-in's GPU."""
    with_nvml(folder / "sensors_shim.so", "sensors_shim.c", "-shared", "-fPIC")
    return os.environ | {
        "LD_PRELOAD": str(folder / "sensors_shim.so"),
        "LD_LIBRARY_PATH": str(folder),
    }


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def trained(sensors, tiny_model, tiny_shard, tmp_path):
    """Trains on so many devices with such sensors; the metrics, and what was printed."""

    def train(gpus, settings):
        words = words_of_training(tiny_model, tiny_shard, "--steps", STEPS, "--gpus", gpus)
        words += ["--backend", "cpu", "--threads", "2", "--run-dir", "run", "--force"]
        words.remove("--quiet")
        done = subprocess.run(
            [BUILD / "bin/penstock", *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=sensors | settings,
        )
        assert done.returncode == 0, done.stderr
        return rows_of(tmp_path / "run"), done.stderr

    return train


def sensors_in(row):
    return tuple(row.get(f"gpu_{name}") for name in ("clock_mhz", "power_w", "temperature_c"))


def mean_power(rows):
    """Of a step, by the counters; None: unknown in every step."""
    powers = [row["gpu_energy_j"] / row["step_s"] for row in rows if "gpu_energy_j" in row]
    return median(powers) if powers else None


def test_sensors_are_those_of_all_gpus_of_the_plan(trained):
    rows, said = trained(2, OF_TWO)
    assert {sensors_in(row) for row in rows} == {(1275, 1100.5, 61)}
    assert {row["n_gpus_read"] for row in rows} == {2} and len(rows) == STEPS
    # 2 + 6 MW; a busy machine may come between the counters and the clock
    assert mean_power(rows) == pytest.approx(8e6, rel=0.1)
    assert re.search(r"  2 GPUs 1275 MHz 1100 W 61 C$", said, re.M), said


def test_of_one_gpu_nothing_is_said_of_others(trained):
    rows, said = trained(1, OF_TWO)
    assert {sensors_in(row) for row in rows} == {(1410, 400.5, 61)}
    assert not any("n_gpus_read" in row for row in rows)
    assert mean_power(rows) == pytest.approx(2e6, rel=0.1)
    assert re.search(r"  1410 MHz 400 W 61 C$", said, re.M) and "GPUs" not in said, said


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("sensor", OF_TWO)
def test_a_figure_is_unknown_where_that_of_one_gpu_is(trained, sensor, lacking):
    values = OF_TWO[sensor].split(",")
    values[lacking] = ""
    rows, _ = trained(2, OF_TWO | {sensor: ",".join(values)})
    known = [v for name, v in zip(OF_TWO, (1275, 1100.5, 61)) if name != sensor]
    for row in rows:
        assert [v for v in sensors_in(row) if v is not None] == known, row
        assert row["n_gpus_read"] == 2
    assert (mean_power(rows) is None) == (sensor == "STANDIN_ENERGY")


def test_without_sensors_nothing_is_counted(trained):
    rows, said = trained(2, {})
    assert not any("n_gpus_read" in row or "gpu_power_w" in row for row in rows)
    assert " GPUs " not in said


def test_a_run_log_says_how_many_gpus_the_figures_are_of(sensors, tiny_model, tiny_shard, tmp_path):
    for gpus, seen in ((2, (1275, 1100.5, 61)), (1, (1410, 400.5, 61))):
        run = tmp_path / str(gpus)
        subprocess.run(
            [sys.executable, "-c", RUN_LOG, tiny_model, tiny_shard, run, str(gpus)],
            check=True,
            env=sensors | OF_TWO | {"PYTHONPATH": str(ROOT / "python")},
        )
        for row in rows_of(run):
            assert sensors_in(row) == seen and row.get("n_gpus_read", 1) == gpus == row["gpus"]
