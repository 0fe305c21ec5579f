"""Several hosts: the network's rate, which the tasks measure and keep, and what a plan counts. All
tasks are on this machine, over TCP."""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess

import pytest
from conftest import ROOT
from test_cli import BINARY
from test_hosts import SEQ, STEPS, end, result, start, trained

# ---- the network's rate --------------------------------------------------------------------------


def rates_of(cache):
    (file,) = (cache / "penstock").glob("hardware-*.json")
    return file, json.loads(file.read_text())


@pytest.fixture(scope="module")
def measured(tiny_model, tmp_path_factory):
    """A cache with this machine's rates on one thread."""
    cache = tmp_path_factory.mktemp("rates")
    given = ("plan", "--model", tiny_model, "--seq-len", SEQ, "--backend", "cpu", "--threads", 1)
    subprocess.run(
        [str(w) for w in (BINARY, *given)],
        check=True,
        capture_output=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )
    return cache


def stating(measured, folder, rates):
    """A cache for each of @rates, which states it as the network's."""
    caches = [shutil.copytree(measured, folder / f"cache-{i}") for i in range(len(rates))]
    for cache, rate in zip(caches, rates, strict=True):
        file, machine = rates_of(cache)
        file.write_text(json.dumps(machine | {"network_bytes_per_s": rate}))
    return caches


def copies(measured, folder, n=2):
    return [shutil.copytree(measured, folder / f"cache-{i}") for i in range(n)]


def kept(cache):
    """The files of networks' rates, and what they state."""
    return {f.name: json.loads(f.read_text()) for f in (cache / "penstock").glob("network-*")}


def network_file(n=2):
    """Of n tasks of this machine, over TCP: their machines' names, each with a NUL behind it."""
    names = (socket.gethostname() + "\0") * n
    return f"network-{hashlib.sha256(names.encode()).hexdigest()[:16]}-tcp.json"


def rate_file(rate, **more):
    return {"layout": 1, "network_bytes_per_s": rate} | more


def planned_rate(folder):
    return json.loads((folder / "plan.json").read_text())["network_bytes_per_s"]


def test_the_network_is_measured_before_the_plan(measured, tiny_model, tiny_shard, tmp_path):
    """Rank 0 says the rate; no file of the machine's rates keeps it."""
    loud, caches = {0: ("--quiet=false",)}, copies(measured, tmp_path)
    tasks = start(tiny_model, tiny_shard, tmp_path, each=loud, caches=caches)
    codes, said = end(tasks)
    assert codes == [0, 0] and not said[1], said
    line = re.search(r"GB a step each way at (\S+) GB/s: (\S+) s\n", said[0])
    rate = planned_rate(tmp_path)
    assert float(line[1]) == pytest.approx(rate * 1e-9, rel=5e-3) and 1e6 < rate < 1e12
    assert "no time is taken" not in said[0]
    assert [rates_of(c)[1]["network_bytes_per_s"] for c in caches] == [0, 0]


def test_rank_0_keeps_the_rate_for_later_starts(measured, tiny_model, tiny_shard, tmp_path):
    """The next start plans with exactly that rate, and rank 1 is told."""
    caches, seen = copies(measured, tmp_path), []
    for name in ("first", "second"):
        folder = tmp_path / name
        codes, said = end(start(tiny_model, tiny_shard, folder, caches=caches))
        assert codes == [0, 0] and not any(said), said
        seen.append(planned_rate(folder))
    file = {"layout": 1, "network_bytes_per_s": seen[0], "transport": "tcp", "n_hosts": 2}
    assert kept(caches[0]) == {network_file(): file | {"machine": socket.gethostname()}}
    assert not kept(caches[1]) and seen[1] == seen[0]


def test_a_kept_rate_is_of_its_machines_alone(measured, tiny_model, tiny_shard, tmp_path):
    """Three tasks measure beside the file of two, which two tasks read, and rank 0 alone."""
    caches = copies(measured, tmp_path, 3)
    for cache, rate in zip(caches, (3e9, 2e9, 1e9), strict=True):
        (cache / "penstock" / network_file()).write_text(json.dumps(rate_file(rate)))
    before, rates = kept(caches[0]), {}
    for n in (3, 2):
        folder, more = tmp_path / f"{n}", ("--tokens-per-step", 6 * SEQ)
        tasks = start(tiny_model, tiny_shard, folder, *more, n=n, caches=caches)
        codes, said = end(tasks)
        assert codes == [0] * n and not any(said), said
        rates[n] = planned_rate(folder)
    assert rates[2] == 3e9 and rates[3] not in (3e9, 2e9, 1e9)
    of_three = kept(caches[0])[network_file(3)]
    assert (of_three["network_bytes_per_s"], of_three["n_hosts"]) == (rates[3], 3)
    assert kept(caches[0]) == before | {network_file(3): of_three}


