"""Hosts from Python: the script's tasks give the bits of `penstock train`'s; an exception in one of
them ends the others."""

import hashlib
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import HANGS_S, ROOT
from penstock import (
    BudgetError,
    FormatError,
    Hardware,
    Hosts,
    InvalidError,
    ModelConfig,
    Plan,
    StateError,
)
from penstock._lib import check, ffi, lib, struct, text
from penstock.checkpoint import _CUT
from test_hosts import LAUNCHERS, SEQ, STEPS, end, environment, free_port, result, start

SCRIPT = f"""
import json, sys
from penstock import Hardware, Hosts, ModelConfig, Plan, Trainer
model, shard, folder, fails = sys.argv[1:5]
with Hosts.from_launcher(wait=60) as hosts:
    plan = Plan(
        ModelConfig.read(model), seq_len={SEQ}, tokens_per_step=4 * {SEQ}, recipe="bf16",
        hardware=Hardware.estimate(1, "cpu"), hosts=hosts,
        **(dict(chunk_tokens={SEQ}, chunks_per_round=1) if hosts.rank == 0 else {{}}),
    )
    with Trainer(model, plan, shard, lr=3e-4, total_steps={STEPS}) as trainer:
        seen = [(m.loss, m.grad_norm, m.tokens) for m in trainer.steps({STEPS})]
        if fails == str(hosts.rank):
            raise ValueError("no more")
        if hosts.rank == 0:
            trainer.save(folder)
            print(json.dumps(seen))
            print(hosts.transport)
        if fails != "-":
            list(trainer.steps(1000))
"""


def run_script(model, shard, folder, n, fails="-", script=SCRIPT):
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, str(model), str(shard), str(folder / "out"), fails],
            env=environment(rank=rank, n=n, port=port, PYTHONPATH=str(ROOT / "python")),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n)
    ]


def weights(folder):
    (file,) = (folder / "out").glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_script_gives_the_bits_of_the_command(n, tiny_model, tiny_shard, tmp_path):
    done = [t.communicate(timeout=HANGS_S) for t in run_script(tiny_model, tiny_shard, tmp_path, n)]
    lines = done[0][0].splitlines()
    assert len(lines) == 2, done
    command = tmp_path / "command"
    more = ("--recipe", "bf16", "--lr", 3e-4, "--lr-schedule", "constant")
    more += ("--out", command / "out")
    codes, said = end(start(tiny_model, tiny_shard, command, *more, n=n))
    assert codes == [0] * n, said
    tokens, (losses, norms, digest) = result(command)
    seen = json.loads(lines[0])
    assert [s[0] for s in seen] == losses and [s[1] for s in seen] == norms
    assert [s[2] for s in seen] == [t for t, _ in tokens] and weights(tmp_path) == digest
    assert lines[1].startswith("gradients go over TCP" if n > 1 else "gradients stay on this host")


def test_an_exception_in_one_task_ends_the_other(tiny_model, tiny_shard, tmp_path):
    tasks = run_script(tiny_model, tiny_shard, tmp_path, 2, fails="1")
    codes, said = end(tasks)
    assert codes == [1, 1] and "rank 1 failed: ValueError: no more" in said[0], said
    assert said[1].rstrip().endswith("ValueError: no more")


def test_batch_ramps_that_differ_are_refused(tiny_model, tiny_shard, tmp_path):
    ramp = f'recipe="bf16", batch_ramp=[({2 * SEQ}, 1 + hosts.rank)],'
    script = SCRIPT.replace('recipe="bf16",', ramp)
    codes, said = end(run_script(tiny_model, tiny_shard, tmp_path, 2, script=script))
    stage = "stage 1 of batch-ramp = 1 sequences a host, {} steps"
    why = f"the tasks disagree: rank 1 has {stage.format(2)}, and rank 0 has {stage.format(1)}"
    assert codes == [1, 1] and all(words.rstrip().endswith(why) for words in said), said


