"""What the Python command does before the program starts: text as --data, whose shards a cache
keeps, and models by their names on the hub."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BUILD, ROOT
from penstock import data, hub, inputs
from penstock.conversation import DataError
from penstock.words import Words
from test_data_chat import CHATML, jsonl, say

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHATS = [{"messages": say(f"what is {i}?", "it is the fox " * (1 + i % 5))} for i in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_model):
    """A chat model's directory."""
    from tokenizers import AddedToken

    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_model, folder)
    text = folder.parent / "t.txt"
    text.write_text("the quick brown fox says hello: what is it? " * 50)
    t = data.train_tokenizer([text], 300)
    t.add_special_tokens([AddedToken(x, special=True) for x in ("<|im_start|>", "<|im_end|>")])
    t.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with data, and a cache of its own, but for the hardware's rates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RATES", os.environ["XDG_CACHE_HOME"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    jsonl(tmp_path / "chats.jsonl", CHATS)
    (tmp_path / "book.txt").write_text("the quick brown fox\n" * 200)
    return tmp_path


def prepare(model, *words, command="train", seq_len=64):
    """The values of --data and --val that the program gets."""
    given = ["--model", str(model), "--seq-len", str(seq_len), *map(str, words)]
    assert inputs.needed(command, given)
    w = Words(inputs.prepare(command, given))
    assert not w.names & inputs.OF_TEXT
    return w.values("--data") + w.values("--val")


def entry(model, *words, **how):
    (path,) = prepare(model, *words, **how)
    return Path(path)


def penstock(*words, code=0, **env):
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ
        | {"PYTHONPATH": str(ROOT / "python"), "XDG_CACHE_HOME": os.environ["RATES"]}
        | env,
    )
    assert done.returncode == code, done.stderr
    return done


# ---- words ---------------------------------------------------------------------------------------


def test_words_are_read_and_changed_as_the_program_reads_them():
    w = Words(["--model", "a", "--data", "x", "y", "--base-model=b", "--data=z", "--shuffle"])
    assert w.last("--model") == "b" and w.values("--data") == ["x", "y", "z"]
    w.set("--model", "c")
    w.set_list("--data", ["d", "-1"])
    assert [*w] == "--model a --model=c --shuffle --data=d --data=-1".split()
    # a word too many stays one, which the program refuses
    w = Words(["--model", "a", "stray", "--data=x", "--data"])
    w.set("--model", "b")
    assert [*w] == ["--model=b", "stray", "--data=x", "--data"] and w.values("--data") == ["x"]
    assert w.last("--val") is None and w.take(["--data"]) == ["--data=x", "--data"]


def test_the_options_of_text_are_known_without_packages_and_by_the_program():
    named = {o for a in inputs.text_parser("train")._actions for o in a.option_strings}
    assert named - {"-h", "--help"} == inputs.OF_TEXT
    source = (ROOT / "native/cli/job.c").read_text().split("of_text[] = ")[1]
    listed = " ".join(re.findall(r'"([^"]+)"', source.split(";")[0])).split()
    assert {f"--{name}" for name in listed} == inputs.OF_TEXT


# ---- the cache -----------------------------------------------------------------------------------


def test_shards_are_those_of_penstock_data_and_are_found_again(here, model, capsys, monkeypatch):
    words = "--out o --pack best-fit --seq-len 64 --val-fraction 0.2 --tokenizer".split()
    assert data.main([*words, str(model), "chats.jsonl"]) == 0
    summary = capsys.readouterr().out.partition(": ")[2]
    new = entry(model, "--data", "chats.jsonl", "--val-fraction", 0.2)
    said = capsys.readouterr().err
    assert f"penstock: --data chats.jsonl: {summary}" in said and "written to" in said
    files = [p for p in Path("o").rglob("*") if p.is_file()]
    assert len(files) > 5 and all(
        (new / p.relative_to("o")).read_bytes() == p.read_bytes() for p in files
    )
    kept = json.loads((new / "dataset.json").read_text())
    assert (kept["records"], kept["documents"], kept["pack"]) == (24, 24, "best-fit")

    monkeypatch.setattr(data, "write_shards", None)  # nothing is encoded again
    (here / "elsewhere").mkdir()
    moved = (here / "chats.jsonl").rename(here / "elsewhere/other.jsonl")
    assert entry(model, "--data=" + str(moved), "--val-fraction=0.2") == new
    said = capsys.readouterr().err
    assert summary in said and f"found in {new}" in said and "KiB" in said
    assert prepare(model, "--data", moved, "--val-fraction", 0.2, "--quiet") == [str(new)]
    assert not capsys.readouterr().err


