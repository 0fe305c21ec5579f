"""Saving: whatever ends a save, the directory holds the whole old model or the whole new one, and
what else was in it."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import io_native as ps
import penstock
import pytest
from conftest import BUILD, HANGS_S, ROOT, preload
from penstock import export

SHIM = BUILD / "tests/libdisk_shim.so"
X, Y = ("x", ps.F32, (4,), b"\0" * 16), ("y", ps.F32, (4,), b"\1" * 16)


@pytest.fixture
def quick():
    """A folder in memory where there is one: what is tested is the order of calls, and a sweep
    makes thousands."""
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as folder:
        yield pathlib.Path(folder)


def preloaded(**more):
    return {**os.environ, "LD_PRELOAD": preload(SHIM), "PYTHONPATH": str(ROOT / "python"), **more}


# ---- every disk call -----------------------------------------------------------------------------


def sweep(folder, scenario, stride):
    done = subprocess.run(
        [sys.executable, ROOT / "tests/save_sweep.py", folder, scenario, str(stride)],
        env=preloaded(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    calls = eval(done.stdout.splitlines()[-1])
    assert calls["killed"] > 20 and calls["failed"] * stride > 50 and calls["short"], calls


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param("trainer-fresh-single-beside", marks=pytest.mark.long),
        "trainer-single-sharded-beside",
        pytest.param("trainer-sharded-single-refused", marks=pytest.mark.long),
        "init-sharded-single-beside",
    ],
)
def test_a_save_that_is_killed_or_fails_leaves_the_old_model_or_the_new(quick, scenario):
    sweep(quick, scenario, 9)


@pytest.mark.long
@pytest.mark.parametrize(
    "scenario",
    [
        f"{who}-{before}-{after}-{how}"
        for who, before, after, how in itertools.product(
            ("trainer", "init"),
            ("fresh", "single", "sharded"),
            ("single", "sharded"),
            ("beside", "refused", "inside"),
        )
        if before != "fresh" or how == "beside"
    ],
)
def test_at_each_call_a_save_that_is_killed_or_fails_leaves_the_old_model_or_the_new(
    quick, scenario
):
    sweep(quick, scenario, 1)


# ---- several saves -------------------------------------------------------------------------------


def tensors(folder):
    with ps.Tensors(folder) as f:
        return {n: f.read(n).tobytes() for n, *_ in f.infos()}


def clean(folder):
    return not [p for p in [*folder.parent.iterdir(), *folder.iterdir()] if ".penstock-" in p.name]


def test_a_save_that_goes_on_is_no_leftover_and_the_last_to_end_counts(tmp_path):
    folder = tmp_path / "m"
    ps.write(folder, [X], 0)
    w = ps.create(folder, [Y[:3]])
    ps.check(ps.lib.ps_tensors_append(w, Y[3], 8))
    ps.write(folder, [X, ("z", *X[1:])], 16)
    assert set(tensors(folder)) == {"x", "z"} and not clean(folder)
    ps.check(ps.lib.ps_tensors_append(w, Y[3][8:], 8))
    ps.check(ps.lib.ps_tensors_finish(w))
    assert tensors(folder) == {"y": Y[3]} and clean(folder)


def test_processes_that_save_into_one_directory_leave_the_model_of_one(quick):
    folder = quick / "m"
    code = """
import os, sys
sys.path.insert(0, sys.argv[1])
import io_native as ps
me = int(sys.argv[3])
if me == 2: os.chdir(sys.argv[2])  # this one cannot change places
for i in range(30):
    ps.write(sys.argv[2], [(f"{me}-{k}", ps.F32, (4,), bytes([me]) * 16) for k in range(1 + i % 3)], 16 * (i % 2))
