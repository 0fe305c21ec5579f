"""Rates of a machine: measured in full, kept as JSON, read back, refused when they are not this
machine's, and what plans make of them."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BUILD, ROOT
from penstock import BudgetError, FormatError, Hardware, ModelConfig, Plan
from penstock._lib import check, encode_path, ffi, lib, struct
from penstock.errors import StateError
from test_plan import config, rates

BINARY = BUILD / "bin/penstock"
GPUS = {
    "network_bytes_per_s",  # stated by a file, not measured
    "heads512_attention_flops_per_s",
    "heads512_attention_bwd_flops_per_s",
    "device_peak_bytes_per_s",
    "link_peak_bytes_per_s",
}


@pytest.fixture(scope="module")
def profiled():
    return Hardware.profile(2, 0.3, "cpu")


def read(path):
    hw = struct("ps_hardware")
    check(lib.ps_hardware_read(hw, encode_path(path), lib.PS_BACKEND_CPU, 0, 2))
    return Hardware(hw)


def changed(profiled, path, **change):
    """The profile's file with other members; None: without."""
    profiled.write(path)
    members = {k: v for k, v in (json.loads(path.read_text()) | change).items() if v is not None}
    path.write_text(json.dumps(members))
    return path


def with_found(profiled, path):
    """The profile's file with an entry more, as a GPU's has it."""
    profiled.write(path)
    table = json.loads(path.read_text())["attention_bf16"]
    return changed(profiled, path, attention_bf16=[*table, table[3] | {"found": 1}])


def entries(table):
    """Of a table; of the tables by dtype, that of bf16."""
    table = table[lib.PS_BF16] if isinstance(table[0], list) else table
    return [e for e in table if next(iter(e.values()))]


def test_a_profile_on_the_cpu_backend_fills_everything(profiled):
    d = profiled.as_dict()
    for name, value in d.items():
        if name.endswith("_per_s") and name not in GPUS:
            assert min(value if isinstance(value, list) else [value]) > 0, name
    assert [e["rows"] for e in entries(d["gemm"])] == [32, 128, 512, 1024]
    kinds = [
        ("slice" if e["kv_rows"] > e["rows"] else "packed" if e["packed"] > 1 else "whole")
        for e in entries(d["attention"])
    ]
    assert [kinds.count(k) for k in ("whole", "packed", "slice")] == [3, 3, 3]
    for e in entries(d["gemm"]) + entries(d["attention"]):
        assert all(v > 1e6 for k, v in e.items() if k.endswith("flops_per_s"))


def test_a_file_gives_back_what_was_written(profiled, tmp_path):
    assert any(
        e["found"]
        for e in entries(read(with_found(profiled, tmp_path / "a.json")).as_dict()["attention"])
    )
    read(tmp_path / "a.json").write(tmp_path / "b.json")
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads(
        (tmp_path / "b.json").read_text()
    )
    profiled.write(tmp_path / "a.json")
    assert (
        Hardware.read(tmp_path / "a.json").as_dict()
        == read(tmp_path / "a.json").as_dict()
        == profiled.as_dict()
    )


def fill(struct_of, numbers):
    """Every number of a struct gets a value of its own."""
    for name, field in ffi.typeof(struct_of).fields:
        kind, at = field.type.kind, getattr(struct_of, name)
        if kind == "array" and field.type.item.cname != "char":
            flat = [c for part in at for c in part] if field.type.item.kind == "array" else list(at)
            for i, entry in enumerate(flat):
                if isinstance(entry, ffi.CData):
                    fill(entry, numbers)
                else:
                    at[i] = next(numbers)
        elif kind == "primitive" and name not in ("struct_bytes", "reserved"):
            setattr(struct_of, name, next(numbers))