LATER = json.dumps(rate_file(3e15, layout=2))


@pytest.mark.parametrize("text", [pytest.param("a line\n", marks=pytest.mark.long), LATER])
def test_a_file_that_is_broken_or_of_another_version_is_measured_anew(
    text, measured, tiny_model, tiny_shard, tmp_path
):
    caches = copies(measured, tmp_path)
    (caches[0] / "penstock" / network_file()).write_text(text)
    codes, said = end(start(tiny_model, tiny_shard, tmp_path / "run", caches=caches))
    assert codes == [0, 0] and not any(said), said
    (file,) = kept(caches[0]).values()
    assert file["layout"] == 1 and 1e6 < file["network_bytes_per_s"] < 1e15
    assert file["network_bytes_per_s"] == planned_rate(tmp_path / "run")


def test_a_rate_that_cannot_be_kept_stops_nothing(measured, tiny_model, tiny_shard, tmp_path):
    """Rank 0 says it in a line. A folder is in the file's place, which stops root too."""
    caches = copies(measured, tmp_path)
    (caches[0] / "penstock" / network_file()).mkdir()
    codes, said = end(start(tiny_model, tiny_shard, tmp_path / "run", caches=caches))
    assert codes == [0, 0] and said[0].count("\n") == 1 and not said[1], said
    assert network_file() in said[0] and "the network's rate is not cached: set XDG_" in said[0]
    assert planned_rate(tmp_path / "run") > 1e6


@pytest.mark.parametrize("rates", [pytest.param((5e8, 0), marks=pytest.mark.long), (3e9, 5e8)])
def test_a_rate_that_is_stated_wins_over_a_kept_one(
    rates, measured, tiny_model, tiny_shard, tmp_path
):
    """Also where the kept one is less. The least of the tasks' rates, which no file keeps."""
    caches = stating(measured, tmp_path, rates)
    (caches[0] / "penstock" / network_file()).write_text(json.dumps(rate_file(1e8)))
    codes, said = end(start(tiny_model, tiny_shard, tmp_path, caches=caches))
    assert codes == [0, 0] and planned_rate(tmp_path) == 5e8, said
    assert kept(caches[0]) == {network_file(): rate_file(1e8)} and not kept(caches[1])
    assert [rates_of(c)[1]["network_bytes_per_s"] for c in caches] == list(rates)


def test_a_task_that_fails_before_it_measures_ends_all(tiny_model, tiny_shard, tmp_path):
    folder = tmp_path / "run"
    shards = [tiny_shard, tmp_path / "nowhere.bin", tiny_shard]
    codes, said = end(start(tiny_model, shards, folder, n=3))
    assert codes == [2, 2, 2] and not folder.exists()
    for text in (said[0], said[2]):
        assert text.startswith("penstock: rank 1 failed: --data ") and "nowhere.bin" in text
        assert text.count("\n") == 1


@pytest.mark.parametrize("rate", [1e6, pytest.param(1e10, marks=pytest.mark.long)])
def test_a_stated_rate_with_other_caps_on_each_host(
    rate, measured, tiny_model, tiny_shard, tmp_path
):
    """Rank 0 streams what the others keep, and rank 1 has two devices. The bits are those of the same
    cut under equal caps."""
    uncut = ("--chunk-tokens", 4 * SEQ, "--chunks-per-round", 2, "--tokens-per-step", 48 * SEQ)
    out = ("--out", tmp_path / "a/out")
    each = {0: (*out, "--device-mem", 2 << 20), 1: ("--gpus", 2), 2: ("--device-mem", "6MiB")}
    caches = stating(measured, tmp_path, (rate, 0, 0))
    tasks = start(tiny_model, tiny_shard, tmp_path / "a", *uncut, n=3, each=each, caches=caches)
    codes, said = end(tasks)
    assert codes == [0, 0, 0], said
    more = (*uncut, "--out", tmp_path / "b/out")
    assert trained(tiny_model, tiny_shard, tmp_path / "b", *more, n=3) == result(tmp_path / "a")


def test_a_run_resumes_with_another_rate(measured, tiny_model, tiny_shard, tmp_path):
    """The bits are those of a run in one piece."""
    more = ("--recipe", "fp32-master", "--checkpoint-every", STEPS, "--lr-schedule", "constant")
    caches = stating(measured, tmp_path, (1e10, 1e10, 1e6, 1e6))
    codes, said = end(start(tiny_model, tiny_shard, tmp_path, *more, caches=caches[:2]))
    assert codes == [0, 0] and planned_rate(tmp_path) == 1e10, said
    also = (*more, "--steps", STEPS + 2, "--out")
    resumed = (*also, tmp_path / "out", "--resume", "latest")
    codes, said = end(start(tiny_model, tiny_shard, tmp_path, *resumed, caches=caches[2:]))
    assert codes == [0, 0] and planned_rate(tmp_path) == 1e6, said
    whole = trained(tiny_model, tiny_shard, tmp_path / "whole", *also[:-1])
    assert result(tmp_path) == whole