"""
    ps.write(folder, [X], 0)
    (folder / "README.md").write_text("mine")
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, ROOT / "tests", folder, str(me)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in (1, 3)
    ]
    for run in runs:
        _, err = run.communicate(timeout=HANGS_S)
        assert run.returncode == 0, err
    found = tensors(folder)
    me = {name[0] for name in found}
    assert len(me) == 1 and len(found) == 3 and set(found.values()) == {bytes([int(*me)]) * 16}
    ps.write(folder, [X], 0)
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "model.safetensors"] and clean(
        folder
    )


def killed_before_the_exchange(folder):
    """What a save with a tokenizer leaves that is killed just before its directory changes places
    with @folder."""
    left = folder.parent / f".{folder.name}.penstock-old-0123456789abcdef"
    left.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (left / name).write_text("{}")
    for mine in folder.iterdir():
        os.link(mine, left / mine.name)


def test_the_model_of_a_save_that_never_took_its_place_is_nobodys(tmp_path):
    """Neither in a directory without a model, where nothing replaces its files."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    killed_before_the_exchange(folder)
    ps.write(folder, [X], 0)
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "model.safetensors"] and clean(
        folder
    )
    assert tensors(folder) == {"x": X[3]}


def test_the_model_of_an_initialisation_that_never_took_its_place_is_nobodys(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    killed_before_the_exchange(folder)
    subprocess.run(
        [sys.executable, ROOT / "models/init_model.py", ROOT / "models/tiny-llama.json", folder],
        check=True,
        capture_output=True,
    )
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
    ] and clean(folder)


# ---- directories of all kinds --------------------------------------------------------------------


@pytest.fixture
def trainer(tiny_model):
    """Makes trainers of a directory with tiny_model's configuration."""
    config = penstock.ModelConfig.read(tiny_model)
    plan = penstock.Plan(
        config, seq_len=16, recipe="fp32", threads=1, chunk_tokens=16, chunks_per_round=1
    )
    return lambda model: penstock.Trainer(model, plan, lambda step: ([0] * 16, [0] * 16))


def test_a_save_over_its_own_model_directory_keeps_what_is_no_model(trainer, tiny_model, tmp_path):
    model = tmp_path / "m"
    shutil.copytree(tiny_model, model)
    before = tensors(model)
    for name in ("tokenizer.json", "merges.txt", "README.md"):
        (model / name).write_text(name)
    os.chmod(model, 0o2751)
    xattr = True
    try:
        os.setxattr(model, "user.mine", b"1")
    except OSError:
        xattr = False
    with trainer(model) as t:
        t.save(model, "fp32")
        t.save(model, "fp32")
    assert tensors(model) == before and clean(model)
    assert all(
        (model / name).read_text() == name for name in ("tokenizer.json", "merges.txt", "README.md")
    )
    assert model.stat().st_mode & 0o7777 == 0o2751 and (
        not xattr or os.getxattr(model, "user.mine") == b"1"
    )


def test_a_tokenizer_that_the_new_model_does_not_bring_stays(trainer, tiny_model, tmp_path):
    out = tmp_path / "m"
    out.mkdir()
    (out / "tokenizer.json").write_text("mine")
    with trainer(tiny_model) as t:
        t.save(out)
    assert (out / "tokenizer.json").read_text() == "mine" and (out / "config.json").exists()


TEMPLATES = "additional_chat_templates"


def write_texts(folder, text, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def texts(folder):
    found = {str(p.relative_to(folder)): p for p in folder.rglob("*.j*") if p.is_file()}
    return {n: p.read_text() for n, p in found.items() if n not in ("config.json", "penstock.json")}


def test_a_save_leaves_what_it_did_not_write(trainer, tiny_model, tmp_path):
    mine = ("chat_template.jinja", "added_tokens.json", f"{TEMPLATES}/mine.jinja")
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model, model)
    its = ("tokenizer.json", "vocab.json", f"{TEMPLATES}/rag.jinja", f"{TEMPLATES}/tool_use.jinja")
    write_texts(model, "model", *its)
    write_texts(out, "mine", *mine)
    with trainer(model) as t:
        t.save(out)
        assert texts(out) == dict.fromkeys(mine, "mine") | dict.fromkeys(its, "model")
        (out / its[-1]).write_text("changed by hand")
        for name in its[1:]:  # of the next model, which has a tokenizer of other files
            (model / name).unlink()
        t.save(out)
    kept = dict.fromkeys(mine, "mine") | {its[-1]: "changed by hand"}
    assert texts(out) == kept | {its[0]: "model"} and clean(out)


