"""Data that is mixed by weight: `--data A:0.7,B:0.3`."""

import json
import locale
import shutil
import subprocess

import numpy as np
import pytest
from conftest import BUILD, write_shard
from penstock import Dataset, FormatError, InputOutputError, InvalidError
from penstock._lib import lib

SEQ = 8
SIZES = {"a": 40, "b": 25, "c": 3}  # sequences


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sequence i of part k begins with the token 100 k + i. Part a has two shards."""
    where = tmp_path_factory.mktemp("mix")
    for k, (name, n) in enumerate(SIZES.items()):
        (where / name).mkdir()
        tokens = np.repeat(100 * k + np.arange(n + 1), SEQ)[: n * SEQ + 1]
        cut = 10 * SEQ if name == "a" else 0
        write_shard(where / name / "1.bin", tokens[cut:])
        if cut:
            write_shard(where / name / "0.bin", tokens[: cut + 1])
    return where


def open_mix(folder, mix):
    words = ",".join(f"{folder / name}:{weight}" for name, weight in mix.items())
    return Dataset(words, 1000)


def read_in_order(dataset, n, seed=1, shuffle=True, first=0):
    """(part, sequence of the part) at positions first to first + n."""
    out = []
    for pos in range(first, first + n):
        i = lib.ps_dataset_at(dataset._handle.ptr, SEQ, pos, seed, shuffle)
        out.append(divmod(int(dataset.read(SEQ, i)[0][0]), 100))
    return out


MIXES = [
    {"a": 0.7, "b": 0.3},
    {"a": 1, "b": 1, "c": 2},
    {"a": 0.999, "c": 0.001},
    {"b": 1e-9, "a": 5, "c": 3},
    {"c": 7},
]


@pytest.mark.parametrize("mix", MIXES, ids=lambda m: "-".join(m))
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_part_has_its_share_at_every_position(folder, mix, shuffle):
    """To one sequence for each part before it."""
    order = read_in_order(open_mix(folder, mix), 400, shuffle=shuffle)
    total, names = sum(mix.values()), list(SIZES)
    for rank, (name, weight) in enumerate(mix.items()):
        mine = np.cumsum([part == names.index(name) for part, _ in order])
        wanted = np.arange(1, 401) * weight / total
        assert np.abs(mine - wanted).max() <= min(rank, len(mix) - 2) + 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_part_is_read_once_an_epoch_of_its_own(folder, shuffle):
    order = read_in_order(open_mix(folder, {"a": 1, "b": 1, "c": 2}), 400, shuffle=shuffle)
    for k, size in enumerate(SIZES.values()):
        mine = [i for part, i in order if part == k]
        epochs = [mine[i : i + size] for i in range(0, len(mine) - size + 1, size)]
        assert len(epochs) >= 2 and all(sorted(e) == [*range(size)] for e in epochs)
        assert (epochs[0] == [*range(size)]) == (not shuffle)


def test_the_order_follows_the_seed_and_needs_no_history(folder):
    dataset = open_mix(folder, {"a": 0.6, "b": 0.4})
    order = read_in_order(dataset, 200)
    assert order == read_in_order(dataset, 150) + read_in_order(dataset, 50, first=150)
    others = [read_in_order(dataset, 200, seed=seed) for seed in range(2, 8)]
    assert order not in others
    assert len({tuple(part for part, _ in other) for other in others}) > 1
    far = 10**15
    assert len(set(read_in_order(dataset, 100, first=far))) > 50


def test_data_without_weights_is_read_as_before(folder):
    dataset = Dataset([folder / "a", folder / "b"], 1000)
    for pos in range(100):
        at = lib.ps_dataset_at(dataset._handle.ptr, SEQ, pos, 3, 1)
        assert at == lib.ps_dataset_order(65, pos, 3, 1)
    assert lib.ps_dataset_mix(dataset._handle.ptr) == 0


def test_a_path_with_a_colon_is_a_path_where_it_exists(folder, tmp_path):
    shard = write_shard(tmp_path / "a:0.5", np.arange(99))
    assert Dataset(shard, 1000).n_tokens == 99


def test_weights_have_a_point_in_every_locale(folder, tmp_path, monkeypatch):
    """A program that calls locale.setlocale() changes what C's strtod() reads."""
    if not shutil.which("localedef"):
        pytest.skip("no localedef")
    source = tmp_path / "comma"
    source.write_text(
        'LC_NUMERIC\ndecimal_point ","\nthousands_sep ""\ngrouping -1\nEND LC_NUMERIC\n'
    )
    command = ["localedef", "--force", "--quiet", "-i", source, tmp_path / "xx_XX"]
    subprocess.run(command, check=False, capture_output=True)  # its code tells of warnings
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    before = locale.setlocale(locale.LC_NUMERIC)
    locale.setlocale(locale.LC_NUMERIC, "xx_XX")
    try:
        assert locale.localeconv()["decimal_point"] == ","
        mixed = open_mix(folder, MIXES[0])
    finally:
        locale.setlocale(locale.LC_NUMERIC, before)
    assert read_in_order(mixed, 50) == read_in_order(open_mix(folder, MIXES[0]), 50)


