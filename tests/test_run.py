"""What must not cost anybody a trained model: a second run in the same place, a full disk, output
that nobody reads, a closed terminal."""

import ctypes
import fcntl
import json
import os
import pty
import re
import resource
import select
import shutil
import signal
import subprocess
import time

import pytest
from conftest import BUILD, HANGS_S, preload, words_of_training
from penstock import ModelConfig

BINARY = BUILD / "bin/penstock"
ENDLESS = 10**6


@pytest.fixture(scope="module", autouse=True)
def profiled(cache_of_this_run):
    subprocess.run(
        [BINARY, "profile", "--backend", "cpu", "--quick"], check=True, capture_output=True
    )


@pytest.fixture
def words(tiny_model, tiny_shard):
    return lambda *more: [
        str(BINARY),
        *words_of_training(tiny_model, tiny_shard, "--run-dir", "run", *more),
    ]


def loud(command):
    return [w for w in command if w != "--quiet"]


def call(command, cwd, **more):
    return subprocess.run(
        command, **{"capture_output": True, "text": True, "cwd": cwd, "timeout": HANGS_S, **more}
    )


def wait_for(happened, process=None):
    deadline = time.monotonic() + HANGS_S
    while not happened():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.01)


def started(command, cwd, **more):
    """The run behind @command, once it has made steps."""
    metrics = cwd / "run/metrics.jsonl"
    process = subprocess.Popen(
        command, cwd=cwd, **{"stderr": subprocess.PIPE, "text": True, **more}
    )
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 1000, process)
    return process


def ended(process, code):
    _, stderr = process.communicate(timeout=HANGS_S)
    assert process.returncode == code, (process.returncode, stderr)
    return stderr


def limit_files(n_bytes):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))


def unlimited(process):
    resource.prlimit(
        process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )


def saved(folder):
    return (folder / "config.json").exists() and (
        folder / "model.safetensors"
    ).stat().st_size > 1_600_000


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def one_sentence(done, code, pattern):
    assert done.returncode == code and re.fullmatch(rf"penstock: .*{pattern}.*\n", done.stderr), (
        done.returncode,
        done.stderr,
    )


# ---- one run in a directory ----------------------------------------------------------------------


def test_a_second_run_in_the_same_directory_is_refused_with_the_firsts_process_id(words, tmp_path):
    first = started(words("--steps", ENDLESS), tmp_path)
    one_sentence(
        call(words("--steps", 2), tmp_path),
        2,
        f"--run-dir run is in use by the run with process id {first.pid}: ",
    )
    first.send_signal(signal.SIGINT)
    ended(first, 130)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "checkpoints",
        "metrics.jsonl",
        "model",
        "plan.json",
        "run.toml",
        "saved-model.txt",
        "summary.json",
        "timeline.json",
    }


def test_the_lock_of_a_run_that_was_killed_holds_nobody_up(words, tmp_path):
    first = started(words("--steps", ENDLESS), tmp_path)
    first.kill()
    ended(first, -signal.SIGKILL)
    assert (tmp_path / "run/.penstock.lock").read_text() == f"{first.pid}\n"
    assert call(words("--steps", 2, "--force"), tmp_path).returncode == 0
    assert not (tmp_path / "run/.penstock.lock").exists()


# ---- another run in the directory ----------------------------------------------------------------


def tree(folder):
    """Each file's bytes and time."""
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file()
    }