@pytest.mark.parametrize("how", ["save", "export", "export of a checkpoint"])
def test_a_save_carries_the_files_of_the_model(trainer, tiny_model, tmp_path, how):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model, model)
    jinja, json_files = ("chat_template", f"{TEMPLATES}/tool_use"), ("tokenizer", "added_tokens")
    its = [f"{n}.jinja" for n in jinja] + [f"{n}.json" for n in (*json_files, "generation_config")]
    write_texts(model, "{}", *its)
    with trainer(model) as t:
        if how == "save":
            t.save(out)
        elif how == "export of a checkpoint":
            model = t.checkpoint(tmp_path / "checkpoints")
    if how != "save":
        words = ["--model", model, "--to", "hf", "--out", out, "--quiet"]
        assert export.main([str(w) for w in words]) == 0
    assert texts(out) == dict.fromkeys(its, "{}") | {
        n: t for n, t in texts(out).items() if n.endswith(".index.json")
    }


def test_a_link_to_the_directory_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "m").mkdir()
    os.symlink("disk/m", tmp_path / "link")
    ps.write(tmp_path / "link", [X], 0)
    ps.write(f"{tmp_path}/link//", [Y], 0)
    assert (
        os.readlink(tmp_path / "link") == "disk/m"
        and tensors(tmp_path / "disk" / "m") == {"y": Y[3]}
        and clean(tmp_path / "disk" / "m")
    )
    os.symlink("nowhere", tmp_path / "bad")
    with pytest.raises(ps.Failed) as e:
        ps.write(tmp_path / "bad", [X], 0)
    ps.one_sentence(e.value.message, tmp_path / "bad", "link")