def test_what_the_tokens_depend_on_is_in_the_hash(here, model, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML.replace("trim", "trim | lower")}
    (changed / "tokenizer_config.json").write_text(json.dumps(config))
    jsonl(here / "more.jsonl", [*CHATS, CHATS[0]])
    first = entry(model, "--data", "chats.jsonl")
    others = [
        entry(changed, "--data", "chats.jsonl"),
        entry(model, "--data", "more.jsonl"),
        entry(model, "--data", "chats.jsonl", "more.jsonl"),
        entry(model, "--data", "chats.jsonl", seq_len=128),
        entry(model, "--data", "chats.jsonl", "--pack", "none"),
        entry(model, "--data", "chats.jsonl", "--targets", "all"),
        entry(model, "--data", "chats.jsonl", "--long=drop"),
        entry(model, "--data", "chats.jsonl", "--date", "2026-01-31"),
        entry(model, "--data", "chats.jsonl", "--chat-template-kwargs", '{"a": 1}'),
    ]
    assert len({first, *others}) == 10
    for name, option in (("eval", "--data"), ("plan", "--data"), ("train", "--val")):
        assert entry(model, option, "chats.jsonl", command=name) == first
    assert entry(model, "--val", "chats.jsonl", "--val-fraction", "0.2") == first
    text = entry(model, "--data", "book.txt")  # is not packed, and so of any length
    assert entry(model, "--data", "book.txt", seq_len=128) == text
    assert not list(text.glob("*.mask")) and list(first.glob("*.mask"))
    assert json.loads((text / "dataset.json").read_text())["records"] == 0


def test_shards_folders_patterns_and_weights_stand_together(here, model, tiny_shard):
    (here / "notes").mkdir()
    shutil.copy("chats.jsonl", "notes")
    (here / "notes/x.log").write_text("no text by name")
    a, b = entry(model, "--data", "chats.jsonl"), entry(model, "--data", "book.txt")
    assert entry(model, "--data", "book.t*") != b  # a match may be passed over
    assert entry(model, "--data", "notes") != a
    got = prepare(model, "--data", tiny_shard, "book.txt", tiny_shard.parent, "--val=chats.jsonl")
    assert got == [str(tiny_shard), str(b), str(tiny_shard.parent), str(a)]
    assert prepare(model, "--data", f"chats.jsonl:0.7,{tiny_shard}:3e-1,book.txt:1") == [
        f"{a}:0.7,{tiny_shard}:3e-1,{b}:1"
    ]
    shutil.copy(tiny_shard, here / "unnamed")
    for shards in (tiny_shard, tiny_shard.parent, "unnamed", f"unnamed:1,{tiny_shard}:2", "gone"):
        assert not inputs.needed("train", ["--model", str(model), "--data", str(shards)])


DAMAGE = {
    "cut off": lambda e: os.truncate(e / "train-00000.bin", 1100),
    "a bit": lambda e: (e / "train-00000.mask").write_bytes(
        (e / "train-00000.mask").read_bytes()[:-1] + b"\x07"
    ),
    "a file": lambda e: (e / "dataset.json").unlink(),
    "no record": lambda e: (e / "cache.json").unlink(),
    "no JSON": lambda e: (e / "cache.json").write_text("{"),
    "another JSON": lambda e: (e / "cache.json").write_text("[]"),
    "empty": lambda e: (shutil.rmtree(e), e.mkdir()),
    "a file in place": lambda e: (shutil.rmtree(e), e.write_text("")),
}