# ---- plans ---------------------------------------------------------------------------------------


def planned(model, *more):
    given = ("plan", "--model", model, "--seq-len", SEQ, "--tokens-per-step", 8 * SEQ)
    done = subprocess.run(
        [str(w) for w in (BINARY, *given, "--json", *more)], check=True, capture_output=True
    )
    return json.loads(done.stdout)


def test_a_plan_of_hosts_adds_the_exchange(tiny_model, tmp_path):
    from penstock import Hardware

    path = tmp_path / "machine.json"
    Hardware.estimate(2, "cpu").write(path)
    machine = json.loads(path.read_text())
    seen = []
    for rate in (0, 1e9, 1e6):
        path.write_text(json.dumps(machine | {"network_bytes_per_s": rate}))
        seen.append(planned(tiny_model, "--hardware", path, "--hosts", 2, "--recipe", "fp32"))
    assert seen[0]["n_hosts"] == 2 and seen[0]["tokens_per_step"] == 8 * SEQ
    assert seen[0]["exchange_bytes"] == seen[1]["exchange_bytes"] > 0
    slow = seen[0]["exchange_bytes"] / 1e6
    times = [s["predicted_step_s"] for s in seen]
    assert times[0] <= times[1] < times[2] and times[2] >= slow
    path.write_text(json.dumps(machine))
    given = (BINARY, "plan", "--model", tiny_model, "--seq-len", SEQ, "--hardware", path)
    text = subprocess.run(
        [*map(str, given), "--hosts", "2"], check=True, capture_output=True, text=True
    ).stdout
    assert "for which no time is taken" in text and "state network_bytes_per_s" in text
    assert "n_hosts" not in planned(tiny_model, "--hardware", path)


def test_exchanges_over_nccl_wait_for_products(tmp_path):
    """The network's rate is that of exchanges alone. Beside products each segment of an exchange
    waits for a product, of 2,048 tokens or of 16,384, and the totals cross the GPU's link. TCP
    needs neither. Where no rate is known, exchanges take no time and wait for nothing."""
    machine = json.loads((ROOT / "docs/hardware-h200.json").read_text())
    (tmp_path / "config.json").write_text((ROOT / "models/1b.json").read_text())

    def busy(transport, tokens, rate=33e9):
        (tmp_path / "m.json").write_text(json.dumps(machine | {"network_bytes_per_s": rate}))
        given = ("--seq-len", 2048, "--tokens-per-step", 32 * 2048, "--chunk-tokens", tokens)
        given += ("--chunks-per-round", 16384 // tokens, "--device-mem", "40GiB", "--hosts", 2)
        given += ("--hosts-transport", transport, "--hardware", tmp_path / "m.json")
        plan = planned(tmp_path, *given)
        return plan["stream_busy_s"]["net"] / (plan["exchange_bytes"] / 33e9)

    assert 1 <= busy("tcp", 16384) < 1.1 and busy("nccl", 16384, 0) < 1e-3
    short, long = busy("nccl", 2048), busy("nccl", 16384)
    assert 1.1 < short and 1.1 * short < long < 4


def test_a_plan_of_hosts_counts_nccl_on_gpus(tiny_model):
    """1 GiB for NCCL, and five buffers of a 64 MiB segment and the slices of the other host."""
    machine = ROOT / "docs" / "hardware-h200.json"
    more = ("--hardware", machine, "--device-mem", "4GiB", "--host-mem", "16GiB")
    one = planned(tiny_model, *more)
    used = {
        name: planned(tiny_model, *more, "--hosts", 2, "--hosts-transport", name)
        for name in ("auto", "nccl", "tcp")
    }
    key = "device_overhead_bytes"
    assert used["tcp"][key] == one[key]
    assert used["nccl"][key] == used["auto"][key] == one[key] + (1024 + 5 * (64 + 32)) * 2**20
    assert all(plan["device_used_bytes"] <= 4 * 2**30 for plan in used.values())
    short = ("--hardware", machine, "--device-mem", used["tcp"]["device_used_bytes"] + 2**28)
    refused = subprocess.run(
        [str(w) for w in (BINARY, "plan", "--model", tiny_model, "--seq-len", SEQ, *short)]
        + ["--host-mem", "16GiB", "--hosts", "2"],
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