def test_another_runs_checkpoints_and_metrics_are_refused_and_with_force_kept(words, tmp_path):
    run, every = tmp_path / "run", ("--checkpoint-every", 1, "--keep", 1)
    here = [w for w in words("--steps", 1) if w not in ("--run-dir", "run")]
    refused = r"another run.*--resume auto.*--force"
    # a run that was stopped before its first step has left nothing
    run.mkdir()
    (run / "metrics.jsonl").touch()
    assert call(words("--steps", 2, *every), tmp_path).returncode == 0
    before = tree(run)
    elsewhere = shutil.copytree(run, tmp_path / "elsewhere") / "checkpoints/step-00000002"
    for command, cwd in (
        (words("--steps", 3, *every), tmp_path),
        (words("--steps", 3, *every, "--resume", elsewhere), tmp_path),
        (here, run),
    ):
        one_sentence(call(command, cwd), 2, refused)
        assert tree(run) == before
    # what would be moved away under the training, or would not be moved
    base = run / "checkpoints/step-00000002"
    command = words("--steps", 3, *every, "--force", "--model", base)
    one_sentence(call(command, tmp_path), 2, "is among the checkpoints that --force moves aside")
    shutil.move(run / "checkpoints", tmp_path / "disk")
    (run / "checkpoints").symlink_to("../disk")
    one_sentence(call(words("--steps", 3, *every, "--force"), tmp_path), 2, "is a link, which --fo")
    (run / "checkpoints").unlink()
    (run / "checkpoints").symlink_to("../not-mounted")
    resume = words("--steps", 3, *every, "--resume", "auto")
    one_sentence(call(resume, tmp_path), 2, "is a link to what is not there: mount its disk")
    (run / "checkpoints").unlink()
    shutil.move(tmp_path / "disk", run / "checkpoints")
    assert tree(run) == before
    done = call(loud(words("--steps", 3, *every, "--force")), tmp_path)
    assert done.returncode == 0 and "earlier run's files in run are now in run/earlier-1" in (
        done.stderr
    )
    assert tree(run / "earlier-1") == before
    assert os.listdir(run / "checkpoints") == ["step-00000003"]
    assert "force = true" not in (run / "run.toml").read_text()  # consent is of one command
    # metrics alone are another run's too
    shutil.rmtree(run / "checkpoints")
    one_sentence(call(words("--steps", 1), tmp_path), 2, "metrics of another run.*with --force")
    assert call(words("--steps", 1, "--force"), tmp_path).returncode == 0
    assert len((run / "earlier-2/metrics.jsonl").read_text().splitlines()) == 3
    # what was moved aside is a run directory
    resume = words("--steps", 4, *every, "--resume", "auto", "--run-dir", "run/earlier-1")
    assert call(resume, tmp_path).returncode == 0
    assert os.listdir(run / "earlier-1/checkpoints") == ["step-00000004"]


def test_what_kills_have_left_is_removed_by_the_next_run(words, tmp_path):
    given = ("--checkpoint-every", 1, "--resume", "auto", "--out", "out")
    assert call(words("--steps", 1, *given), tmp_path).returncode == 0
    x = "0123456789abcdef"
    left = [
        tmp_path / f"run/checkpoints/.step-00000009.penstock-save-{x}",
        tmp_path / f".out.penstock-save-{x}",
        tmp_path / f"out/.penstock-save-{x}",
    ]
    busy = tmp_path / f".out.penstock-save-f{x[1:]}"
    other = tmp_path / f".mine.penstock-save-{x}"
    for folder in (*left, busy, other):
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
    part = tmp_path / f"run/plan.json.{x}.part"
    part.touch()
    held = os.open(busy, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    for steps in (1, 2):  # also where nothing is left to train
        assert call(words("--steps", steps, *given), tmp_path).returncode == 0
        assert not [p for p in left if p.exists()] and busy.exists() and other.exists()
    assert not part.exists()
    os.close(held)


def test_a_training_that_is_done_changes_nothing(words, tmp_path):
    given = ("--steps", 2, "--checkpoint-every", 1, "--resume", "auto", "--out", "out")
    assert call(words(*given), tmp_path).returncode == 0
    before = tree(tmp_path)
    for again in (words(*given), [str(BINARY), "train", "--config", "run/run.toml", "--quiet"]):
        done = call([*again, "--json"], tmp_path)
        assert (done.returncode, done.stderr) == (0, "") and tree(tmp_path) == before
        assert json.loads(done.stdout)["steps"] == 2
    assert "all 2 steps are done" in call(loud(words(*given)), tmp_path).stderr
    # killed between its last checkpoint and the save: the model alone is written
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "run/summary.json").unlink()
    assert call(words(*given), tmp_path).returncode == 0
    saved, kept = tree(tmp_path), before.keys() - {"run/summary.json"}
    assert saved.keys() == kept
    assert {n: saved[n][0] for n in kept if "saved-model" not in n} == {
        n: before[n][0] for n in kept if "saved-model" not in n
    }
    # another dtype is another model
    assert call(words(*given, "--save-dtype", "fp32"), tmp_path).returncode == 0
    assert len((tmp_path / "out/model.safetensors").read_bytes()) > 1.9 * len(
        before["out/model.safetensors"][0]
    )