def test_what_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="transport is 'udp': give auto, nccl or tcp"):
        Hosts(0, 2, transport="udp")
    with pytest.raises(InvalidError, match="rank 2: 2 tasks have the ranks 0 to 1"):
        Hosts(2, 2)
    monkeypatch.delenv("PENSTOCK_HOSTS_SECRET", raising=False)
    for insecure, why in (
        (False, "there is no secret, "),
        (True, "is no address of rank 0's host"),
    ):
        with pytest.raises(InvalidError, match=why):
            Hosts(0, 2, "192.0.2.1", insecure=insecure)
    for name, value in environment(rank=1, n=2, local=1).items():
        monkeypatch.setenv(name, value)
    for bad in ("x", "", "1.5", "-1"):
        monkeypatch.setenv("RANK", bad)
        with pytest.raises(InvalidError, match=f'RANK is "{bad}" and WORLD_SIZE "2": both must be'):
            Hosts.from_launcher()
    monkeypatch.setenv("RANK", "1")
    what = "type torchrun --nproc-per-node 1 SCRIPT ..., with gpus=2 in its Plan$"
    with pytest.raises(InvalidError, match="torchrun started 2 tasks on this host, .*" + what):
        Hosts.from_launcher()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_variables_of_launchers(launcher, monkeypatch):
    for name, value in environment(launcher, rank=1, n=3, port=29501).items():
        monkeypatch.setenv(name, value)
    task = struct("ps_hosts_task")
    check(lib.ps_hosts_task_find(task))
    found = lambda: (text(task.address), task.rank, task.n_hosts, task.port)
    assert found() == ("127.0.0.1", 1, 3, 29501)
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(InvalidError, match="MASTER_PORT is 0"):
        check(lib.ps_hosts_task_find(task))
    assert found() == ("127.0.0.1", 1, 3, 29501)  # an output is untouched on failure


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("node[08-10,12],gpu3", "node08"),
        ("gpu3,node[1-2]", "gpu3"),
        ("rack[0-1]n[3,5-6]", "rack0n3"),
        ("node[1-2]-ib", "node1-ib"),
    ],
)
def test_the_first_host_of_slurms_list(nodes, first, monkeypatch):
    given = environment("srun", rank=1, n=2)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
        given.pop(name)
    for name, value in (given | {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "12345"}).items():
        monkeypatch.setenv(name, value)
    task = struct("ps_hosts_task")
    check(lib.ps_hosts_task_find(task))
    assert (text(task.address), task.rank, task.n_hosts, task.port) == (first, 1, 2, 22345)


def test_two_trainers_of_the_same_hosts(tiny_model, tiny_shard, tmp_path):
    """The second one is refused while the first one lives."""
    script = SCRIPT.replace(
        "        seen = ",
        "        try:\n"
        f"            Trainer(model, Plan(ModelConfig.read(model), seq_len={SEQ}, hosts=hosts,"
        f" tokens_per_step=4 * {SEQ}, hardware=Hardware.estimate(1, 'cpu')), shard)\n"
        "        except BusyError as error:\n"
        "            print(error)\n"
        "        seen = ",
    ).replace("import Hardware", "import BusyError, Hardware")
    done = [
        t.communicate(timeout=HANGS_S)
        for t in run_script(tiny_model, tiny_shard, tmp_path, 2, script=script)
    ]
    assert "another trainer uses these hosts" in done[0][0] and "another" in done[1][0], done
    assert "gradients go over TCP" in done[0][0]


RATE_SCRIPT = f"""
import sys, time
from pathlib import Path
from penstock import Hardware, Hosts, ModelConfig, Plan
from penstock._lib import lib
NETWORK = lib.PS_LINK_NETWORK
model, _, folder, fails = sys.argv[1:5]
def tell_and(measure):
    def told(*given):
        Path(folder, str(hosts.rank)).touch()
        measure(*given)
    return told
def fail_last(*_):
    while len(list(Path(folder).iterdir())) < hosts.n - 1:
        time.sleep(0.01)
    return [][0]
with Hosts.from_launcher(wait=60) as hosts:
    def plan(stated=0):
        hardware = Hardware.estimate(1, "cpu")
        hardware._ptr.link[NETWORK].bytes_per_s = stated
        made = Plan(
            ModelConfig.read(model), seq_len={SEQ}, tokens_per_step=6 * {SEQ}, hardware=hardware,
            hosts=hosts,
        )
        assert hardware.link[NETWORK]["bytes_per_s"] == stated
        return made
    if fails != "-":
        hosts._measure = fail_last if fails == str(hosts.rank) else tell_and(hosts._measure)
    plans = plan(), plan(), plan(hosts.rank * 1e9), plan(2e9)
    rates = [p.json()["network_bytes_per_s"] for p in plans]
    assert rates == [p.hardware.link[NETWORK]["bytes_per_s"] for p in plans]
    print(*rates)
"""


def test_all_tasks_plan_with_one_rate(tiny_model, tmp_path):
    """The first Plan measures it; one that is stated wins; the caller's Hardware stays as it is."""
    tasks = run_script(tiny_model, "-", tmp_path, 3, script=RATE_SCRIPT)
    done = [t.communicate(timeout=HANGS_S) for t in tasks]
    assert [t.returncode for t in tasks] == [0, 0, 0], done
    rates = [[float(w) for w in out.split()] for out, _ in done]
    assert rates[0] == rates[1] == rates[2]
    assert rates[0][0] == rates[0][1] > 1e6 and rates[0][2:] == [1e9, 2e9]


def test_a_cap_that_rank_0s_cut_exceeds(tiny_model):
    """Rank 1 names the cut, which its script has not given; rank 0's words are the planner's."""
    model, seen = ModelConfig.read(tiny_model), []
    cut = dict(zip(_CUT, (4 * SEQ, 1, 1, 1, SEQ), strict=True))
    hardware = Hardware.estimate(1, "cpu")
    for rank in (0, 1):
        hosts = object.__new__(Hosts)
        hosts.rank, hosts.n = rank, 2
        hosts._join = lambda config, _: [setattr(config, *item) for item in cut.items()]
        with pytest.raises(BudgetError) as why:
            Plan(model, seq_len=SEQ, hardware=hardware, device_mem="1MiB", hosts=hosts)
        seen.append(str(why.value))
    text = ", ".join(f"{name}={tokens}" for name, tokens in cut.items())
    whose = f"the cut of a step is that of rank 0's plan ({text}): give a smaller one there"
    assert seen[0].startswith("needs ") and seen[1] == f"{seen[0]}; {whose}"


