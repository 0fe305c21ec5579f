"""The machine that a sweep runs on: its name, the commit, and its GPU's clock, power and
temperature."""

import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def die_with_parent():
    """For preexec_fn: a child that ends when the sweep is killed, so that the next sweep has the
    machine for itself."""
    prctl, set_signal = ctypes.CDLL(None).prctl, 1  # PR_SET_PDEATHSIG
    return lambda: prctl(set_signal, signal.SIGKILL)


def text_of(command) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine() -> str:
    """The GPUs, the driver and power limit of the first, where there are some; the CPU and how many
    there are."""
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    gpus = text_of(query).splitlines() or [""]
    several = f"{len(gpus)} x " if len(gpus) > 1 else ""
    cpu = names[0] if names else platform.processor()
    host = f"{cpu}, {os.cpu_count()} CPUs"
    return f"{several}{gpus[0]}; {host}" if gpus[0] else host


def commit() -> str:
    """The last commit that changed what is built; "+" where the sources differ from it. Results and
    pages may be committed without making the results old."""
    built = ["--", "native", "include", "Makefile"]
    git = ["git", "-C", str(ROOT)]
    changed = text_of([*git, "status", "--porcelain", *built])
    return text_of([*git, "log", "-1", "--format=%h", *built]) + ("+" if changed else "")


def versions(binary) -> dict:
    """Of the program, and of the GPU's driver where there is one."""
    driver = text_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    found = {"penstock": text_of([str(binary), "version"]).removeprefix("penstock ")}
    return {**found, "driver": driver.splitlines()[0]} if driver else found


def is_file(hardware: str) -> bool:
    """Whether a case's hardware is a file, and neither this machine nor the name of a GPU."""
    return hardware.endswith(".json")


def described(hardware: str) -> str:
    """The machine of a hardware file, as machine() names this one; or a GPU's name as it is."""
    if not is_file(hardware):
        return hardware
    content = json.loads(Path(hardware).read_text())
    return "; ".join(content[k] for k in ("device_name", "name") if content.get(k))


def gpu_columns(metrics: list[dict]) -> dict:
    """The mean clock and power and the highest temperature of the steps, as the run's metrics have
    them; a machine without NVML has none. The energy counter gives a step's mean power, the sensor
    a second's. Of several GPUs the clock is the lowest, power a sum, and n_gpus_read says of how
    many; rows of older versions lack it, and are of the first GPU."""

    def of(name):
        return [m[name] for m in metrics if isinstance(m.get(name), (int, float))]

    power = [m["gpu_energy_j"] / m["step_s"] for m in metrics if m.get("gpu_energy_j")]
    columns = {
        "gpu_clock_mhz": of("gpu_clock_mhz"),
        "gpu_power_w": power or of("gpu_power_w"),
    }
    out = {name: statistics.mean(values) for name, values in columns.items() if values}
    most = {"gpu_temperature_c": of("gpu_temperature_c"), "n_gpus_read": of("n_gpus_read")}
    return out | {name: max(values) for name, values in most.items() if values}