def test_a_model_is_the_runs_own_where_the_run_directory_cannot_note_it(words, tmp_path):
    """The model then has the note in itself, until the run directory can have it again."""
    in_the_way, inside = tmp_path / "run/saved-model.txt", tmp_path / "out/.penstock-note"
    (in_the_way / "x").mkdir(parents=True)
    for steps in (1, 2):
        given = ("--steps", steps, "--checkpoint-every", 1, "--resume", "auto", "--out", "out")
        done = call(words(*given), tmp_path)
        one_sentence(done, 0, "run/saved-model.txt cannot be written")
        assert f"step {steps}," in inside.read_text()
        assert call(words(*given), tmp_path).stderr == ""  # all is done
    shutil.rmtree(in_the_way)
    given = ("--steps", 3, "--checkpoint-every", 1, "--resume", "auto", "--out", "out")
    assert call(words(*given), tmp_path).returncode == 0
    assert in_the_way.exists() and not inside.exists()


def test_a_damaged_checkpoint_is_named_quietly_too(words, tmp_path):
    given = ("--checkpoint-every", 1, "--resume", "auto")
    assert call(words("--steps", 2, *given), tmp_path).returncode == 0
    weights = tmp_path / "run/checkpoints/step-00000002/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    one_sentence(call(words("--steps", 2, *given), tmp_path), 0, "step-00000002.* is passed over")


# ---- --out before the run ------------------------------------------------------------------------


def test_a_model_that_is_there_is_replaced_with_force_only(words, tmp_path):
    assert call(words("--steps", 1, "--out", "out"), tmp_path).returncode == 0
    before = (tmp_path / "out/model.safetensors").read_bytes()
    one_sentence(
        call(words("--steps", 2, "--out", "out"), tmp_path),
        2,
        r"--out out already has a model \(.*\): .* replace it with --force",
    )
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
    assert call(words("--steps", 2, "--out", "out", "--force"), tmp_path).returncode == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() != before


@pytest.mark.parametrize("name", ["dataset.json", "tokenizer.json"])
def test_a_folder_with_a_data_set_or_a_tokenizer_gets_no_model(words, tiny_model, tmp_path, name):
    model, out = shutil.copytree(tiny_model, tmp_path / "model"), tmp_path / "out"
    (model / "tokenizer.json").write_text("{}")
    out.mkdir()
    (out / name).write_text("mine")
    command = words("--steps", 1, "--out", "out")
    command[command.index(str(tiny_model))] = model
    one_sentence(call(command, tmp_path), 2, f"--out out has a .*{name}.*: give another directory")
    assert [p.read_text() for p in out.iterdir()] == ["mine"]