def test_a_damaged_entry_is_made_again(here, model, capsys):
    def state():
        return {p: p.read_bytes() for p in e.rglob("*") if p.is_file()}

    e = entry(model, "--data", "chats.jsonl")
    whole = state()
    for what, damage in DAMAGE.items():
        damage(e)
        left = e.parent / f".{e.name}-killed"  # by a process that was killed
        left.mkdir()
        capsys.readouterr()
        assert entry(model, "--data", "chats.jsonl") == e, what
        said = capsys.readouterr().err
        assert f"{e} is damaged and will be made again" in said and "written to" in said
        assert state() == whole, what
        assert {p.name for p in e.parent.iterdir()} == {e.name, ".lock"}


def test_a_cache_that_cannot_be_written_loses_nothing(here, model, monkeypatch):
    e = entry(model, "--data", "chats.jsonl")
    before = sorted(here.rglob("*"))

    def fails(code):
        def call(*args, **options):
            raise OSError(code, os.strerror(code))

        return call

    with monkeypatch.context() as m:  # full
        m.setattr(data.ShardWriter, "append", fails(errno.ENOSPC))
        with pytest.raises(DataError, match="No space left on device: give --data-cache DIR"):
            entry(model, "--data", "book.txt")
    with monkeypatch.context() as m:  # read-only
        m.setattr(Path, "mkdir", fails(errno.EROFS))
        m.setattr("penstock.data_cache.open", fails(errno.EROFS), raising=False)
        assert entry(model, "--data", "chats.jsonl") == e
        with pytest.raises(DataError, match=r"^--data: the data cache .*: Read-only file system"):
            entry(model, "--data", "book.txt")
    assert sorted(here.rglob("*")) == before
    (here / "file").write_text("")
    with pytest.raises(DataError, match="data cache file cannot be written: (Not a dir|File ex)"):
        entry(model, "--data", "book.txt", "--data-cache", "file")


def test_two_processes_at_once_make_an_entry_once(here, model):
    jsonl(here / "many.jsonl", CHATS * 10)
    words = ["--model", str(model), "--seq-len", "64", "--data", "many.jsonl"]
    script = f"from penstock import inputs; inputs.prepare('train', {words})"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        )
        for _ in range(2)
    ]
    said = [p.communicate()[1] for p in both]
    assert [p.returncode for p in both] == [0, 0], said
    assert sum("written to" in s for s in said) == 1 and sum("found in" in s for s in said) == 1
    names = {p.name for p in (here / "cache/penstock/data").iterdir()}
    assert len(names) == 2 and ".lock" in names


# ---- refusals ------------------------------------------------------------------------------------

