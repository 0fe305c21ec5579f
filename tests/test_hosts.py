"""Several hosts: tasks that a launcher starts, here all on this machine, over TCP. Bits do not
depend on the GPUs a host; two hosts compute one host's step; a failure of one task ends all."""

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import time

import numpy as np
import pytest
from conftest import HANGS_S, ROOT, write_shard
from penstock.shards import IS_TARGET, write_mask
from test_cli import BINARY

SEQ, STEPS = 64, 3
SECRET = "of the tests, 16 characters and more"
LAUNCHERS = {
    "torchrun": "RANK WORLD_SIZE LOCAL_RANK",
    "mpirun": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK",
    "mpiexec": "PMI_RANK PMI_SIZE MPI_LOCALRANKID",
    "srun": "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID",
}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(launcher="torchrun", rank=0, n=2, local=0, port=29500, **more):
    others = ("SLURM", "OMPI", "PMI", "PENSTOCK_HOSTS")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    names = LAUNCHERS[launcher].split()
    said = dict(zip(names, map(str, (rank, n, local)), strict=True))
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return clean | said | master | more


def words(model, shard, folder, *more):
    cut = ("--chunk-tokens", SEQ, "--chunks-per-round", 1, "--tokens-per-step", 4 * SEQ)
    rest = ("--backend", "cpu", "--threads", 1, "--hosts-wait", 900, "--run-dir", folder)
    rest += ("--force",)  # a folder may have an earlier run
    cut = [w for i, w in enumerate(cut) if cut[i // 2 * 2] not in more]
    given = ("--model", model, "--data", shard, "--seq-len", SEQ, *cut, *rest, "--quiet")
    return [str(w) for w in (BINARY, "train", *given, "--steps", STEPS, *more)]


def start_each(given, caches=None, limits=None, **env):
    """A task of each list of words. @caches: the folder of each rank's rates; @limits: the most bytes
    of a file that a rank may write."""

    def limit(rank):
        if rank in (limits or {}):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[rank], limits[rank]))

    port = free_port()
    return [
        subprocess.Popen(
            words_of_rank,
            env=environment(rank=rank, n=len(given), port=port, **env)
            | ({"XDG_CACHE_HOME": str(caches[rank])} if caches else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda rank=rank: limit(rank),
        )
        for rank, words_of_rank in enumerate(given)
    ]


def start(model, shard, folder, *more, n=2, each=None, **env):
    """A task of each rank. @shard: a path, or one for each rank; @each: the words that one rank has
    beside the others; @env: of all, or an argument of start_each()."""
    shards = shard if isinstance(shard, list) else [shard] * n
    given = [
        words(model, shards[rank], folder, *more, *(each or {}).get(rank, ())) for rank in range(n)
    ]
    return start_each(given, **env)


def end(tasks, seconds=HANGS_S):
    said = [t.communicate(timeout=seconds)[1] for t in tasks]
    return [t.returncode for t in tasks], said


def result(folder):
    """Losses and norms of the steps, and the SHA-256 of the saved weights."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (weights,) = (folder / "out").glob("*.safetensors")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    return [(m["tokens"], m["valid_tokens"]) for m in lines], (
        [m["loss"] for m in lines],
        [m["grad_norm"] for m in lines],
        digest,
    )


def trained(model, shard, folder, *more, n=2, **env):
    if n == 1:
        given = words(model, shard, folder, *more, "--out", folder / "out")
        subprocess.run(given, check=True, capture_output=True)
    else:
        codes, said = end(start(model, shard, folder, *more, "--out", folder / "out", n=n, **env))
        assert codes == [0] * n and not any(said[1:]), said
    return result(folder)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            ("--recipe", "fp32", "--clip-norm", 0.5, "--clip-by", "previous"),
            marks=pytest.mark.long,
        ),
        ("--recipe", "bf16"),
        pytest.param(("--recipe", "fp32-master"), marks=pytest.mark.long),
    ],
    ids=lambda more: more[1],
)
def test_bits_do_not_depend_on_the_gpus_of_a_host(more, tiny_model, tiny_shard, tmp_path):
    one = trained(tiny_model, tiny_shard, tmp_path / "1", *more)
    assert trained(tiny_model, tiny_shard, tmp_path / "2", *more, "--gpus", 2) == one
    assert one[0] == [(4 * SEQ, 4 * SEQ)] * STEPS and len(set(one[1][0])) == STEPS


def test_bits_do_not_depend_on_a_ring_whose_gpus_share_the_head(tiny_model, tiny_shard, tmp_path):
    """Each host has one sequence of 8 chunks, and two of them end with 8 slices of the head."""
    cut = ("--tokens-per-step", 2 * SEQ, "--chunk-tokens", SEQ // 8, "--chunks-per-round", 8)
    more = ("--recipe", "bf16", *cut, "--head-slice-tokens", SEQ // 32)
    one = trained(tiny_model, tiny_shard, tmp_path / "1", *more)
    ring = ("--gpus", 2, "--layout", "ring")
    assert trained(tiny_model, tiny_shard, tmp_path / "2", *more, *ring) == one


def test_two_hosts_of_one_contribution_have_one_hosts_weights(tiny_model, tiny_shard, tmp_path):
    """A total is then the same sum of two contributions. The loss is an fp64 sum of 2 * SEQ tokens,
    which two hosts add in two parts: each of its additions rounds by 2^-53 at most."""
    more = ("--recipe", "fp32", "--tokens-per-step", 2 * SEQ)
    tokens, (losses, norms, digest) = trained(tiny_model, tiny_shard, tmp_path / "1", *more, n=1)
    two = trained(tiny_model, tiny_shard, tmp_path / "2", *more)
    assert (two[0], two[1][1:]) == (tokens, (norms, digest))
    assert np.allclose(two[1][0], losses, rtol=2 * 2 * SEQ * 2.0**-53, atol=0)


def test_three_hosts_without_clipping(tiny_model, tiny_shard, tmp_path):
    """fp32 totals of six contributions are added in another order: 2^-24 for each addition, and an
    update of AdamW moves a weight by the learning rate, whatever the gradient. So the first loss is
    one host's, and the later ones are near."""
    more = ("--recipe", "fp32", "--clip-norm", 0, "--tokens-per-step", 6 * SEQ, "--lr", 1e-5)
    one = trained(tiny_model, tiny_shard, tmp_path / "1", *more, n=1)
    three = trained(tiny_model, tiny_shard, tmp_path / "3", *more, n=3)
    assert three[0] == one[0]
    assert np.allclose(three[1][0][0], one[1][0][0], rtol=1e-12, atol=0)
    assert np.allclose(three[1][0], one[1][0], rtol=1e-5) and np.allclose(
        three[1][1], one[1][1], rtol=1e-3
    )


@pytest.mark.parametrize(
    "launcher, n, more, typed",
    [
        ("torchrun", 4, {}, "torchrun --nproc-per-node 1 --no-python"),
        ("srun", 4, {}, "srun --ntasks-per-node 1 --ntasks 2"),
        ("srun", 4, {"SLURM_STEP_NUM_NODES": "3"}, "srun --ntasks-per-node 1 --ntasks 3"),
        ("mpirun", 4, {}, "mpirun -N 1 -x MASTER_ADDR=HOST0"),
        ("mpirun", 4, {"MASTER_ADDR": "node7"}, "mpirun -N 1 -x MASTER_ADDR=node7"),
        ("mpirun", 2, {}, "mpirun -N 1"),
        ("mpiexec", 4, {}, "mpiexec -ppn 1 -n 2 -genv MASTER_ADDR HOST0"),
        ("mpiexec", 2, {}, "mpiexec -ppn 1 -n 1"),
    ],
)
def test_a_task_a_gpu_is_told_what_to_type(
    launcher, n, more, typed, tiny_model, tiny_shard, tmp_path
):
    """Two tasks on each host. The page types the same words for two hosts, perhaps with others."""
    env = environment(launcher, rank=1, n=n, local=1)
    del env["MASTER_ADDR"]
    done = subprocess.run(
        words(tiny_model, tiny_shard, tmp_path / "run"),
        env=env | more,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert f"{launcher} started 2 tasks on this host" in done.stderr
    assert done.stderr.endswith(f": type {typed} penstock train --gpus 2 ...\n")
    assert done.stderr.count("\n") == 1
    page = (ROOT / "docs/gpus.md").read_text()
    (line,) = re.findall(rf"^{launcher} .*", page, re.M)
    if n == 4 and not more:
        assert set(typed.split()) <= set(line.split())


def test_resumes_with_another_number_of_hosts(tiny_model, tiny_shard, tmp_path):
    codes, said = end(start(tiny_model, tiny_shard, tmp_path, "--checkpoint-every", STEPS))
    assert codes == [0, 0], said
    more = ("--resume", "latest", "--steps", STEPS + 2)
    given = words(tiny_model, tiny_shard, tmp_path, *more)
    given.remove("--quiet")
    one = subprocess.run(given, check=True, capture_output=True, text=True)
    assert "was written with number of hosts 2, and this run has 1: it goes on with" in one.stderr
    codes, said = end(start(tiny_model, tiny_shard, tmp_path, "--resume", "latest", "--steps", 4))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert codes == [0, 0] and len(lines) == STEPS + 1, said


# ---- transports ----------------------------------------------------------------------------------


def test_auto_says_why_it_is_tcp(tiny_model, tiny_shard, tmp_path):
    """Rank 0 says it in a line; and --hosts-transport tcp has the same bits."""
    seen = []
    for name in ("auto", "tcp"):
        folder = tmp_path / name
        more = ("--hosts-transport", name, "--out", folder / "out")
        given = [w for w in words(tiny_model, tiny_shard, folder, *more) if w != "--quiet"]
        codes, said = end(start_each([given, given]))
        assert codes == [0, 0], said
        assert said[0].count("gradients go over TCP") == 1 and "gradients" not in said[1]
        seen.append((said[0], result(folder)))
    assert "as rank 0 cannot use NCCL: it trains on a CPU" in seen[0][0]
    assert "gradients go over TCP, as asked for" in seen[1][0]
    assert seen[0][1] == seen[1][1]


def test_nccl_that_cannot_be_had_is_refused_by_all(tiny_model, tiny_shard, tmp_path):
    folder = tmp_path / "run"
    codes, said = end(start(tiny_model, tiny_shard, folder, "--hosts-transport", "nccl"))
    assert codes == [2, 2] and not folder.exists()
    for text in said:
        assert "--hosts-transport nccl: rank 0 cannot use NCCL: it trains on a CPU" in text
        assert "give --hosts-transport tcp" in text and text.count("\n") == 1


def test_the_transport_is_one_of_three_and_the_same_in_all_tasks(tiny_model, tiny_shard, tmp_path):
    folder = tmp_path / "run"
    each = {1: ("--hosts-transport", "tcp")}
    codes, said = end(start(tiny_model, tiny_shard, folder, each=each))
    assert codes == [2, 2] and 'has --hosts-transport "tcp", and rank 0 has' in said[0], said
    given = words(tiny_model, tiny_shard, folder, "--hosts-transport", "mpi")
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.returncode == 2 and "--hosts-transport" in done.stderr and "nccl" in done.stderr
    assert not folder.exists()


# ---- failures ------------------------------------------------------------------------------------


def await_steps(folder):
    until = time.monotonic() + HANGS_S
    file = folder / "metrics.jsonl"
    while not (file.exists() and file.read_text().count("\n") > 2):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_all(killed, tiny_model, tiny_shard, tmp_path):
    tasks = start(tiny_model, tiny_shard, tmp_path, "--steps", 100000, n=3)
    await_steps(tmp_path)
    since = time.monotonic()
    tasks[killed].kill()
    codes, said = end(tasks, 30)
    assert time.monotonic() - since < 30
    for rank in {0, 1, 2} - {killed}:
        assert codes[rank] == 1 and f"rank {killed} is gone" in said[rank], said[rank]
        assert " of step " in said[rank] and said[rank].count("penstock:") == 1


def test_an_op_that_fails_ends_all_with_its_name(tiny_model, tiny_shard, tmp_path):
    """Rank 1 loses its copy of the data."""
    own = tmp_path / "own.bin"
    own.write_bytes(tiny_shard.read_bytes())
    tasks = start(tiny_model, [tiny_shard, own], tmp_path, "--steps", 100000)
    await_steps(tmp_path)
    os.truncate(own, 1024)
    codes, said = end(tasks, 30)
    assert codes == [1, 1] and said[0].startswith("penstock: rank 1 failed: "), said
    assert "load_batch" in said[0] and "own.bin" in said[0] and "own.bin" in said[1]


def test_a_rank_that_asks_to_stop_stops_all_after_the_same_step(tiny_model, tiny_shard, tmp_path):
    loud, more = {0: ("--quiet=false",)}, ("--steps", 100000, "--out", tmp_path / "out")
    tasks = start(tiny_model, tiny_shard, tmp_path, *more, each=loud, n=3)
    await_steps(tmp_path)
    tasks[2].send_signal(signal.SIGTERM)
    codes, said = end(tasks)
    steps = (tmp_path / "metrics.jsonl").read_text().count("\n")
    assert codes == [130] * 3 and said[1:] == ["", ""], said
    assert f"penstock: rank 2 asked to stop: the last step is {steps}\n" in said[0]
    assert (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("lost", ["metrics", "model"])
def test_what_rank_0_cannot_write_is_an_error_of_all(lost, tiny_model, tiny_shard, tmp_path):
    """Rank 1 writes nothing, and would have ended before rank 0 saves."""
    metrics = lost == "metrics"
    more = (
        ("--steps", 100000, "--no-save")
        if metrics
        else ("--out", tmp_path / "out", "--save-wait", 0)
    )
    limit = 20_000 if metrics else 50_000  # less than the metrics, than the model
    tasks = start(tiny_model, tiny_shard, tmp_path, *more, "--trace-steps", 0, limits={0: limit})
    codes, said = end(tasks)
    why = "metrics.jsonl cannot be written: File too large" if metrics else "File too large"
    assert codes == [1, 1] and why in said[0], said
    assert said[1].startswith("penstock: rank 0 failed: ") and said[1].count("\n") == 1


def test_a_run_of_several_hosts_says_how_many(tiny_model, tiny_shard, tmp_path):
    codes, said = end(start(tiny_model, tiny_shard, tmp_path, each={0: ("--quiet=false",)}))
    assert codes == [0, 0] and re.search(r" 2 hosts x \S+ TFLOP/s", said[0]), said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["hosts"] for line in lines] == [2] * STEPS


def test_hosts_that_cannot_share_a_checkpoints_steps(given):
    """Its steps have 6 sequences: two hosts train all, four would leave out two."""
    model, shard, folder = given
    more = ("--tokens-per-step", 6 * SEQ, "--checkpoint-every", STEPS, "--steps", STEPS)
    codes, said = end(start(model, shard, folder, *more))
    assert codes == [0, 0], said
    more = (*more[:-1], STEPS + 1, "--resume", "latest")
    codes, said = end(start(model, shard, folder, *more, n=4))
    assert (
        codes == [2] * 4 and "was written with 6 sequences a step, which 4 hosts cannot" in said[0]
    )
    codes, said = end(start(model, shard, folder, *more, n=3))
    assert codes == [0] * 3, said


def test_tasks_that_disagree_write_nothing(tiny_model, tiny_shard, tmp_path):
    other = write_shard(tmp_path / "other.bin", np.arange(20000) % 190)
    folder = tmp_path / "run"
    given = {
        "--lr 0.001, and rank 0 has --lr": (tiny_shard, {1: ("--lr", 1e-3)}),
        "rank 1 has data = ": ([tiny_shard, other], None),
    }
    for text, (shard, each) in given.items():
        codes, said = end(start(tiny_model, shard, folder, each=each))
        assert codes == [2, 2] and not folder.exists()
        for words_said in said:
            assert "the tasks disagree: rank 1 has" in words_said and text in words_said
            assert words_said.count("\n") == 1


@pytest.fixture
def given(tiny_model, tiny_shard, tmp_path):
    return tiny_model, tiny_shard, tmp_path


def one_token(shard, folder):
    """Another token in the middle."""
    data, other = np.fromfile(shard, "<u2"), folder / "b.bin"
    data[512 + 650] ^= 1
    data.tofile(other)
    return [shard, other]


def one_mask(shard, folder):
    """Another target in the middle."""
    copies = [shutil.copy(shard, folder / name) for name in ("a.bin", "b.bin")]
    for i, path in enumerate(copies):
        flags = np.full(20000, IS_TARGET)
        flags[650] *= i
        write_mask(path, flags)
    return copies


def other_weights(shard, folder):
    return [f"{shard}:{weight},{shard}:0.5" for weight in (0.5, 0.6)]


def last_token_of_5_gb(shard, folder):
    """Files of which samples are read; most of them is no block of the disk."""
    header = struct.pack("<6I", 20261121, 1, 2, 0, 2500000000, 0).ljust(1024, b"\0")
    copies = [folder / "a.bin", folder / "b.bin"]
    for i, path in enumerate(copies):
        path.write_bytes(header)
        with path.open("r+b") as f:
            f.truncate(1024 + 2 * 2500000000)
            f.seek(-2, os.SEEK_END)
            f.write(bytes([i, 0]))
    return copies


# Each task hashes 4 GiB of the largest.
@pytest.mark.parametrize(
    "other",
    [one_token, one_mask, other_weights, pytest.param(last_token_of_5_gb, marks=pytest.mark.long)],
)
def test_other_data_is_noticed(other, given):
    model, shard, folder = given
    codes, said = end(start(model, other(shard, folder), folder / "run"))
    assert codes == [2, 2] and not (folder / "run").exists()
    size = r"data = \d+ bytes with hash \w{16}"
    assert re.fullmatch(
        f"penstock: the tasks disagree: rank 1 has {size}, and rank 0 has {size}\n", said[0]
    )
    assert said[1] == said[0]


def test_copies_may_have_other_names(given):
    model, shard, folder = given
    copies = [folder / "here", folder / "there"]
    for copy, name in zip(copies, ("{}.bin", "copy-{}.bin"), strict=True):
        copy.mkdir()
        for i in (1, 2):
            shutil.copy(shard, copy / name.format(i))
    codes, said = end(start(model, copies, folder / "run"))
    assert codes == [0, 0], said


def start_as(given, run, *more, rank=1, n=2, port, binary=BINARY, **env):
    """A task by itself, of another program even. It has a secret. @env: None for what is unset."""
    model, shard, folder = given
    env = environment(rank=rank, n=n, port=port, PENSTOCK_HOSTS_SECRET=SECRET) | env
    return subprocess.Popen(
        [str(binary), *words(model, shard, folder / run, *more)[1:]],
        env={name: value for name, value in env.items() if value is not None},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_soon(tasks, seconds=300):
    """They end long before --hosts-wait, which is 900 s. A loaded machine starts them slowly."""
    since = time.monotonic()
    codes, said = end(tasks)
    assert time.monotonic() - since < seconds, said
    return codes, said


def test_other_numbers_of_tasks(given):
    """Both say why: the task that differs is told."""
    port = free_port()
    codes, said = end_soon([start_as(given, "run", rank=r, n=2 + r, port=port) for r in (0, 1)])
    assert codes == [2, 2] and not (given[2] / "run").exists()
    why = "rank 1 was told of 3 tasks, and rank 0 of 2: start all by one launcher"
    assert said == [f"penstock: {why}\n"] * 2


@pytest.mark.parametrize("newer", [0, 1])
def test_tasks_of_two_versions(newer, given):
    """Both say it at once. The other version is this one under another name."""
    other = given[2] / "other"
    shutil.copytree(BINARY.parent, other / "bin")
    shutil.copytree(BINARY.parent.parent / "lib", other / "lib")
    library = other / "lib/libpenstock.so"
    library.write_bytes(library.read_bytes().replace(b"\0000.1.0\0", b"\0000.9.9\0"))
    port, program = free_port(), {newer: other / "bin/penstock", 1 - newer: BINARY}
    tasks = [start_as(given, "run", rank=r, port=port, binary=program[r]) for r in (0, 1)]
    codes, said = end_soon(tasks)
    version = {newer: "0.9.9", 1 - newer: "0.1.0"}
    why = (
        f"rank 1 is penstock {version[1]}, and rank 0 is {version[0]}: start the same on all hosts"
    )
    assert codes == [2, 2] and said == [f"penstock: {why}\n"] * 2


def left_out(said):
    return [line for line in said.splitlines() if "a step trains" in line]


@pytest.mark.parametrize(
    "n, hosts, trained", [pytest.param(8, 2, None, marks=pytest.mark.long), (8, 3, 6)]
)
def test_sequences_that_are_left_out_are_said(n, hosts, trained, given):
    """Rank 0 says it in a line, which --quiet leaves out."""
    model, shard, folder = given
    loud = {rank: ("--quiet=false",) for rank in range(hosts)}
    tokens = ("--tokens-per-step", n * SEQ)
    for each in (loud, None):
        codes, said = end(start(model, shard, folder, *tokens, n=hosts, each=each))
        assert codes == [0] * hosts and not any(said[1:]), said
        line = (
            f"penstock: --tokens-per-step {n * SEQ}: a step trains {trained} of its {n} sequences, "
            f"as each of {hosts} hosts has equally many: give a multiple of {hosts * SEQ} tokens"
        )
        assert left_out(said[0]) == ([line] if each and trained else [])
    (tokens,) = {m["tokens"] for m in map(json.loads, open(folder / "metrics.jsonl"))}
    assert tokens == (trained or n) * SEQ


def test_sequences_that_a_ramp_leaves_out_are_said(given):
    model, shard, folder = given
    ramp, loud = ("--batch-ramp", f"{3 * SEQ}:1", f"{2 * SEQ}:1"), {0: ("--quiet=false",)}
    codes, said = end(start(model, shard, folder, *ramp, each=loud))
    assert codes == [0, 0], said
    (line,) = left_out(said[0])
    assert line.startswith(
        f"penstock: --batch-ramp {3 * SEQ}: a step trains 2 of its 3 sequences, as"
    )
    stages = f'batch-ramp = ["{2 * SEQ}:1", "{2 * SEQ}:1"]\n'
    assert stages in (folder / "run.toml").read_text()
    assert said[0].count(f"\nbatch ramp       1 steps of {2 * SEQ} tokens: 1 round;") == 2
    plan = json.loads((folder / "plan.json").read_text())
    assert [stage["tokens_per_step"] for stage in plan["batch_ramp"]] == [2 * SEQ] * 2


def test_a_stage_of_a_ramp_may_be_as_large_as_a_step(given):
    """Both leave out the third sequence. A stage that trains more than a step is refused."""
    model, shard, folder = given
    ramp = ("--batch-ramp", f"{2 * SEQ}:1", f"{3 * SEQ}:1", "--tokens-per-step", 3 * SEQ)
    codes, said = end(start(model, shard, folder, *ramp))
    assert codes == [0, 0], said
    assert {m["tokens"] for m in map(json.loads, open(folder / "metrics.jsonl"))} == {2 * SEQ}
    large = ("--batch-ramp", f"{4 * SEQ}:1", "--tokens-per-step", 3 * SEQ)
    codes, said = end(start(model, shard, folder / "large", *large))
    assert codes == [2, 2] and f"to {2 * SEQ}, the tokens per step" in said[0], said


def test_a_cap_that_rank_0s_cut_exceeds(given):
    """Rank 1's user has given none of the options that are to be lowered."""
    model, shard, folder = given
    uncut = words(model, shard, folder / "run")
    for option in ("--chunk-tokens", "--chunks-per-round"):
        del uncut[(at := uncut.index(option)) : at + 2]
    codes, said = end(start_each([uncut, [*uncut, "--device-mem", "1MiB"]]))
    assert codes == [2, 2] and not (folder / "run").exists(), said
    cut = "-tokens N, --chunks-per-round N, --first-round-chunks N, --head-slice-tokens N"
    why = f"the cut of a step is that of rank 0's plan (--chunk{cut}): give all tasks a smaller one"
    words_said = re.sub(r"(-\w+) \d+", r"\1 N", said[1])
    assert words_said.startswith(
        "penstock: needs 2.0 MiB of device memory, 1.0 MiB given: raise --"
    )
    assert words_said.endswith(f"; {why}\n") and said[1].count("\n") == 1
    assert said[0] == said[1].replace("penstock: ", "penstock: rank 1 failed: ", 1)