def test_the_command_that_resumes_replaces_the_runs_own_model(words, tmp_path):
    """The same command goes on after a stop at which the run saved its model. Another run, and a
    model that another run has saved there, are refused."""
    saved, first = tmp_path / "out/model.safetensors", "run/checkpoints/step-00000002"
    there = r"--out out already has a model \(.*\): .* replace it with --force"

    def resume(source, steps, out="out"):
        given = ("--checkpoint-every", 2, "--out", out, "--resume", source, "--steps", steps)
        return call(loud(words(*given)), tmp_path)

    def refused(done):
        assert done.returncode == 2 and re.search(there, done.stderr), done.stderr

    assert resume("auto", 2).returncode == 0
    before = saved.read_bytes()
    one_sentence(call(words("--steps", 4, "--out", "out"), tmp_path), 2, there)
    refused(resume(first, 4))
    assert saved.read_bytes() == before
    done = resume("auto", 4, "./out/")
    assert done.returncode == 0 and saved.read_bytes() != before
    assert f"penstock: goes on from {first}, after step 2\n" in done.stderr
    other = words("--steps", 1, "--out", "out", "--force")
    other[other.index("run")] = "other"
    assert call(other, tmp_path).returncode == 0
    before = saved.read_bytes()
    refused(resume("auto", 6))
    assert saved.read_bytes() == before
    shutil.rmtree(tmp_path / "out")
    assert resume("auto", 6).returncode == 0
    shutil.rmtree(tmp_path / "run/checkpoints")
    refused(resume("auto", 8))