REFUSED = {
    "{a}:0.7,{b}": "must be a path, a colon and a weight above 0",
    "{a}:0.7,{b}:0": "must be a path, a colon and a weight above 0",
    "{a}:0.7,{b}:-1": "must be a path, a colon and a weight above 0",
    "{a}:0.7,:3": "must be a path, a colon and a weight above 0",
    ",{a}:1": "must be a path, a colon and a weight above 0",
    "{a}:1e99": "must be a path, a colon and a weight above 0",
    "{a}:0.7,": "must be a path, a colon and a weight above 0",
    "{a}:0.7,nowhere:1": "nowhere: cannot be opened",
    "{a}:much": "cannot be opened",
    "{a}:": "cannot be opened",
    ",": "cannot be opened",
}


@pytest.mark.parametrize("text", REFUSED)
def test_wrong_weights_are_refused(folder, text):
    words = text.format(a=folder / "a", b=folder / "b")
    with pytest.raises((InvalidError, InputOutputError, FormatError), match=REFUSED[text]):
        Dataset(words, 1000)


def test_all_data_has_weights_or_none(folder):
    with pytest.raises(InvalidError, match="b has no weight, but .*a has one"):
        Dataset([f"{folder / 'a'}:1", folder / "b"], 1000)
    with pytest.raises(InvalidError, match="a has no weight, but .*b has one"):
        Dataset([folder / "a", f"{folder / 'b'}:1"], 1000)


# ---- the command ---------------------------------------------------------------------------------


