"""What NVML says of a GPU, and what is made of it, with tests/native/driver_standin.c in NVML's
place: neither a GPU nor a build with CUDA is needed."""

import json
import os
import subprocess

import pytest
from conftest import ROOT

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


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """Runs tests/native/nvml_reader.c with settings of the stand-in before and now."""
    folder = tmp_path_factory.mktemp("nvml")
    native = ROOT / "tests/native"
    compiled(folder / "libnvidia-ml.so.1", "-shared", "-fPIC", native / "driver_standin.c")
    sources = [ROOT / "native/backends/cuda/nvml.c", native / "nvml_reader.c"]
    compiled(
        folder / "reader", f"-I{ROOT}/include", f"-I{ROOT}/native", *sources, "-ldl", "-pthread"
    )

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