@pytest.mark.parametrize("when", ["before the save", "while it is written"])
def test_a_model_that_another_run_saves_meanwhile_stays(words, tmp_path, when):
    """The second model is saved beside the first, and the exit code says that --out has another."""
    given = ("--tokens-per-step", 256, "--out", "out")
    other = words("--steps", 1, "--out", "other")
    other[other.index("run")] = "other-run"
    assert call(other, tmp_path).returncode == 0
    slow = {"LD_PRELOAD": preload(BUILD / "tests/libdisk_shim.so"), "DISK_SHIM_FSYNC_MS": "300"}
    first = subprocess.Popen(
        words("--steps", 60, *given),
        cwd=tmp_path,
        env=os.environ | slow,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run/metrics.jsonl"
    while_written = when != "before the save"
    wait_for(
        lambda: (
            list(tmp_path.glob(".out.penstock-save-*/model.safetensors"))
            if while_written
            else metrics.exists()
        ),
        first,
    )
    shutil.copytree(tmp_path / "other", tmp_path / "out")
    error = ended(first, 1)
    assert re.fullmatch(r"penstock: --out out has a model that was not there .* out-2\n", error)
    assert files(tmp_path / "out") == files(tmp_path / "other") and saved(tmp_path / "out-2")
    assert files(tmp_path / "out-2") != files(tmp_path / "out")
    assert json.loads((tmp_path / "run/summary.json").read_text())["model"] == "out-2"
    # --force replaces the model that was there at the start
    assert call(words("--steps", 1, *given, "--force"), tmp_path).returncode == 0
    assert files(tmp_path / "out") != files(tmp_path / "other")
    assert not list(tmp_path.glob(".*penstock*"))


def test_a_model_that_the_disk_has_no_room_for_is_refused_first(words, tiny_model, tmp_path):
    config = json.loads((tiny_model / "config.json").read_text())
    config |= {
        "hidden_size": 65536,
        "intermediate_size": 1 << 20,
        "num_hidden_layers": 1000,
        "head_dim": 128,
        "num_attention_heads": 512,
        "num_key_value_heads": 512,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    command = words("--init-weights", "--out", "out/deep")
    command[command.index("--model") + 1] = "model"
    one_sentence(
        call(command, tmp_path),
        2,
        r"--out out/deep: the model takes \d+\.\d TiB and the disk has [\d.]+ .iB free",
    )
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_with_no_save_the_first_line_says_that_nothing_is_kept(words, tmp_path):
    text = "the trained model will not be saved: --no-save was given"
    assert text in call(loud(words("--steps", 1, "--no-save")), tmp_path).stderr
    assert text not in call(loud(words("--steps", 1, "--out", "out")), tmp_path).stderr


# ---- files that cannot be written ----------------------------------------------------------------


def test_metrics_that_cannot_be_written_end_the_run_with_the_model_saved(words, tmp_path):
    process = started(words("--steps", ENDLESS, "--out", "out", "--trace-steps", 0), tmp_path)
    resource.prlimit(
        process.pid,
        resource.RLIMIT_FSIZE,
        ((tmp_path / "run/metrics.jsonl").stat().st_size + 4000, resource.RLIM_INFINITY),
    )
    wait_for(
        lambda: (
            "penstock: run/metrics.jsonl cannot be written: File too large"
            in process.stderr.readline()
        )
    )
    unlimited(process)
    ended(process, 1)
    assert saved(tmp_path / "out")


def test_a_save_that_fails_is_tried_again(words, tmp_path):
    process = subprocess.Popen(
        words("--steps", 2, "--out", "out", "--save-wait", 40),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit_files(200_000),
        stdin=subprocess.DEVNULL,
    )
    assert "File too large" in process.stderr.readline()
    assert "kept in memory, and saving is tried again for 40 s" in process.stderr.readline()
    assert not (tmp_path / "out").exists()
    unlimited(process)
    ended(process, 0)
    assert saved(tmp_path / "out")


def test_a_save_is_given_up_in_the_end(words, tmp_path):
    done = call(
        words("--steps", 2, "--out", "out", "--save-wait", 0.5),
        tmp_path,
        preexec_fn=limit_files(200_000),
        stdin=subprocess.DEVNULL,
    )
    assert (
        done.returncode == 1
        and done.stderr.splitlines()[-1] == "penstock: the model was not saved"
        and not (tmp_path / "out").exists()
    )


def at_terminal(command, cwd, answer):
    """Runs with a terminal as stdin and stderr; @answer(text so far, process) gives what is typed,
    None for nothing yet."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        limit_files(200_000)()
        os.execv(command[0], command)
    text, deadline = "", time.monotonic() + HANGS_S
    while True:
        assert select.select([terminal], [], [], deadline - time.monotonic())[0], text
        try:
            text += os.read(terminal, 4096).decode()
        except OSError:  # the other end is closed
            break
        typed = answer(text, pid)
        if typed is not None:
            os.write(terminal, typed)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), text


QUESTION = "or q to give the model up: "


def test_at_a_terminal_another_directory_can_be_named(words, tmp_path):
    replies = [b"\n", b"/proc/no\n", b"other\n"]

    def answer(text, pid):
        if text.endswith(QUESTION) and replies:
            if len(replies) == 1:
                resource.prlimit(
                    pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                )
            return replies.pop(0)

    code, text = at_terminal(words("--steps", 2, "--out", "out"), tmp_path, answer)
    assert (
        code == 0
        and text.count(QUESTION) == 3
        and text.count("File too large") == 2
        and "/proc/no cannot be written" in text
    ), text
    assert saved(tmp_path / "other") and not (tmp_path / "out").exists()


@pytest.mark.parametrize("reply", [b"q\n", b"\x03"], ids=["q", "Ctrl-C"])
def test_at_a_terminal_the_model_can_be_given_up(words, tmp_path, reply):
    code, text = at_terminal(
        words("--steps", 2, "--out", "out"),
        tmp_path,
        lambda text, pid: reply if text.endswith(QUESTION) else None,
    )
    assert code == 1 and not (tmp_path / "out").exists(), (code, text)


# ---- signals and pipes ---------------------------------------------------------------------------


def test_a_closed_terminal_saves_whatever_often_it_says_so(words, tmp_path):
    process = started(
        words("--steps", ENDLESS, "--tokens-per-step", 4096, "--out", "out"), tmp_path
    )
    for _ in range(3):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.02)
    ended(process, 130)
    assert saved(tmp_path / "out")


def test_nohup_is_respected(words, tmp_path):
    process = started(
        words("--steps", ENDLESS),
        tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    process.send_signal(signal.SIGHUP)
    metrics = tmp_path / "run/metrics.jsonl"
    size = metrics.stat().st_size
    wait_for(lambda: metrics.stat().st_size > size + 4000, process)
    process.send_signal(signal.SIGTERM)
    ended(process, 130)


def test_readers_that_go_away_stop_no_training(words, tmp_path):
    process = started(
        loud(words("--steps", ENDLESS, "--out", "out")), tmp_path, stdout=subprocess.PIPE
    )
    process.stdout.close()
    process.stderr.close()
    metrics = tmp_path / "run/metrics.jsonl"
    size = metrics.stat().st_size
    time.sleep(5.2)  # past a line of progress
    wait_for(lambda: metrics.stat().st_size > size, process)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=HANGS_S)
    assert process.returncode == 130 and saved(tmp_path / "out")


def test_progress_that_nobody_could_read_is_noted_once(words, tmp_path):
    done = call(
        loud(words("--steps", 2)),
        tmp_path,
        stderr=open("/dev/full", "w"),
        capture_output=False,
        stdout=subprocess.PIPE,
    )
    assert (
        done.returncode == 0
        and done.stdout.count("progress is incomplete: stderr could not be written") == 1
    )


@pytest.mark.parametrize("closed", [(0, 1, 2), (2,), (1,)])
def test_files_do_not_take_the_place_of_closed_outputs(words, tmp_path, closed):
    def close():
        for fd in closed:
            os.close(fd)

    done = call(loud(words("--steps", 3)), tmp_path, preexec_fn=close)
    assert done.returncode == 0
    assert [
        json.loads(line)["step"]
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ] == [0, 1, 2]


def test_an_answer_that_does_not_arrive_is_an_error(tiny_model, words, tmp_path):
    plan = ["plan", "--model", tiny_model, "--seq-len", 64]
    for command in (
        plan,
        [*plan, "--json"],
        ["info", "--model", tiny_model],
        ["version"],
        ["train", "--help"],
    ):
        done = call(
            [BINARY, *map(str, command)],
            tmp_path,
            stdout=open("/dev/full", "w"),
            capture_output=False,
            stderr=subprocess.PIPE,
        )
        one_sentence(done, 1, "stdout cannot be written: No space left on device")
    done = call(
        words("--steps", 2, "--json", "--out", "out"),
        tmp_path,
        stdout=open("/dev/full", "w"),
        capture_output=False,
        stderr=subprocess.PIPE,
    )
    one_sentence(done, 1, "stdout cannot be written")
    assert saved(tmp_path / "out")


# ---- names ---------------------------------------------------------------------------------------


def test_names_from_files_cannot_write_to_a_terminal(tiny_model, words, tmp_path):
    config = tmp_path / "model"
    config.mkdir()
    (config / "config.json").write_text((tiny_model / "config.json").read_text())
    header = json.dumps(
        {"a\x1b]0;b\x07\x9b2J": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}},
        ensure_ascii=False,
    ).encode()
    (config / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"\0" * 8
    )
    command = words("--steps", 1)
    command[command.index("--model") + 1] = "model"
    done = call(command, tmp_path)
    one_sentence(done, 2, r"a\\x1b\]0;b\\x07\\xc2\\x9b2J")
    done = call([BINARY, "info", "--data", "x\x1b[2J\n\u00e9"], tmp_path)
    one_sentence(done, 2, r"x\\x1b\[2J.*\u00e9")


def test_text_is_made_printable_within_its_room():
    lib = ctypes.CDLL(str(BUILD / "lib/libpenstock.so"))
    lib.ps_printable.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p]

    def printable(text, room=100):
        buffer = ctypes.create_string_buffer(b"\xee" * room, room)
        lib.ps_printable(buffer, room, text)
        return buffer.value

    assert printable("Größe 木 😀\\n".encode()) == "Größe 木 😀\\n".encode()
    assert (
        printable(b"\x01\n\x7f\x9b\xc2\x9b\xff\xe6\x9c") == rb"\x01\x0a\x7f\x9b\xc2\x9b\xff\xe6\x9c"
    )
    assert (
        printable("aé".encode(), 3) == b"a"
        and printable(b"a\x1b", 5) == b"a"
        and printable(b"a\x1b", 6) == rb"a\x1b"
        and printable(b"a", 1) == b""
    )


def test_a_path_with_nul_is_refused(tiny_model):
    with pytest.raises(ValueError, match="contains a NUL"):
        ModelConfig.read(f"{tiny_model}\0.old")