def test_every_field_is_in_the_file(tmp_path):
    """Of all fields but the GPU's number, which is the reader's, not the machine's, and the ends of
    links. Host and device have one rate of copies both ways at once, other links none."""
    hw = struct("ps_hardware")
    fill(hw[0], itertools.count(1000))
    hw.backend, hw.measured, hw.device = 1, 2, 0
    for dtype in range(lib.PS_N_DTYPES):
        for i, entry in enumerate(hw.attention[dtype]):
            entry.kv_rows, entry.packed, entry.found = entry.rows, 1, i % 2
    for i, entry in enumerate(hw.contention):
        entry.kinds = 4 + i % 8
    hw.n_gpus, hw.other_work_percent = 2, 45
    for i, entry in enumerate(hw.gpus_contention):
        entry.kinds = (1, 2, 3, 5, 6, 7, 9, 10, 11)[i % 9]
        if entry.kinds < 4:
            entry.threads, entry.host_bytes_per_s = 0, 0
    both = hw.link[lib.PS_LINK_H2D].duplex_bytes_per_s
    for link, of in zip(hw.link, Hardware.estimate(1, "cpu").link, strict=True):
        setattr(link, "from", of["from"])
        link.to = of["to"]
        link.duplex_bytes_per_s = both if {of["from"], of["to"]} == {0, 1} else 0
    Hardware(hw).write(tmp_path / "a.json")
    assert Hardware.read(tmp_path / "a.json").as_dict() == Hardware(hw).as_dict()


def test_plans_in_fp8_count_what_its_kernels_take(tmp_path):
    """Of the GPU's memory, and those in bf16 do not."""
    config(tmp_path, hidden_size=64)
    model, mib = ModelConfig.read(tmp_path), 1 << 20
    for recipe in ("bf16", "fp8"):
        given = []
        for taken in (0, 96 * mib):
            hardware = Hardware.read(ROOT / "docs/hardware-h200.json")
            hardware._ptr.fp8_overhead_bytes = taken
            plan = Plan(model, hardware=hardware, seq_len=64, recipe=recipe)
            given.append(plan.report["device_overhead_bytes"])
        assert given[1] - given[0] == (96 * mib if recipe == "fp8" else 0), recipe


def test_a_file_without_rates_of_later_versions_is_read(profiled, tmp_path):
    later = dict.fromkeys(("gemm_fp32", "attention_fp32"))
    assert read(changed(profiled, tmp_path / "a.json", **later)).as_dict() == profiled.as_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"layout": None},
        {"layout": 1},
        {"cudnn_version": 91900},
        {"driver_version": 13000},
        {"cublaslt_version": 1},
        {"flash4_version": 1},
        {"n_threads": 3},
    ],
)
def test_rates_of_another_layout_machine_or_library_are_measured_anew(profiled, tmp_path, change):
    with pytest.raises(StateError, match="run penstock profile"):
        read(changed(profiled, tmp_path / "a.json", **change))


