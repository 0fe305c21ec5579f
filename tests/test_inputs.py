"""Input files: what is not a regular file is refused and never waited for, whoever reads it."""

import os
import shutil
import subprocess
import sys
from functools import partial

import pytest
from conftest import BUILD, HANGS_S, ROOT

PENSTOCK, PYTHON = BUILD / "bin/penstock", sys.executable
ENV = os.environ | {"PYTHONPATH": str(ROOT / "python")}


def commands(model, data, out):
    plan = [PENSTOCK, *"plan --backend cpu --threads 1 --model".split(), model, "--seq-len", "64"]
    train = [
        PENSTOCK,
        *"train --backend cpu --threads 1 --model".split(),
        model,
        "--data",
        data,
        *"--seq-len 64 --steps 1 --run-dir".split(),
        out,
    ]
    info = [PENSTOCK, "info", "--model", model, "--data", data]
    return {"plan": plan, "train": train, "info": info}


def refused(command, path, words, env=ENV):
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, env=env, timeout=HANGS_S
    )
    assert done.returncode == 2, done
    assert str(path) in done.stderr and words in done.stderr and "Traceback" not in done.stderr, (
        done.stderr
    )


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


CASES = [
    ("plan", "config.json"),
    ("train", "config.json"),
    ("info", "config.json"),
    ("train", "model.safetensors"),
    ("train", "model.safetensors.index.json"),
    ("train", "shard"),
    ("info", "shard"),
]


@pytest.mark.parametrize("command, which", CASES)
def test_a_pipe_in_the_place_of_an_input_is_refused_at_once(
    model, tiny_shard, tmp_path, command, which
):
    shard = shutil.copy(tiny_shard, tmp_path / "a.bin")
    path = shard if which == "shard" else model / which
    if which == "model.safetensors.index.json":
        (model / "model.safetensors").unlink()
    else:
        os.unlink(path)
    os.mkfifo(path)
    refused(commands(model, shard, tmp_path / "run")[command], path, "named pipe")


def test_a_pipe_in_the_place_of_a_machine_is_refused_at_once(model, tmp_path):
    os.mkfifo(tmp_path / "machine.json")
    refused(
        [
            PENSTOCK,
            "plan",
            "--model",
            model,
            *"--seq-len 64 --hardware".split(),
            tmp_path / "machine.json",
        ],
        tmp_path / "machine.json",
        "named pipe",
    )


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--config"],
        ["info", "--config"],
        ["generate", "--model", "MODEL", "--prompts"],
    ],
)
def test_a_pipe_in_the_place_of_an_options_file_is_refused_at_once(model, tmp_path, words):
    os.mkfifo(tmp_path / "pipe")
    words = [model if w == "MODEL" else w for w in words]
    refused([PENSTOCK, *words, tmp_path / "pipe"], tmp_path / "pipe", "not a regular file")


def test_a_directory_or_a_device_in_the_place_of_a_file_is_named(model, tmp_path):
    (model / "config.json").unlink()
    (model / "config.json").mkdir()
    refused(commands(model, "", "")["plan"], model / "config.json", "a directory")
    refused(
        [PENSTOCK, "info", "--model", ROOT / "models/tiny-llama.json", "--data", "/dev/null"],
        "/dev/null",
        "a character device",
    )


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_a_pipe_in_the_place_of_text_is_refused_at_once(tmp_path, capsys, suffix):
    from penstock import data

    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    os.mkfifo(tmp_path / f"pipe{suffix}")
    words = ["--out", tmp_path / "out", "--train-tokenizer", "300", tmp_path / f"pipe{suffix}"]
    assert data.main([str(w) for w in words]) == 2
    error = capsys.readouterr().err
    assert f"pipe{suffix}" in error and "not a regular file" in error and error.count("\n") == 1


def test_a_pipe_is_refused_by_the_readers_in_python(tmp_path, monkeypatch):
    from penstock import data, plot, shards, trace

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for read, error in (
        (shards.read_header, data.DataError),
        (data.load_tokenizer, data.DataError),
        (trace.load, OSError),
        (plot.read_metrics, OSError),
    ):
        with pytest.raises(error, match="not a regular file"):
            read(pipe)
    refused(
        [PYTHON, ROOT / "models/init_model.py", pipe, tmp_path / "out"], pipe, "not a regular file"
    )
    refused(
        [
            PYTHON,
            ROOT / "models/init_model.py",
            ROOT / "models/tiny-llama.json",
            tmp_path / "out",
            "--tokenizer",
            pipe,
        ],
        pipe,
        "not a regular file",
    )


def test_a_failure_of_the_package_tokenizers_is_one_sentence(capsys):
    from penstock import command

    class PanicException(BaseException):
        """As the package's."""

    def fail(error):
        raise error

    for error, code, says in (
        (Exception("no token\nfor it"), 2, "the tokenizer fails: no token for it"),
        (PanicException("index out of bounds"), 2, "the tokenizer fails: index out of bounds"),
        (MemoryError(), 1, "host memory ran out"),
    ):
        assert command.run("penstock x", partial(fail, error)) == code
        assert capsys.readouterr().err == f"penstock x: {says}\n"
    with pytest.raises(ZeroDivisionError):
        command.run("penstock x", lambda: 1 // 0)