def penstock(*words):
    done = subprocess.run(
        [BUILD / "bin/penstock", *map(str, words)], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_training_reports_the_shares_and_resumes_the_mix(tiny_model, tmp_path):
    parts = [
        write_shard(tmp_path / f"{c}.bin", np.random.default_rng(k).integers(0, 200, 700 - 300 * k))
        for k, c in enumerate("ab")
    ]
    words = ["train", "--model", tiny_model, "--seq-len", 16, "--tokens-per-step", 64, "--shuffle"]
    words += ["--recipe", "fp32", "--device-mem", "16MiB", "--lr-schedule", "constant"]
    mix = f"{parts[0]}:3,{parts[1]}:1"
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    code, _, shown = penstock(*words, "--data", mix, "--steps", 6, "--run-dir", whole)
    assert code == 0, shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert f"data 75.0% {parts[0]}, 0.42 epochs" in lines  # 18 of 43 sequences
    assert f"25.0% {parts[1]}, 0.25 epochs" in lines  # 6 of 24
    few = [*words, "--data", parts[1], "--steps", 9, "--run-dir", tmp_path / "few"]
    few[few.index("--tokens-per-step") + 1] = 512  # 24 sequences are less than a step of 32
    lines = [" ".join(line.split()) for line in penstock(*few)[2].splitlines()]
    assert "data 400 tokens, 0.75 steps an epoch, 12 epochs in the run" in lines
    more = ["--checkpoint-every", 3, "--run-dir", halves]
    assert penstock(*words, *more, "--data", mix, "--steps", 3, "--quiet")[0] == 0
    resumed = [*words, *more, "--steps", 6, "--resume", "latest", "--quiet"]
    code, _, error = penstock(*resumed, "--data", f"{parts[0]}:1,{parts[1]}:3")
    assert code == 2 and error.count("\n") == 1 and "weights of the data" in error
    assert penstock(*resumed, "--data", mix)[0] == 0
    assert losses(halves) == losses(whole)
    code, shown, _ = penstock("info", "--data", mix, "--seq-len", 16)
    assert code == 0 and "75.0%" in shown


def test_validation_splits_are_mixed_by_the_same_weights(tiny_model, tmp_path):
    for k, name in enumerate("ab"):
        (tmp_path / name / "val").mkdir(parents=True)
        (tmp_path / name / "dataset.json").write_text("{}")
        for split in ("train-00000.bin", "val/val-00000.bin"):
            write_shard(tmp_path / name / split, np.full(200, 7 + 90 * k))
    words = ["train", "--model", tiny_model, "--seq-len", 16, "--tokens-per-step", 64]
    words += ["--recipe", "fp32", "--steps", 1, "--val-tokens", 128, "--lr", 0]
    words += ["--run-dir", tmp_path / "run", "--force", "--json", "--data"]
    parts = {name: f"{tmp_path / name}:{w}" for name, w in (("a", 3), ("b", 1))}
    loss = {}
    for mix in ("a", "b", "a,b"):
        code, out, error = penstock(*words, ",".join(parts[n] for n in mix.split(",")))
        assert code == 0, error
        loss[mix] = json.loads(out)["val_loss"]
    assert loss["a"] != loss["b"]
    assert loss["a,b"] == pytest.approx(0.75 * loss["a"] + 0.25 * loss["b"], rel=1e-6)


def test_a_part_without_a_sequence_is_refused(tiny_model, tmp_path):
    short = write_shard(tmp_path / "s.bin", np.arange(5))
    long = write_shard(tmp_path / "l.bin", np.arange(400) % 200)
    words = ["train", "--model", tiny_model, "--seq-len", 16, "--data", f"{long}:1,{short}:1"]
    code, _, error = penstock(*words)
    assert code == 2 and f"{short}: has no shard with the 17 tokens" in error


def test_a_plan_for_data_says_which_part_of_its_tokens_are_targets(tiny_model, tmp_path):
    from penstock.shards import BEGINS_DOCUMENT, IS_TARGET, write_mask

    plain = write_shard(tmp_path / "p.bin", np.arange(300) % 200)
    masked = write_shard(tmp_path / "m.bin", np.arange(100) % 200)
    at = np.arange(100)
    write_mask(masked, np.where(at % 4 == 0, BEGINS_DOCUMENT, IS_TARGET))  # 75 targets
    words = ["plan", "--model", tiny_model, "--seq-len", 16, "--recipe", "fp32"]

    def shown(*data):
        code, out, error = penstock(*words, "--data", *data)
        assert code == 0, error
        line = next(x for x in out.splitlines() if x.startswith("data  "))
        return " ".join(line.split()).partition(" are targets")[0]

    assert shown(masked) == "data 75.0% of the tokens"
    assert shown(plain) == "data 100.0% of the tokens"
    assert shown(plain, masked) == "data 93.8% of the tokens"
    code, _, error = penstock(*words, "--data", tmp_path / "nowhere")
    assert code == 2 and error.count("\n") == 1 and "nowhere" in error