BROKEN_RATES = ["0", "-1e9", "NaN", "1e999", "null", "true", '"1e9"', "[1e9]", "1e9,"]
RATE = '{"layout": 1, "network_bytes_per_s": %s}'


@pytest.mark.parametrize("text", [RATE % rate for rate in BROKEN_RATES] + [
    "", "1e9", "[1e9]", '{"layout": 1, "other_bytes_per_s": 1e9}', '{"network_bytes_per_s": 1e9',
])  # fmt: skip
def test_a_file_without_a_rate_is_refused(text, tmp_path):
    out, path = ffi.new("double *", 5), tmp_path / "network.json"
    path.write_text(RATE % "1e9")
    check(lib.ps_hosts_rate_read(out, str(path).encode()))
    assert out[0] == 1e9
    path.write_text(text)
    with pytest.raises(FormatError, match="network.json: "):
        check(lib.ps_hosts_rate_read(out, str(path).encode()))
    assert out[0] == 1e9


@pytest.mark.parametrize("layout", ["", '"layout": 0, ', '"layout": 2, ', '"layout": "1", '])
def test_a_rate_of_another_version_is_refused(layout, tmp_path):
    out, path = ffi.new("double *", 5), tmp_path / "network.json"
    path.write_text(f'{{{layout}"network_bytes_per_s": 1e9}}')
    with pytest.raises(StateError, match="network.json: measured by another version of penstock"):
        check(lib.ps_hosts_rate_read(out, str(path).encode()))
    assert out[0] == 5


def exchanges(plan):
    """What the stream between hosts runs, in its order."""
    schedule, net = plan.schedule, plan.stream_names.index("net")
    ops = [op for op in map(schedule.op, range(schedule.n_ops)) if op["stream"] == net]
    return [(op["name"], op["tag"]["layer"]) for op in ops]


@pytest.mark.parametrize(
    "recipe, clip", [("bf16", True), pytest.param("fp32-master", False, marks=pytest.mark.long)]
)
def test_exchanges_have_one_order_whatever_the_plan(recipe, clip, tiny_model):
    """Under other caps, rates and numbers of devices, with the cut of one plan: in one recipe half
    of the pairs, in the other one the rest."""
    model, seen = ModelConfig.read(tiny_model), set()
    hosts = SimpleNamespace(
        n=2, _join=lambda config, _: setattr(config, "n_hosts", 2), _found=lambda *_: None
    )

    def plan(rate, device_mem, gpus, layout, **cut):
        hardware = Hardware.estimate(2, "cpu")
        hardware._ptr.link[lib.PS_LINK_NETWORK].bytes_per_s = rate
        return Plan(
            model, seq_len=SEQ, tokens_per_step=32 * SEQ, recipe=recipe, clip_norm=float(clip), hosts=hosts,
            hardware=hardware, device_mem=device_mem, gpus=gpus, layout=layout, **cut,
        )  # fmt: skip

    first = plan(1e6, "2MiB", 1, "auto")
    cut = {name: first.report[name] for name in _CUT}
    last = exchanges(first)
    assert len(last) == 2 + 6 and [layer for _, layer in last[2:]] == [5, 4, 3, 2, 1, 0]
    devices = [(1, "auto", "4MiB"), (1, "auto", None), (2, "ring", "2MiB"), (2, "ring", "4MiB")]
    devices += [(2, "data-parallel", "4MiB"), (2, "data-parallel", "6MiB")]
    rates = (0, 1e6, 3e7, 1e10)
    for (i, rate), (k, (gpus, layout, device_mem)) in itertools.product(
        enumerate(rates), enumerate(devices)
    ):
        if (i + k) % 2 == clip:
            continue
        p = plan(rate, device_mem, gpus, layout, **cut)
        assert exchanges(p) == last, (rate, gpus, layout, device_mem)
        seen.add((p.report["n_ops"], p.report["resident_grad_units"]))
    assert len(seen) > 8


def test_the_smallest_caps_are_those_of_a_host(tiny_model):
    """Each of two hosts has half of the step's sequences, and memory for sums over hosts."""
    model, hardware = ModelConfig.read(tiny_model), Hardware.estimate(1, "cpu")
    kw = {"seq_len": SEQ, "tokens_per_step": 4 * SEQ, "chunk_tokens": SEQ, "hardware": hardware}
    one, two = Plan.smallest(model, **kw), Plan.smallest(model, hosts=SimpleNamespace(n=2), **kw)
    assert two[1] > one[1] + (4 << 20) > 4 << 20
