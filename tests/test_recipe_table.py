"""penstock report --recipe-table against figures that are computed by hand from made-up runs."""

import csv
import json
import math
import re

import pytest
from test_watch import command, refused

HEADER = ("run", "steps", "step, s", "tokens/s", "TFLOP/s a GPU", "MFU, %", "days/T", "J/token")


def made(folder, seconds, plan=(), **fields):
    """A run directory with a step of 1000 tokens for each of @seconds; a field has a value a
    step."""
    folder.mkdir()
    lines, elapsed = [], 0.0
    for i, s in enumerate(seconds):
        elapsed += s
        row = {"step": i, "loss": 5.0, "lr": 1e-3, "grad_norm": 1.0, "step_s": s, "tokens": 1000}
        row |= {"tokens_per_s": 1000 / s, "tflops": 40 / s, "mfu": 0.04 / s, "hfu": 0.05 / s}
        row |= {"predicted_step_s": 2.0, "elapsed_s": elapsed}
        row |= {k: v[i] for k, v in fields.items()}
        lines.append(json.dumps({k: v for k, v in row.items() if v != "absent"}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    facts = {"predicted_step_s": 2.0, "seq_len": 100, "tokens_per_step": 1000, "recipe": "bf16"}
    facts |= {"optimizer": "adamw", "device_mem_bytes": 24 << 30, "host_mem_bytes": 0}
    hardware = {"hardware": {"device_name": "NVIDIA Made-up", "name": "CPU"}}
    (folder / "plan.json").write_text(json.dumps(facts | hardware | dict(plan)))
    return folder


def table(*args):
    """The figures of the runs, from --json, and what was printed."""
    out = args[0].parent / "table.json"
    done = command("report", "--recipe-table", *args, "--json", out)
    assert done.returncode == 0 and done.stderr == "", done
    return json.loads(out.read_text())["runs"], done.stdout


@pytest.fixture
def run(tmp_path):
    return made(tmp_path / "run", [9.0, 8.0, 1.0, 2.0, 3.0])


def test_means_deviations_and_days_are_those_computed_by_hand(run):
    (row,), text = table(run)
    assert (row["first_step"], row["last_step"], row["steps"]) == (3, 5, 3)  # two warm up
    assert (row["step_s_mean"], row["step_s_std"]) == (2.0, 1.0)  # 1, 2, 3
    speeds = [1000, 500, 1000 / 3]
    mean = sum(speeds) / 3
    std = math.sqrt(sum((v - mean) ** 2 for v in speeds) / 2)
    assert row["tokens_per_s_mean"] == pytest.approx(mean)
    assert row["tokens_per_s_std"] == pytest.approx(std)
    assert row["tflops_per_gpu_mean"] == pytest.approx(40 * (1 + 1 / 2 + 1 / 3) / 3)
    assert row["mfu_percent_mean"] == pytest.approx(4 * (1 + 1 / 2 + 1 / 3) / 3)
    # 3000 tokens in 6 s: 500 a second
    assert row["days_per_trillion_tokens"] == pytest.approx(1e12 / 500 / 86400)
    assert row["joules_per_token"] is None and row["energy_from"] is None
    assert row["predicted_step_s"] == 2.0 and row["device"] == "NVIDIA Made-up"
    assert row["device_cap_bytes"] == 24 << 30 and row["host_cap_bytes"] is None
    lines = text.splitlines()
    assert lines[1].split() == ["run", "NVIDIA", "Made-up", "100", "1,000", "bf16", "adamw"] + [
        "24/none"
    ]
    assert re.split("  +", lines[3]) == [*HEADER]
    assert re.split("  +", lines[4]) == [
        "run",
        "3-5",
        "2.000 ± 1.0",
        "611.1 ± 347",
        "24.44 ± 14",
    ] + ["2.444 ± 1.4", "23,148", "-"]
    assert "The first 2 steps of each start are left out" in text
    assert max(map(len, lines)) <= 100


def test_a_window_counts_from_1_and_includes_both_ends(run):
    (row,), text = table(run, "--window", "2:4")
    assert (row["first_step"], row["last_step"], row["step_s_mean"]) == (2, 4, 11 / 3)
    assert "left out" not in text
    (row,), text = table(run, "--last", "1")
    assert (row["first_step"], row["steps"], row["step_s_std"]) == (5, 1, None)
    assert " 3.000 " in text and "±" not in text.splitlines()[4]


def test_a_resumed_run_warms_up_twice(tmp_path):
    elapsed = [9.0, 10.0, 11.0, 9.0, 10.0, 11.0, 12.0]
    run = made(tmp_path / "run", [9.0, 1.0, 2.0, 9.0, 1.0, 3.0, 4.0], elapsed_s=elapsed)
    (row,), _ = table(run)
    assert (row["first_step"], row["last_step"]) == (3, 7)
    assert (row["steps"], row["left_out"], row["step_s_mean"]) == (3, 2, 3.0)


def test_energy_is_the_counters_or_trapezoids_of_the_readings(tmp_path):
    seconds = [5.0, 1.0, 2.0, 4.0]
    power = [100.0, 100.0, 300.0, 500.0]
    a = made(tmp_path / "counted", seconds, gpu_power_w=power, gpu_energy_j=[7, 7, 450.0, 1650.0])
    b = made(tmp_path / "read", seconds, gpu_power_w=power)
    c = made(tmp_path / "gap", seconds, gpu_power_w=["absent", *power[1:3], "absent"])
    rows, text = table(a, b, c)
    assert [r["energy_from"] for r in rows] == ["energy counter", "power readings", None]
    assert rows[0]["joules_per_token"] == (450 + 1650) / 2000
    # (100 + 300) / 2 * 2 s, then (300 + 500) / 2 * 4 s
    assert rows[1]["joules_per_token"] == (400 + 1600) / 2000
    assert rows[1]["gpu_power_w_mean"] == 400 and rows[2]["gpu_power_w_mean"] is None
    # without a step before the window the first step has its own reading: 100 * 5 + 100 * 1
    (row,), _ = table(b, "--window", "1:2")
    assert row["joules_per_token"] == 600 / 2000
    assert "energy counter" in text and "trapezoids" in text and "read.\n" in text + "\n"


POWER = {"gpu_power_w": [100.0] * 4, "gpu_energy_j": [50.0] * 4}


def test_several_gpus_are_named_and_an_older_runs_energy_is_the_firsts(tmp_path):
    two = made(tmp_path / "two", [1.0] * 4, gpus=[2] * 4, **POWER)
    rows, text = table(two, made(tmp_path / "one", [1.0] * 4, **POWER))
    assert [r["gpus"] for r in rows] == [2, 1]
    sources = ["energy counter of the first GPU", "energy counter"]
    assert [r["energy_from"] for r in rows] == sources
    for row in rows:  # as the steps have them: tflops of a GPU, tokens/s of all
        assert (row["tflops_per_gpu_mean"], row["tokens_per_s_mean"]) == (40, 1000)
    assert re.search(r"^two +2 x NVIDIA Made-up ", text, re.M)
    assert "\nJ/token is of the first GPU alone: two.\n" in text
    mixed = made(tmp_path / "mixed", [1.0] * 4, gpus=[2, 2, 1, 1])
    says = "the steps of the window ran on 1 to 2 GPUs: give --window with steps of one number"
    refused(command("report", "--recipe-table", mixed, "--window", "1:4"), says)
    assert table(mixed, "--window", "1:2")[0][0]["gpus"] == 2


def test_the_energy_of_several_gpus_is_that_of_all_where_all_were_read(tmp_path):
    new = made(tmp_path / "new", [1.0] * 4, gpus=[2] * 4, n_gpus_read=[2] * 4, **POWER)
    (row,), text = table(new)
    assert (row["energy_from"], row["joules_per_token"]) == ("energy counter", 0.05)
    assert "the GPUs' energy counters" in text and "first GPU" not in text
    read = made(tmp_path / "read", [1.0] * 4, gpus=[2] * 4, n_gpus_read=[2] * 4,
                gpu_power_w=[100.0] * 4)  # fmt: skip
    (row,), text = table(read)
    assert row["energy_from"] == "power readings" and "first GPU" not in text


def test_the_energy_of_several_hosts_is_that_of_one(tmp_path):
    run = made(tmp_path / "run", [1.0] * 4, plan={"n_hosts": 2}, **POWER)
    (row,), text = table(run)
    assert row["energy_from"] == "energy counter of rank 0's host"
    assert text.endswith("\nJ/token is of rank 0's host alone: run.\n")
    assert row["hosts"] == 2 and "2 hosts x NVIDIA Made-up" in text


def test_hosts_count_beside_their_gpus(tmp_path):
    run = made(tmp_path / "run", [1.0] * 6, hosts=["absent"] * 2 + [2] * 4, gpus=[8] * 6)
    (row,), text = table(run, "--last", 4)
    assert (row["gpus"], row["hosts"]) == (8, 2) and "2 hosts x 8 x NVIDIA Made-up" in text
    mixed = command("report", "--recipe-table", run, "--last", 5)
    refused(mixed, r"the steps of the window ran on 1 to 2 hosts: give --window with steps of one")


def test_power_of_one_gpu_and_of_all_is_not_put_together(tmp_path):
    """As in a run that an older version began."""
    run = made(tmp_path / "run", [1.0] * 4, gpus=[2] * 4, n_gpus_read=["absent"] + [2] * 3,
               gpu_power_w=[100.0, 300.0, 500.0, 500.0])  # fmt: skip
    says = "power and energy are of 1 GPU in some steps .* of 2 in others .*: give --window with"
    refused(command("report", "--recipe-table", run, "--window", "1:4"), says)
    # the step before the window does not count: 300 and (300 + 500) / 2, not (100 + 300) / 2
    assert table(run, "--window", "2:3")[0][0]["joules_per_token"] == (300 + 400) / 2000
    assert table(run, "--last", "1")[0][0]["energy_from"] == "power readings"


def test_csv_has_a_header_and_a_line_a_run(run, tmp_path):
    other = made(tmp_path / 'other, with "commas"', [1.0] * 4)
    path = tmp_path / "table.csv"
    assert command("report", "--recipe-table", run, other, "--csv", path).returncode == 0
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["run"] for r in rows] == ["run", 'other, with "commas"']
    assert float(rows[0]["step_s_std"]) == 1.0 and rows[0]["joules_per_token"] == ""
    assert float(rows[1]["tokens_per_s_mean"]) == 1000


def test_what_a_table_cannot_show_is_refused(run, tmp_path):
    def no(pattern, *args):
        before = sorted(p.name for p in run.iterdir())
        refused(command("report", *args), pattern)
        assert sorted(p.name for p in run.iterdir()) == before

    for window in ("5", "0:3", "4:3", "a:b", "-1:2", "1:"):
        no("counted from 1", "--recipe-table", run, f"--window={window}")
    no(r"has the steps 1 to 5: give a window inside", "--recipe-table", run, "--window", "4:6")
    no(r"--last 6: .* has 5 steps", "--recipe-table", run, "--last", "6")
    no("--last 0: give 1 or more", "--recipe-table", run, "--last", "0")
    no("not allowed with", "--recipe-table", run, "--last", "1", "--window", "1:2")
    no("one run, 2 given", run, run)
    no("--window goes with --recipe-table", run, "--window", "1:2")
    no("--csv goes with --recipe-table", run, "--csv", tmp_path / "x")
    no("--output is the page's", "--recipe-table", run, "-o", "x")
    no("--csv .* is a directory", "--recipe-table", run, "--csv", run)
    no("none is no directory", "--recipe-table", run, tmp_path / "none")
    short = made(tmp_path / "short", [1.0, 1.0])
    no("train longer, or give --window 1:2", "--recipe-table", short)
    ramp = made(tmp_path / "ramp", [1.0] * 4, tokens=[500, 500, 500, 1000])
    no(r"from 500 to 1,000 tokens \(a batch ramp\)", "--recipe-table", ramp)
    assert table(ramp, "--last", "1")[0][0]["tokens_per_s_mean"] == 1000
    (row,), text = table(ramp, "--window", "1:3")  # not the plan's 1000
    assert row["tokens_per_step"] == 500 and " 500 " in text.splitlines()[1]
    old = made(tmp_path / "old", [1.0] * 4, tokens=["absent"] * 4)
    no("has lines without tokens: an older version", "--recipe-table", old)
    broken = made(tmp_path / "broken", [1.0] * 4, plan={"hardware": 7})
    no("plan.json: hardware is '7', and an object is needed", "--recipe-table", broken)


def test_a_run_without_a_plan_has_its_measured_figures(run):
    (run / "plan.json").unlink()
    (row,), text = table(run)
    assert row["step_s_mean"] == 2.0 and row["device"] is None and row["seq_len"] is None
    assert text.splitlines()[1].split() == ["run", "-", "-", "1,000", "-", "-", "-"]