REFUSED = {
    "no JSON": ("a.jsonl", "what is it?\n", "a.jsonl: line 1 is not JSON"),
    "no fields": ("a.jsonl", '{"foo": 1}\n', "its fields are 'foo': name the text's field"),
    "mixed": ("a.jsonl", json.dumps(CHATS[0]) + '\n{"text": "a"}\n', "line 2"),
    "empty": ("a.jsonl", "", "the input has no text"),
    "suffix": ("a.csv", "a,b\n", "a.csv: its name does not say what it is: token shards are .bin"),
    "no suffix": ("a", "a text that is no shard", "a: its name does not say what it is"),
    "no UTF-8": ("a.txt", "\udcff", "a.txt: is not UTF-8 text"),
    "compressed": ("a.jsonl.xz", "", "decompress it first"),
    "parquet": ("a.parquet", "PAR1", "a.parquet"),
    "no targets": ("a.jsonl", json.dumps({"messages": say("hi")}), "no document is left to pack"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_text_that_is_none_is_refused(here, model, case):
    name, text, message = REFUSED[case]
    (here / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError) as refused:
        prepare(model, "--data", name)
    assert message in str(refused.value) and str(refused.value).startswith("--data: ")
    assert [p for p in here.rglob("cache/penstock/data/*") if p.name != ".lock"] == []


def test_other_refusals_come_before_anything_is_written(here, model, tiny_model, tiny_shard):
    for words, message in (
        (["--data", tiny_shard, "--targets", "all"], "--targets says how text becomes tokens"),
        (["--data", "chats.jsonl", "--model", tiny_model], "tokenizer.json: No such file"),
        (["--data", here / ("0" * 32)], "is no longer in the data cache: give --data"),
        (["--data", "chats.jsonl", "--seq-len", "1"], "rows of --seq-len 1: give 2 to"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(model, *words)
    (here / "a.jsonl").write_text("{}")
    shape = ["train", "--model", model, "--data", "a.jsonl", "--run-dir", "run", "--seq-len"]
    for words, message in (
        ([64], "penstock: --data: a.jsonl: line 1 has no text in field 'text'"),
        ([64, "--pack", "often"], "invalid choice: 'often'"),
        (["x"], "--seq-len x: give a whole number"),
    ):
        done = penstock(*shape, *words, code=2)
        assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (here / "run").exists()
    assert {p.name for p in here.glob("cache/penstock/data/*")} <= {".lock"}


def test_the_program_alone_says_which_command_reads_text(here, model):
    (here / "empty").mkdir()
    shape = ["--model", model, "--seq-len", "64"]
    for words, message in (
        (["train", *shape, "--data", "chats.jsonl"], "the command penstock of the Python package"),
        (["eval", *shape, "--data", "book.txt"], "the command penstock of the Python package"),
        (["plan", *shape, "--data", "empty"], "the command penstock of the Python package"),
        (["train", *shape], "--data is missing: give token shards, or text to the Python command"),
        (["train", *shape, "--targets", "all"], "--targets is an option of the Python command"),
        (["train", "--seq-len", "64", "--model", "org/none"], "run the Python command penstock"),
    ):
        done = subprocess.run([BUILD / "bin/penstock", *words], capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1


# ---- models by name ------------------------------------------------------------------------------


def put(cache, model, name="org/tiny", revision="main", leave_out=()):
    """The model as the hub's cache has it: links to files that their hashes name."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for path in (snapshot, folder / "blobs", folder / "refs"):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(COMMIT)
    for path in model.iterdir():
        if path.name not in leave_out:
            blob = folder / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copy(path, blob)
            (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_a_training_of_a_hub_model_on_chats_resumes_with_the_same_data(here, model):
    snapshot = put(here / "hf/hub", model)
    words = ["train", "--model", "org/tiny", "--data", "chats.jsonl", "--quiet", "--seq-len", "64"]
    words += [
        *"--data-cache shards --run-dir run --recipe fp32 --checkpoint-every 2 --keep 9".split(),
    ]
    env = {"HF_HOME": str(here / "hf")}
    penstock(*words, "--steps", 2, **env)
    penstock(*words, "--steps", 4, "--resume", "latest", "--out", "out", **env)
    weights = (here / "out/model.safetensors").read_bytes()
    assert len(weights) > 1000 and not (here / "out/tokenizer.json").is_symlink()
    assert (here / "out/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    toml = (here / "run/run.toml").read_text()
    assert str(snapshot) in toml and str(here / "shards") in toml

    (here / "job.toml").write_text(
        '[model]\nmodel = "org/tiny"\n[data]\ndata = "chats.jsonl"\nseq-len = 64\n'
    )
    done = penstock("eval", "--config", "job.toml", "--data-cache=shards", "--json", **env)
    assert json.loads(done.stdout)["valid_tokens"] > 100 and "found in" in done.stderr

    jsonl(here / "chats.jsonl", CHATS[1:])
    done = penstock(*words, "--steps", 6, "--resume", "latest", "--force", code=2, **env)
    assert "data" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_directory_comes_before_the_cache_and_a_revision_is_its_own(here, model, monkeypatch):
    monkeypatch.setattr(hub, "_download", lambda *_: pytest.fail("the network is asked"))
    snapshot = put(hub.cache(), model, revision="v1.0")
    assert hub.cache() == here / "cache/huggingface/hub"
    for name in ("org/tiny@v1.0", f"org/tiny@{COMMIT}"):
        assert hub.find("--model", name, hub.ALL) == str(snapshot)
    (here / "org").mkdir()
    for path in ("org/none", "org/tiny", "./a/b", "a", "a/b/c", "../a", ".a/b", "~/a"):
        assert hub.find("--model", path, hub.ALL) == path  # for others to refuse
    (snapshot.parent.parent / "refs/main").write_text(COMMIT)
    assert hub.find("--model", "org/tiny", hub.ALL) == str(snapshot)
    (here / "org/tiny").mkdir()
    assert hub.find("--model", "org/tiny", hub.ALL) == "org/tiny"
    for variable, place in (("HF_HOME", "a/hub"), ("HF_HUB_CACHE", "b")):
        monkeypatch.setenv(variable, str(here / place.split("/")[0]))
        assert hub.cache() == here / place


@pytest.mark.parametrize("lacks", ["model.safetensors", "tokenizer.json", "config.json", "blob"])
def test_what_a_snapshot_lacks_is_downloaded(here, model, monkeypatch, lacks):
    snapshot = put(hub.cache(), model, leave_out=[lacks])
    if lacks == "blob":
        lacks = "model.safetensors"
        (snapshot / lacks).resolve().unlink()
    asked = []

    def snapshot_download(repository, **options):
        asked.append((repository, options))
        (snapshot / lacks).unlink(missing_ok=True)
        shutil.copy(model / lacks, snapshot)
        return str(snapshot)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    if lacks == "model.safetensors":  # which a plan does not need
        assert hub.find("--model", "org/tiny", [hub.CONFIG, hub.TOKENIZER]) == str(snapshot)
    for _ in range(2):
        assert hub.find("--model", "org/tiny", hub.ALL, quiet=True) == str(snapshot)
    ((repository, options),) = asked
    assert (repository, options["revision"]) == ("org/tiny", "main")
    assert Path(options["cache_dir"]) == hub.cache()
    patterns = options["allow_patterns"]
    assert {lacks, "chat_template.jinja", "model-*.safetensors"} <= {*patterns}
    assert not [p for p in patterns if "bin" in p or "pth" in p]


def test_a_download_of_the_command_is_that_of_the_package_and_its_failure_one_sentence(here, model):
    stub = here / "stub"
    stub.mkdir()
    (stub / "huggingface_hub.py").write_text(
        "import os, shutil\n"
        "def snapshot_download(repository, **options):\n"
        "    if repository != 'org/tiny': raise RuntimeError('404: no such\\nrepository.')\n"
        f"    shutil.copytree({str(model)!r}, 'snap')\n"
        "    return os.path.abspath('snap')\n"
    )
    path = os.pathsep.join([str(stub), str(ROOT / "python")])
    env = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "0"}
    penstock("info", "--model", "org/tiny", **env)
    assert (here / "snap/config.json").exists()
    done = penstock("info", "--model", "org/none@v2", code=2, **env)
    assert done.stderr.count("\n") == 1
    assert "the download fails: 404: no such repository: where" in done.stderr
    assert "hf download org/none --revision v2 --local-dir none" in done.stderr


def test_without_a_network_or_the_package_each_command_says_what_to_type(here, monkeypatch, capsys):
    words = {
        "generate": "--model org/none --prompt a",
        "export": "--model org/none --to hf --out o",
        "merge": "--model org/none --adapter a --out o",
        "compare": "org/none --hf",
        "data": "--tokenizer org/none --out o book.txt",
    }
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for offline, why in (("1", "switched off by HF_HUB_OFFLINE"), ("", "needs the package hugg")):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        for name, line in words.items():
            main = __import__(f"penstock.{name}", fromlist=["main"]).main
            assert main(line.split()) == 2, name
            said = capsys.readouterr().err
            assert why in said and "type hf download org/none --local-dir none" in said, said
            assert said.count("\n") == 1
    assert not (here / "o").exists()