def test_an_old_file_in_the_cache_is_replaced(profiled, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = Hardware.cache_path(2, "cpu")
    path.parent.mkdir()
    old = {
        "gemm_bf16": None,
        "attention_bf16": None,
        "layout": None,
        "sumsq_bytes_per_s": None,
        "gemm_bf16_flops_per_s": 12345.0,
    }
    command = [
        BINARY,
        *f"plan --backend cpu --threads 2 --model {tiny_model} --seq-len 64".split(),
    ]
    for again in (True, False):
        if again:
            changed(profiled, path, **old)
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
        assert ("measuring this machine" in done.stderr) == again
    assert json.loads(path.read_text())["gemm_bf16_flops_per_s"] != 12345.0
    changed(profiled, path, **old)
    assert Hardware.cached(2, "cpu").gemm_flops_per_s[1] != 12345.0


def test_a_description_by_hand_needs_single_rates_only(profiled, tmp_path):
    assert profiled.as_dict()["optimizer_8_bits_bytes_per_s"] > 0
    assert [e["heads"] for e in entries(profiled.as_dict()["delta"])] == [2]
    gone = {
        name: None
        for name in json.loads(changed(profiled, tmp_path / "a.json").read_text())
        if name
        in GPUS
        | {
            "layout",
            "measured",
            "gemm_bf16",
            "attention_bf16",
            "delta_rule",
            "accumulate_bytes_per_s",
            "accumulate_sumsq_bytes_per_s",
            "sumsq_bytes_per_s",
            "gather_bytes_per_s",
            "optimizer_8_bits_bytes_per_s",
            "gemm_fp8_flops_per_s",
            "fp8_attention_speed",
            "fp8_overhead_bytes",
            "heads64_attention_speed",
            "heads64_attention_bwd_speed",
            "heads64_long_attention_speed",
            "heads64_long_attention_bwd_speed",
            "idle_gain",
            "idle_most",
            "driver_version",
            "cublaslt_version",
            "flash4_version",
        }
    }
    d = Hardware.read(
        changed(
            profiled,
            tmp_path / "a.json",
            **gone,
            attention_bf16_flops_per_s=5e12,
            attention_bwd_bf16_flops_per_s=4e12,
            gemm_bf16_flops_per_s=9e12,
            optimizer_bytes_per_s=3e9,
            memory_bytes_per_s=2e10,
        )
    ).as_dict()
    assert not entries(d["attention"]) and not entries(d["gemm"]) and not entries(d["delta"])
    assert (
        d["attention_flops_per_s"][1],
        d["attention_bwd_flops_per_s"][1],
        d["gemm_flops_per_s"][1],
    ) == (5e12, 4e12, 9e12)
    assert (
        d["measured"]
        and d["accumulate_bytes_per_s"] == d["sumsq_bytes_per_s"] == 3e9
        and d["gather_bytes_per_s"] == 5e9
        and d["optimizer_8_bits_bytes_per_s"] == 0  # plans say that they assume it
    )


SHARE = {
    "kinds": 7,
    "threads": 2,
    "h2d_bytes_per_s": 1e9,
    "d2h_bytes_per_s": 1e9,
    "host_bytes_per_s": 1e9,
}
WHOLE = {
    "rows": 64,
    "kv_rows": 64,
    "packed": 1,
    "forward_flops_per_s": 1e12,
    "backward_flops_per_s": 1e12,
}


@pytest.mark.parametrize(
    "change,says",
    [
        (
            {"attention_bf16": [WHOLE, WHOLE | {"packed": 0}]},
            r"attention_bf16\[1\]\.packed is missing or no positive",
        ),
        (
            {"attention_bf16": [WHOLE | {"backward_flops_per_s": 0}]},
            r"attention_bf16\[0\]\.backward_flops_per_s is missing or not positive",
        ),
        (
            {"attention_bf16": [WHOLE | {"kv_rows": 32}]},
            r"32 kv_rows for 64 rows, packed 1, found 0: none of whole, packed, found and slice",
        ),
        (
            {"attention_bf16": [WHOLE, WHOLE | {"packed": 2, "kv_rows": 128}]},
            r"attention_bf16\[1\]: 128 kv_rows for 64 rows, packed 2",
        ),
        (
            {"attention_bf16": [WHOLE, WHOLE | {"found": 1, "kv_rows": 128}]},
            r"attention_bf16\[1\]: 128 kv_rows for 64 rows, packed 1, found 1",
        ),
        (
            {"attention_bf16": [WHOLE, WHOLE | {"found": 2}]},
            r"attention_bf16\[1\]\.found is no whole number from 0 to 1",
        ),
        ({"attention_bf16": [WHOLE | {"found": 1}]}, r"needs an entry of a whole sequence"),
        ({"attention_bf16": [WHOLE | {"packed": 2}]}, r"needs an entry of a whole sequence"),
        (
            {"memory_shares": [SHARE, SHARE | {"kinds": 3}]},
            r"memory_shares\[1\]\.kinds 3: neither sums",
        ),
        ({"memory_shares": [SHARE | {"kinds": 12}]}, r"memory_shares\[0\]\.kinds 12: neither sums"),
        (
            {"memory_shares_of_gpus": [SHARE | {"kinds": 4}]},
            r"memory_shares_of_gpus\[0\]\.kinds 4: no copies",
        ),
        (
            {"memory_shares_of_gpus": [SHARE | {"kinds": 15}]},
            r"memory_shares_of_gpus\[0\]\.kinds 15: no copies",
        ),
        ({"n_gpus": 9}, r"n_gpus is no whole number from 0 to 8"),
        (
            {"memory_shares": [SHARE | {"threads": 0}]},
            r"memory_shares\[0\]\.threads is missing or no positive",
        ),
        ({"attention_bf16": [WHOLE] * 13}, r"a list of at most 12 entries"),
        ({"gemm_bf16": {"rows": 1}}, r"gemm_bf16 must be a list"),
        ({"gemm_bf16": [{"rows": 1}]}, r"gemm_bf16\[0\]\.forward_flops_per_s is missing"),
        ({"sumsq_bytes_per_s": -1}, r"sumsq_bytes_per_s is missing or not positive"),
        ({"h2d_bytes_per_s": None}, r"h2d_bytes_per_s is missing or not positive"),
    ],
)
def test_a_wrong_description_is_refused_by_the_fields_name(profiled, tmp_path, change, says):
    with pytest.raises(FormatError, match=says):
        Hardware.read(changed(profiled, tmp_path / "a.json", **change))


def test_a_described_machine_is_planned_for_with_the_host_memory_that_is_given(profiled, tmp_path):
    """--host-mem is what the machine planned for has, however little FILE says; without it FILE's
    memory is the limit."""
    config(tmp_path, vocab_size=32768, hidden_size=512)  # 300 MB on the host
    command = [
        BINARY,
        *f"plan --model {tmp_path} --seq-len 64 --json --hardware".split(),
        changed(profiled, tmp_path / "a.json", host_memory_bytes=100 << 20),
    ]
    planned = subprocess.run(
        [*command, "--host-mem", "2GiB"], capture_output=True, text=True, check=True
    )
    plan = json.loads(planned.stdout)
    assert 100 << 20 < plan["host_used_bytes"] <= plan["host_mem_bytes"] == 2 << 30
    grid = subprocess.run(
        [*command, "--grid-device", "1TiB", "--grid-host", "2GiB"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(grid.stdout)["tokens_per_s"][0][0] > 0
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2 and "the machine has 100.0 MiB" in refused.stderr


@pytest.mark.parametrize("name", ["rtx-5090", "H100"])
def test_gpus_that_are_not_here_are_planned_for_by_name_as_estimates(name):
    hardware = Hardware.of_gpu(name)
    assert hardware.peak_flops_per_s == lib.ps_hardware_peak(hardware.device_name.encode()) > 0
    plan = Plan(
        ModelConfig.read(ROOT / "models/1b.json"),
        hardware=hardware,
        seq_len=4096,
        tokens_per_step=32768,
    )
    assert "(estimated rates)" in str(plan) and plan.report["step_s"] > 0


def test_where_packed_attention_is_slow_chunks_hold_one_sequence(tmp_path):
    """An op costs so much that fewer, larger chunks win, unless attention of packed sequences takes
    a hundred times as long: of those whose documents are known only if it is theirs that is
    slow."""
    model = config(tmp_path)
    for packed, found, chunk in ((1e11, 1e9, 4096), (1e9, 1e11, 1024)):
        hardware = rates(op_ns=2e5)
        hardware._ptr.attention[lib.PS_BF16][0] = {
            "rows": 1024,
            "kv_rows": 1024,
            "packed": 1,
            "forward_flops_per_s": 1e11,
            "backward_flops_per_s": 1e11,
        }
        hardware._ptr.attention[lib.PS_BF16][1] = {
            "rows": 4096,
            "kv_rows": 4096,
            "packed": 4,
            "forward_flops_per_s": packed,
            "backward_flops_per_s": packed,
        }
        hardware._ptr.attention[lib.PS_BF16][2] = {
            "rows": 4096,
            "kv_rows": 4096,
            "packed": 4,
            "found": 1,
            "forward_flops_per_s": found,
            "backward_flops_per_s": found,
        }
        plan = Plan(model, hardware=hardware, seq_len=1024, tokens_per_step=4096, one_document=True)
        assert plan.report["chunk_tokens"] == chunk


def test_the_profile_is_printed_as_a_table_or_json(tmp_path):
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [BINARY, "profile", "--backend", "cpu", "--threads", "2", "--seconds", "0.2"]
    table = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert re.search(r"rates moved by up to \d+% while they were measured", table)
    for what in (
        "matrix products, 1024 rows, forward",
        "gradient of weights",
        "attention, 8 sequences of 128, forward",
        "attention, 512 rows after 3584, forward",
        "AdamW",
        "sums of squares",
        "gather of the embedding's rows",
    ):
        assert what in table
    d = json.loads(
        subprocess.run(
            [*command, "--json", "--quick"], env=env, capture_output=True, text=True, check=True
        ).stdout
    )
    assert len(d["gemm_bf16"]) == 4 and len(d["attention_bf16"]) == 9
    kept = rates_in(tmp_path)
    assert [m["of"] for m in kept.pop("measurements")] == ["quiet", "quiet"]
    assert kept == d | {"layout": 11, "backend": 0, "measured": 1}


# ---- memory to measure in ------------------------------------------------------------------------

# Runs a command and prints its exit status and the peak of its resident memory. Small itself: a
# child's peak begins with its parent's.
LAUNCH = "import os, sys; p = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ); _, s, r = os.wait4(p, 0); print(os.waitstatus_to_exitcode(s), r.ru_maxrss)"


def plan_in(cache, *options, group=None):
    """Exit status, peak of resident memory in bytes, stderr of `penstock plan` with this cache
    folder, in this cgroup."""
    command = [BINARY, "plan", "--backend", "cpu", "--threads", "2", "--seq-len", "64", *options]
    enter = (
        f"open({str(group)!r} + '/cgroup.procs', 'w').write(str(os.getpid())); " if group else ""
    )
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH.replace("; ", "; " + enter, 1), *map(str, command)],
        capture_output=True,
        text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )
    status, peak = done.stdout.split()[-2:]
    return int(status), int(peak) * 1024, done.stderr


@pytest.fixture
def small_model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((ROOT / "models/tiny-llama.json").read_bytes())
    return folder


def rates_in(cache):
    return json.loads(next((cache / "penstock").iterdir()).read_text())


def test_measuring_keeps_within_the_cap_and_is_repeated_where_there_is_more(small_model, tmp_path):
    capped = "--host-mem", "64MiB", "--model", small_model
    status, peak, says = plan_in(tmp_path / "c", *capped)
    assert status == 0 and "measuring this machine" in says and peak < 64 << 20, (peak, says)
    assert rates_in(tmp_path / "c")["measured"] == 2
    assert "measuring" not in plan_in(tmp_path / "c", *capped)[2]
    status, peak, says = plan_in(tmp_path / "c", "--model", small_model)
    assert status == 0 and "measuring this machine" in says and peak > 192 << 20
    kept = rates_in(tmp_path / "c")
    assert kept["measured"] == 1
    assert (
        "measuring" not in plan_in(tmp_path / "c", *capped)[2] and rates_in(tmp_path / "c") == kept
    )


def test_a_cap_that_leaves_no_room_to_measure_in_is_planned_with_estimates(small_model, tmp_path):
    caps = ("--host-mem", "40MiB", "--replan", "off")
    status, peak, says = plan_in(tmp_path / "c", *caps, "--model", small_model)
    assert (
        status == 0
        and "takes 46.0 MiB of host memory at least" in says
        and "rates are estimated" in says
        and peak < 40 << 20
    ), (status, peak, says)
    with pytest.raises(BudgetError, match="measuring this machine takes 46.0 MiB"):
        Hardware.measure(2, 0.1, "cpu", host_mem="1MiB")


@pytest.fixture
def group_of_64_mib():
    """A memory cgroup, version 1 or 2, with a limit of 64 MiB."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"penstock-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(64 << 20))
            yield group
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no memory cgroup can be made here")


def test_measuring_in_a_cgroup_is_not_killed(small_model, tmp_path, group_of_64_mib):
    status, _, says = plan_in(tmp_path / "c", "--model", small_model, group=group_of_64_mib)
    assert status == 0 and "measuring this machine" in says, (status, says)


def test_rates_that_cannot_be_kept_are_told_of_once_with_the_file(
    small_model, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    path = Hardware.cache_path(2, "cpu")
    path.mkdir(parents=True)
    status, _, says = plan_in(tmp_path / "c", "--model", small_model)
    assert status == 0 and says.count(str(path)) == 1 and "not cached" in says, says
    with pytest.warns(UserWarning, match=re.escape(str(path))):
        Hardware.cached(2, "cpu")
    (tmp_path / "file").touch()
    status, _, says = plan_in(tmp_path / "file", "--model", small_model)
    assert status == 0 and says.count(str(tmp_path / "file")) == 1 and "not cached" in says, says
