"""bench/sweep: what its files may say, resuming, the tables, the heatmaps, and both modes on a tiny
model."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest
from conftest import BUILD, HANGS_S, ROOT

sys.path.insert(0, str(ROOT / "bench/sweep"))
import cases  # noqa: E402
import measure  # noqa: E402
import pictures  # noqa: E402
import predict  # noqa: E402
import results  # noqa: E402

BINARY = BUILD / "bin/penstock"
RTX = ROOT / "tests/golden/hardware-rtx4090.json"
GRID = """
[[grid]]
model = "tiny-llama"
seq-len = 64
tokens-per-step = 512
host-gib = [1.5, 2]
device-gib = [1, 1.02, 1.2]
"""
PREDICTED = f'mode = "predicted"\nhardware = "{RTX}"\n{GRID}'


def program():
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("sweep_main", ROOT / "bench/sweep/__main__.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder, text, name="s.toml"):
    (folder / name).write_text(text)
    return folder / name


def sweep(*words, check=True):
    done = subprocess.run(
        [str(w) for w in (sys.executable, ROOT / "bench/sweep", "--binary", BINARY, *words)],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert not check or done.returncode == 0, done.stderr + done.stdout
    return done


# ---- what a file may say -------------------------------------------------------------------------


def test_a_files_cases_are_its_grids_without_the_excluded_and_its_extra_ones(tmp_path):
    text = (
        PREDICTED
        + """
[[exclude]]
host-gib = 2
device-gib = [1, 1.2]