def test_the_working_directory_stays_the_same_directory(tmp_path, monkeypatch):
    folder = tmp_path / "m"
    ps.write(folder, [X], 0)
    (folder / "sub").mkdir()
    before = folder.stat().st_ino
    monkeypatch.chdir(folder / "sub")
    ps.write("..", [Y], 0)
    assert (
        folder.stat().st_ino == before
        and tensors(folder) == {"y": Y[3]}
        and os.getcwd() == str(folder / "sub")
        and clean(folder)
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_a_directory_whose_parent_or_files_belong_to_others_is_saved_into():
    with tempfile.TemporaryDirectory() as work:
        os.chmod(work, 0o755)
        folder = pathlib.Path(work) / "m"
        folder.mkdir()
        (folder / "README.md").write_text("of root")
        os.chown(folder, 65534, 65534)
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                os.setegid(65534), os.seteuid(65534)
                ps.write(folder, [X], 0)
                ps.write(folder, [Y], 0)
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (
            tensors(folder) == {"y": Y[3]}
            and clean(folder)
            and (folder / "README.md").read_text() == "of root"
        )
        assert folder.stat().st_uid == 65534
        ps.write(folder, [X], 0)  # and root, whose directory it does not become
        assert tensors(folder) == {"x": X[3]} and folder.stat().st_uid == 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_a_mount_point_is_saved_into(tmp_path):
    folder = tmp_path / "m"
    (folder / "data").mkdir(parents=True)
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be had here")
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import test_save as t; t.save_on_mounts({str(folder)!r})"
    mount = f'mount --bind "{folder}" "{folder}" && mount -t tmpfs none "{folder}/data" && touch "{folder}/data/x" && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, sys.executable, code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def save_on_mounts(folder):
    folder = pathlib.Path(folder)
    for t in (X, Y):
        ps.write(folder, [t], 0)
        assert (
            tensors(folder) == {t[0]: t[3]} and (folder / "data" / "x").exists() and clean(folder)
        )
    beside = folder.parent / "n"
    beside.mkdir()
    (beside / "data").mkdir()
    subprocess.run(["mount", "--bind", folder / "data", beside / "data"], check=True)
    ps.write(beside, [X], 0)  # the directory could change places, the mount in it cannot
    assert os.path.ismount(beside / "data") or (beside / "data" / "x").exists()
    assert tensors(beside) == {"x": X[3]} and clean(beside)


# ---- names that somebody else put there ----------------------------------------------------------


def test_links_in_the_way_are_not_followed(tiny_model, tiny_shard, tmp_path):
    out, victim, cache = tmp_path / "out", tmp_path / "victim", tmp_path / "cache"
    out.mkdir()
    victim.write_text("precious")
    train = [
        BUILD / "bin/penstock",
        *f"train --model {tiny_model} --data {tiny_shard} --seq-len 64 --steps 2".split(),
        *"--trace-steps 1".split(),
    ]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    shutil.copytree(os.environ["XDG_CACHE_HOME"], cache, dirs_exist_ok=True)
    rates = list(cache.glob("penstock/hardware-*.json"))
    for path in [
        out / n
        for n in (
            ".model.safetensors.partial",
            ".config.json.part",
            ".tokenizer.json.part",
            "metrics.jsonl",
            "plan.json",
            "plan.json.part",
            "timeline.json.tmp",
            "model.safetensors",
            "config.json",
        )
    ] + rates:
        path.unlink(missing_ok=True)
        path.symlink_to(victim)
    done = subprocess.run(
        [*train, "--out", out, *(["--force"] if "--force" in helped() else [])],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert victim.read_text() == "precious"
    assert (
        json.loads((out / "plan.json").read_text())
        and len((out / "metrics.jsonl").read_text().splitlines()) == 2
    )
    assert not any(
        (out / n).is_symlink()
        for n in ("metrics.jsonl", "plan.json", "model.safetensors", "config.json")
    )
    hardware = penstock.Hardware.estimate(threads=1)
    with pytest.raises(penstock.InputOutputError, match="no regular file"):
        (tmp_path / "rates.json").symlink_to(victim)
        hardware.write(tmp_path / "rates.json")
    assert victim.read_text() == "precious"


def helped():
    return subprocess.run(
        [BUILD / "bin/penstock", "train", "--help"], capture_output=True, text=True
    ).stdout


# ---- Ctrl-C while saving -------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_saving_is_heard_and_saves_all_or_nothing(
    trainer, tiny_model, tiny_shard, tmp_path, times
):
    out = tmp_path / "out"
    env = {**os.environ, "LD_PRELOAD": preload(SHIM), "DISK_SHIM_FSYNC_MS": "700"}
    run = subprocess.Popen(
        [
            BUILD / "bin/penstock",
            *f"train --model {tiny_model} --data {tiny_shard} --seq-len 64 --steps 1".split(),
            *("--out", out),
        ],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + HANGS_S
    saves = lambda: list(tmp_path.glob(".out.penstock-save-*/*"))
    while run.poll() is None and time.monotonic() < end and not saves():
        time.sleep(0.01)
    for _ in range(times):
        run.send_signal(signal.SIGINT)
        time.sleep(0.2)
    _, err = run.communicate(timeout=HANGS_S)
    assert run.returncode == 130 and "the model is being saved" in err, err
    assert ("stopped at once" in err) == (times == 2)
    assert (out / "config.json").exists() == (out / "model.safetensors").exists() == (times == 1)
    if times == 1:
        assert set(tensors(out)) == set(tensors(tiny_model)) and clean(out)
    else:
        with trainer(tiny_model) as t:
            t.save(out)
        assert set(tensors(out)) == set(tensors(tiny_model)) and clean(out)