[[case]]
model = "1b"
seq-len = 65536
host-gib = 0
device-gib = 24
recipe = "fp32-master"
options = { frozen-layers = 2, deterministic = true }
"""
    )
    found = cases.read(write(tmp_path, text), BINARY).cases
    assert [(c.host_gib, c.device_gib) for c in found] == [
        (1.5, 1), (1.5, 1.02), (1.5, 1.2), (2, 1.02), (0, 24),
    ]  # fmt: skip
    extra = found[-1]
    assert extra.tokens_per_step == 8 * 65536 and extra.recipe == "fp32-master"
    assert extra.options == (("deterministic", ""), ("frozen-layers", "2"))
    assert json.loads(extra.config)["max_position_embeddings"] >= 65536
    assert len({c.key("m", "c") for c in found}) == 5 and found[0].hardware == str(RTX)


def test_a_case_is_another_one_by_any_parameter_the_commit_or_the_machine():
    case = cases.Case("measured", "m", "{}", 64, 1.0, 2.0, 512)
    changed = [
        cases.replace(case, **{name: value})
        for name, value in {
            "config": "{ }", "seq_len": 65, "device_gib": 1.5, "host_gib": 0.0, "recipe": "fp32",
            "tokens_per_step": 1024, "options": (("seed", "1"),), "steps": 6, "warm_up": 1,
            "data": "9 tokens, 0f",
        }.items()
    ]  # fmt: skip
    keys = {c.key("m", "c") for c in [case, *changed]} | {case.key("n", "c"), case.key("m", "d")}
    assert len(keys) == 13 and case.key("m", "c") == cases.replace(case).key("m", "c")
    assert "data" not in case.parameters()  # keys of older rows stay those of seeded tokens
    assert case.key("m", "c") == "3121f2004c583a26"


@pytest.mark.parametrize(
    "old,new,said",
    [
        ('mode = "predicted"', 'mode = "guessed"', 'mode = "guessed": give "predicted"'),
        ('mode = "predicted"', "", 'mode is missing: give "predicted"'),
        ("seq-len = 64", "seq-length = 64", "[[grid]] 1: seq-length is no key here"),
        ("seq-len = 64", "", "[[grid]] 1: seq-len is missing"),
        ("seq-len = 64", 'seq-len = "64"', 'seq-len = "64": a whole number from 1'),
        ("seq-len = 64", "seq-len = [64, 0]", "seq-len = 0: a whole number from 1"),
        ("seq-len = 64", "seq-len = true", "seq-len = true: a whole number"),
        ("seq-len = 64", "seq-len = []", "seq-len is an empty list"),
        ("seq-len = 64", "seq-len = 1024", "tokens-per-step = 512 is less than one sequence"),
        ("[1, 1.02, 1.2]", '["1GiB"]', 'device-gib = "1GiB": a number of GiB is needed, without'),
        ("[1, 1.02, 1.2]", "[-1]", "device-gib = -1: a number of GiB"),
        ("[1.5, 2]", "nan", "host-gib = NaN: a number of GiB"),
        ('"tiny-llama"', '"9b"', "model '9b' is none of 11b_1b, 15b"),
        ("[[grid]]", '[[grid]]\nrecipe = "fp9"', 'recipe = "fp9": give one of bf16'),
        ("[[grid]]", "[[grid]]\ngpus = 9", "gpus = 9: a whole number from 1 to 8"),
        ("[[grid]]", "[[grid]]\nsteps = 5", 'steps is for mode = "measured"'),
        ("[[grid]]", "[[grid]]\noptions = { lr = 1 }", "--lr is no option of the command"),
        ("[[grid]]", "[[grid]]\noptions = { seq-len = 1 }", "give seq-len instead"),
        ("[[grid]]", "[[grid]]\noptions = 3", "options = 3: a table is needed"),
        ("[[grid]]", "[grid]", "grid is written [[grid]]"),
        ("[[grid]]", "[[case]]", "[[case]] 1: host-gib is a list: a case has one value"),
        (str(RTX), "none.json", 'hardware = "none.json"'),
        ("1.2]", "1.2]\n[[exclude]]\nseq-len = 65", "[[exclude]] 1: no case matches it"),
        ("1.2]", "1.2]\n[[exclude]]\nsteps = 1", "[[exclude]] 1: steps is no key here"),
        (GRID, "", "there is no case: give a [[grid]] or a [[case]]"),
        ("seq-len = 64", "seq-len = ", "line 6"),
    ],
)
def test_a_mistake_in_a_file_is_a_sentence(tmp_path, old, new, said):
    assert old in PREDICTED
    path = write(tmp_path, PREDICTED.replace(old, new, 1))
    with pytest.raises(cases.SweepError) as error:
        cases.read(path, BINARY)
    assert str(error.value).startswith(str(path)) and said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "new,said",
    [
        (f'hardware = "{RTX}"', "only this machine can be measured"),
        ("steps = 2\nwarm-up = 2", "warm-up = 2 leaves none of steps = 2"),
        ("options = { hardwar = 1 }", "--hardwar is no option"),
    ],
)
def test_a_mistake_in_a_measured_file_is_a_sentence(tmp_path, new, said):
    with pytest.raises(cases.SweepError, match=said):
        cases.read(write(tmp_path, f'mode = "measured"\n{new}\n{GRID}'), BINARY)


def test_a_refused_sweep_writes_nothing(tmp_path):
    path = write(tmp_path, PREDICTED.replace("seq-len", "sequence"))
    case, none = "tiny-llama:64:0:0:512", tmp_path / "none.bin"
    for words, said in (
        ([path], "sequence is no key"),
        (["1b:64:2"], "a case is"),
        ([], "no cases"),
        ([case, "--data", none], f"--data {none}: cannot be opened"),
        ([case, "--limit-minutes", "-1"], "--limit-minutes is -1: 0, for no limit, or more"),
        (["--draw"], f"--out {tmp_path}/out has no rows.jsonl to draw"),
    ):
        done = sweep(*words, "--out", tmp_path / "out", check=False)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr
        assert not (tmp_path / "out").exists()
    done = sweep(case, "--out", path, check=False)
    assert done.returncode == 2 and f"--out {path} is a file: give a folder" in done.stderr


@pytest.mark.parametrize(
    "word,said",
    [
        ("8b:many:1:1:1", 'seq-len = "many": a whole number from 1'),
        ("8b:64:8GiB:1:64", 'device-gib = "8GiB": a number of GiB is needed, without'),
        ("8b:64:1:1:x", 'tokens-per-step = "x": a whole number from 1'),
        ("8b:64:1:1:64:steps=x", 'steps = "x": a whole number from 1'),
        ("8b:64:1:1:64:lr=1e-3,lr=1e-4", "lr is given twice: give it once"),
    ],
)
def test_a_wrong_word_is_told_as_the_user_wrote_it(word, said):
    with pytest.raises(cases.SweepError) as error:
        cases.parse(word, BINARY)
    assert str(error.value).startswith(f"{word}: {said}")


def test_words_are_cases_as_those_of_a_file():
    case = cases.parse("8b:8192:24:0:131072:recipe=fp32-master,steps=6,warm-up=1,nesterov", BINARY)
    assert (case.seq_len, case.device_gib, case.host_gib, case.steps, case.warm_up) == (
        8192, 24, 0, 6, 1,
    )  # fmt: skip
    assert case.recipe == "fp32-master" and case.options == (("nesterov", ""),)
    for wrong in ("8b:64:1:1:64:alien=1", "8b:64:1:1:32", "8b:64:-1:1:64"):
        with pytest.raises(cases.SweepError, match=wrong.split(":")[0]):
            cases.parse(wrong, BINARY)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "bench/sweep").glob("*.toml")), ids=lambda p: p.stem
)
def test_a_shipped_file_is_right(path):
    assert len(cases.read(path, BINARY).cases) > 1


def test_the_pages_example_is_right(tmp_path):
    page = (ROOT / "bench/README.md").read_text()
    text = page.split("```toml\n")[1].split("```")[0]
    found = cases.read(write(tmp_path, text), BINARY).cases
    assert [c.label().split(" 65536 tokens")[0] for c in found] == [
        "1b 8192 24/84", "1b 8192 90/84", "8b 8192 24/84", "8b 8192 90/84", "8b 512 24/84",
        "8b 512 90/84", "8b 65536 40/110",
    ]  # fmt: skip


def test_the_page_links_every_kept_heatmap():
    page = ROOT / "bench/README.md"
    linked = re.findall(r"\]\((\S+/sweep-\S+?\.png)\)", page.read_text())
    kept = list((ROOT / "bench/results").glob("sweep-*/*.png"))
    assert kept and sorted((page.parent / path).resolve() for path in linked) == sorted(kept)
    assert max(path.stat().st_size for path in kept) < 150_000


# ---- resuming ------------------------------------------------------------------------------------


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """(run, asked): run() sweeps PREDICTED in this process by a planner of the test's, which notes
    the caps that it is asked for."""
    asked, module = [], program()

    def plan(group, _):
        for case in group:
            asked.append((case.host_gib, case.device_gib))
            refused = {"refused": "needs 1.1 GiB of device memory, 1.0 GiB given: raise it"}
            plan = {"predicted_step_s": 512 / case.device_gib, "tokens_per_step": 512,
                    "model_flops": 1e12, "recompute_flops": 1e11, "device_used_bytes": 2**30,
                    "host_used_bytes": 2**30}  # fmt: skip
            line = {"plan": plan, "predicted_mfu": 0.5, "predicted_hfu": 0.6}
            yield case, predict.row_of(refused if case.device_gib == 1 else line, 1.0)

    monkeypatch.setattr(predict, "run", plan)
    path = write(tmp_path, PREDICTED)

    def run(**more):
        args = dict(sources=[str(path)], out=tmp_path / "out", data=[], limit_minutes=0.0,
                    again=None, draw=False, keep=None, binary=BINARY, commit="c")  # fmt: skip
        asked.clear()
        assert module.sweep(Namespace(**{**args, **more})) == 0
        return list(asked)

    monkeypatch.setattr(pictures, "write", lambda rows, folder: [])
    return run


def test_a_sweep_goes_on_after_a_kill_at_any_byte(planned, tmp_path):
    whole = [(h, d) for h in (1.5, 2) for d in (1, 1.02, 1.2)]
    assert planned() == whole and planned() == []
    rows, table = tmp_path / "out/rows.jsonl", tmp_path / "out/sweep.csv"
    full, lines, csv_text = rows.read_bytes(), rows.read_bytes().splitlines(True), table.read_text()
    for n in range(len(lines) + 1):
        before = b"".join(lines[:n])
        for torn in (0, 1, len(lines[n]) - 1) if n < len(lines) else (0,):
            rows.write_bytes(before + lines[n][:torn] if torn else before)
            assert planned() == whole[n:], f"line {n}, byte {torn}"
            assert rows.read_bytes() == full and table.read_text() == csv_text


def test_a_sweep_of_another_commit_or_again_repeats(planned, tmp_path):
    assert len(planned()) == 6 and planned(again="failed") == [] and len(planned(again="all")) == 6
    assert len(planned(commit="d")) == 6 and planned(commit="c") == []
    assert len((tmp_path / "out/rows.jsonl").read_text().splitlines()) == 18
    with open(tmp_path / "out/sweep.csv") as file:
        assert len(list(csv.DictReader(file))) == 12  # the newest row of each case and commit


def test_a_limit_leaves_the_rest_to_the_same_command(planned, capsys):
    assert planned(limit_minutes=1e-9) == []
    assert "6 cases are left for the same command" in capsys.readouterr().out
    assert len(planned(limit_minutes=1.0)) == 6


def test_a_limit_counts_the_longest_case_of_the_model_so_far(planned, capsys, monkeypatch):
    failed = {"status": "failed", "reason": "", "message": "", "wall_s": 40}
    monkeypatch.setattr(predict, "row_of", lambda line, seconds: failed)
    with pytest.raises(AssertionError):  # failed rows: exit code 1
        planned(limit_minutes=0.5)
    assert "5 cases are left" in capsys.readouterr().out


def test_cases_of_other_gpus_and_steps_are_told_apart(tmp_path, monkeypatch):
    one = cases.Case("measured", "m", "{}", 64, 1.0, 2.0, 512)
    two, longer = cases.replace(one, gpus=2), cases.replace(one, steps=9)
    assert [c.label() for c in (one, two)] == [
        "m 64 1/2 512 tokens", "m 64 1/2 512 tokens 2 GPUs",
    ]  # fmt: skip
    rows = [
        json.loads(json.dumps({"case": c.label(), **c.parameters(), "key": c.key("m", "c")}))
        for c in (one, two, longer)
    ]
    monkeypatch.setattr(pictures, "write", lambda rows, folder: [])
    for chosen, n_gpus in (([one], [1]), ([two], [2]), ([longer, two], [2, 1]), ([], [1, 2, 1])):
        program().write(tmp_path, rows, chosen)
        written = json.loads((tmp_path / "sweep.json").read_text())
        assert [r["gpus"] for r in written] == n_gpus
    titles = [pictures.title_of(("A", "m", 64, 512, "bf16", n, ""), []) for n in (1, 2)]
    assert titles[0] + ", 2 GPUs" == titles[1]


def test_a_failed_case_stays_failed_until_it_is_repeated(tmp_path, tiny_shard):
    """By data whose token ids are above the vocabulary, and by a validation of no number."""
    wrong = tmp_path / "wrong.bin"
    measure.random_shard(wrong, 20000, 10**6)
    case = "tiny-llama:64:0:0:128:steps=2,warm-up=1,backend=cpu"
    out = ("--out", tmp_path / "out")
    for more, code in ((wrong, 1), (wrong, 1), (tiny_shard, 0)):
        done = sweep(case, *out, "--data", more, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("1 of 1 cases failed: --again failed repeats them" in done.stdout) == bool(code)
    words = (case, case + ",val-every=2,val-tokens=abc")
    done = sweep(*words, *out, check=False)
    assert done.returncode == 1 and "--val-tokens abc: give a whole number" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
    assert [r["status"] for r in rows] == ["failed", "ok", "ok", "failed"]
    assert [r.get("data", "")[:12] for r in rows] == ["20000 tokens", "20000 tokens", "", ""]


def test_more_seeded_tokens_than_a_shard_has_are_a_failed_row():
    case = cases.parse("tiny-llama:64:0:0:1048576:steps=4096", BINARY)
    row = measure.run(case, BINARY, [], None)
    assert row["status"] == "failed" and "a shard has at most 2147483647" in row["message"]


def test_one_sweep_at_a_time_writes_a_folder(tmp_path):
    rows = results.Rows(tmp_path / "rows.jsonl")
    with pytest.raises(cases.SweepError, match="another sweep writes it"):
        results.Rows(tmp_path / "rows.jsonl")
    rows.close()
    (tmp_path / "rows.jsonl").write_text('{"case": "a"}\n[1]\n')
    with pytest.raises(cases.SweepError, match="line 1"):
        results.Rows(tmp_path / "rows.jsonl")


def test_a_killed_sweep_leaves_no_case_twice_or_missing(tmp_path):
    path, out = write(tmp_path, PREDICTED), tmp_path / "out"
    words = [sys.executable, ROOT / "bench/sweep", "--binary", BINARY, path, "--out", out]
    words = [str(w) for w in [*words, "--commit", "c"]]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    ends = time.monotonic() + HANGS_S
    rows = out / "rows.jsonl"
    while not (rows.exists() and rows.stat().st_size) and time.monotonic() < ends:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=HANGS_S)
    keys = [json.loads(line)["key"] for line in rows.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 6
    planned = json.loads((out / "sweep.json").read_text())
    statuses = [
        r["status"] for r in sorted(planned, key=lambda r: (r["host_gib"], r["device_gib"]))
    ]
    assert statuses == ["infeasible", "ok", "ok"] * 2
    refused = next(r for r in planned if r["status"] == "infeasible")
    assert refused["reason"] == "device 1.01 GiB" and "raise --device-mem" in refused["message"]
    ok = next(r for r in planned if r["status"] == "ok")
    assert ok["machine"].startswith("NVIDIA GeForce RTX 4090; ") and ok["predicted_mfu"] > 0
    assert (out / "tiny-llama-64.png").stat().st_size > 1000


# ---- tables, heatmaps, both modes ----------------------------------------------------------------


def test_measured_cases_on_the_cpu_and_what_is_written_of_them(tmp_path):
    text = """
mode = "measured"
tokens-per-step = 256
steps = 3
warm-up = 1
options = { backend = "cpu", val-tokens = 512, val-every = 2 }
[[grid]]
model = "tiny-llama"
seq-len = 64
host-gib = 2
device-gib = [0.0001, 0.008]
[[case]]
model = "tiny-llama"
seq-len = 64
host-gib = 2
device-gib = 0.008
options = { backend = "cpu", z-loss = -1 }
"""
    out = tmp_path / "out"
    done = sweep(write(tmp_path, text), "--out", out, "--keep", tmp_path / "kept", check=False)
    assert done.returncode == 1, done.stderr  # a case failed, and the sweep went on
    small, fits, failed = rows = json.loads((out / "sweep.json").read_text())
    assert small["status"] == "infeasible" and small["reason"] == "device 2.0 MiB"
    assert failed["status"] == "failed" and "--z-loss" in failed["message"]
    assert fits["status"] == "ok" and fits["steps_timed"] == 2 and len(fits["loss"]) == 3
    kept = tmp_path / "kept" / fits["key"]
    steps = [json.loads(line) for line in (kept / "metrics.jsonl").read_text().splitlines()]
    step_s = (steps[1]["step_s"] + steps[2]["step_s"]) / 2
    assert fits["step_s"] == pytest.approx(step_s)
    assert fits["tokens_per_s"] == pytest.approx(256 / step_s)
    assert fits["predicted_step_s"] == steps[0]["predicted_step_s"]
    assert fits["mfu"] == pytest.approx((steps[1]["mfu"] + steps[2]["mfu"]) / 2)
    flops = fits["plan"]["model_flops"]
    assert fits["tflops"] == pytest.approx(flops / step_s * 1e-12)
    assert fits["predicted_mfu"] * fits["predicted_step_s"] == pytest.approx(
        steps[2]["mfu"] * steps[2]["step_s"]
    )
    val = [s for s in steps if s.get("val_s")]
    assert [(s["step"], s["val_tokens"]) for s in val] == [(1, 512), (2, 512)]
    val_s = (val[0]["val_s"] + val[1]["val_s"]) / 2
    assert fits["val_s"] == pytest.approx(val_s)
    assert fits["val_tokens_per_s"] == pytest.approx(512 / val_s)
    assert fits["val_share"] == pytest.approx(val_s / (val_s + 2 * step_s))
    assert 0 < fits["device_peak_gib"] <= 0.008 and fits["host_peak_gib"] > 0
    with open(out / "sweep.csv") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == results.COLUMNS and len(table) == 3
    for line, row in zip(table, rows):
        for name, text in line.items():
            value = row.get(name)
            if isinstance(value, float):
                assert float(text) == value
            elif isinstance(value, dict):
                assert json.loads(text) == value
            else:
                assert text == ("" if value is None else str(value)), name


def row(host, device, **more):
    return {
        "mode": "predicted", "status": "ok", "model": "m", "seq_len": 64, "tokens_per_step": 512,
        "recipe": "bf16", "gpus": 1, "options": "", "machine": "A GPU, 1; A CPU", "host_gib": host,
        "device_gib": device, **more,
    }  # fmt: skip


def figures(n, prefix):
    values = {"tokens_per_s": 1000 * n, "tflops": n / 3, "mfu": n / 100, "hfu": n / 50}
    return {prefix + name: value for name, value in values.items()}


def test_a_heatmap_has_measured_beside_predicted_on_one_scale(tmp_path, monkeypatch):
    import matplotlib.pyplot

    drawn = []
    monkeypatch.setattr(matplotlib.pyplot, "close", drawn.append)
    rows = [
        row(2, 8, mode="measured", **figures(3, ""), **figures(4, "predicted_")),
        row(2, 4, mode="measured", status="infeasible", reason="device 5.1 GiB"),
        row(1, 8, mode="measured", status="failed", reason="exit 1"),
        row(1, 4, **figures(2, "predicted_")),
        row(1, 4, seq_len=128, **figures(2, "predicted_")),
    ]
    (path,) = pictures.write(rows, tmp_path)  # the other length has one cell: no heatmap
    assert path.name == "m-64.png" and path.stat().st_size > 1000
    panels = [a for a in drawn[0].axes if a.get_title()]
    titles = [a.get_title() for a in panels]
    assert titles[:2] == ["tokens / s, measured", "tokens / s, predicted"] and len(titles) == 8
    texts = [[t.get_text() for t in a.texts] for a in panels]  # the least host memory first
    assert texts[0] == ["", "failed", "device\n5.1 GiB", "3,000"]
    assert texts[1] == ["2,000", "failed", "device\n5.1 GiB", "4,000"]
    assert texts[2][3] == "1" and texts[4][3] == "3.0" and texts[7][3] == "8.0"
    limits = [a.images[0].get_clim() for a in panels]
    assert limits[0] == limits[1] == (2000, 4000) and limits[6] == limits[7] == (4, 8)
    assert [t.get_text() for t in panels[0].get_xticklabels()] == ["4", "8"]
    assert [t.get_text() for t in panels[0].get_yticklabels()] == ["1", "2"]
    assert "A GPU: m, 64 tokens a sequence" in drawn[0].get_suptitle()


def test_pictures_of_one_sweep_have_names_of_their_own():
    keys = [("A", "m", 64, t, "bf16", 1, o) for t, o in ((512, ""), (1024, ""), (512, "a=b/c"))]
    assert pictures.names(keys) == ["m-64-512", "m-64-1024", "m-64-512-a-b-c"]
    assert pictures.names(keys[:1]) == ["m-64"]


@pytest.mark.parametrize(
    "message,reason",
    [
        ("needs 3.5 GiB of device memory, 2.0 GiB given: raise", "device 3.5 GiB"),
        ("needs 61.3 GiB of host memory, 500.0 MiB given: raise", "host 61.3 GiB"),
        ("no plan fits: the nearest needs 1.0 GiB of device memory and 1.1 GiB of host memory, of",
         "device 1.0 GiB, host 1.1 GiB"),
        ("no plan fits: the nearest needs 1.0 GiB of device memory on each of 4 devices and 1.1 GiB "
         "of host memory on each of 2 hosts, of", "device 1.0 GiB, host 1.1 GiB"),
        ("90.0 GiB of host memory given, the machine has 20.0 GiB, with which 5.0 GiB of device "
         "memory are needed", "machine's host memory"),
        ("--lr 9 is too much", ""),
    ],
)  # fmt: skip
def test_a_refusal_has_a_short_form(message, reason):
    assert predict.short_reason(message) == reason


def test_rows_of_the_older_program_are_read():
    rows = results.read(ROOT / "bench/results/h200-8b.jsonl")
    assert len(rows) > 70 and all(r["mode"] == "measured" and r["model"] == "8b" for r in rows)
    line = next(csv.DictReader(results.csv_text(rows).splitlines()))
    assert (line["seq_len"], line["device_gib"], line["status"]) == ("8192", "24.0", "ok")
    assert float(line["tokens_per_s"]) == rows[0]["tokens_per_s"]
    assert float(line["predicted_tokens_per_s"]) == pytest.approx(
        131072 / rows[0]["predicted_step_s"]
    )
    masters = [r for r in rows if r["recipe"] == "fp32-master"]
    assert masters and "recipe" not in masters[0]["options"]


def test_the_gpus_figures_are_of_the_steps_that_count():
    from machine import gpu_columns

    steps = [{"step_s": 2.0, "gpu_clock_mhz": c, "gpu_power_w": 9.0, "gpu_temperature_c": t,
              "gpu_energy_j": 1000.0} for c, t in ((1400.0, 60.0), (1500.0, 61.0))]  # fmt: skip
    assert gpu_columns(steps) == {
        "gpu_clock_mhz": 1450, "gpu_power_w": 500, "gpu_temperature_c": 61,
    }  # fmt: skip
    assert gpu_columns([{"step_s": 2.0}]) == {}
    of_two = gpu_columns([step | {"n_gpus_read": 2} for step in steps])
    assert of_two["n_gpus_read"] == 2 and of_two["gpu_power_w"] == 500


def test_seeded_tokens_are_a_shard(tmp_path):
    measure.random_shard(tmp_path / "r.bin", 300_000, 512)
    done = subprocess.run(
        [BINARY, "info", "--data", tmp_path / "r.bin", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "300000" in done.stdout, done.stderr
