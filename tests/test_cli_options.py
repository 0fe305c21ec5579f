"""Options of the binary that would wrap, be passed over or mislead: each is refused or named in one
sentence, and the C API refuses the same."""

import json
import os
import re
import subprocess
import sys

import penstock as ps
import pytest
from conftest import ROOT
from penstock import Hardware, ModelConfig, Plan, Trainer
from test_cli import job, penstock, refused, words  # noqa: F401 (job is a fixture)
from test_docs import names_elsewhere

OF_PYTHON = {"tokenizer", "pack", "targets", "val-fraction", "wandb", "tensorboard"}

# ---- help ----------------------------------------------------------------------------------------

HELPED = ["train", "plan", "eval", "demo", "generate", "info", "profile"]


def help_of(command, option):
    done = penstock(command, option)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def listed(text):
    return re.findall(r"^  --(\S+)", text, re.M)


@pytest.mark.parametrize("command", HELPED)
def test_help_has_every_option_under_a_heading_and_fits_80_columns(command):
    """An option without a heading of its own would stand under "Other"."""
    short, whole = help_of(command, "--help"), help_of(command, "--help-all")
    assert max(map(len, (short + whole).splitlines())) <= 80
    names = re.findall(r"^([A-Z].*):$", whole, re.M)
    assert len(names) > 1 and len({*names}) == len(names) and "Other" not in names
    assert re.search(r"^usage: .*\n( .*\n)*\n(?=[A-Z])", whole)
    assert set(listed(short)) <= set(listed(whole)) and len({*listed(whole)}) == len(listed(whole))
    n = len(listed(whole)) - len(listed(short))
    said = f"\n{n} more options are shown by penstock {command} --help-all\n"
    assert short.endswith(said) == (n > 0) and "more options" not in whole


def test_help_of_train_has_what_most_people_need():
    short = help_of("train", "--help")
    assert re.findall(r"^([A-Z].*):$", short, re.M) == [
        "Model and data",
        "Memory",
        "Batch",
        "Training",
        "Saving and resuming",
        "LoRA",
        "Following a run",
        "Hardware",
        "Output",
        "Help",
    ]
    names = listed(short)
    assert len(names) <= 36 and {"model", "data", "seq-len", "out", "lora-rank"} <= {*names}
    assert not [n for n in names if n.startswith(("fp8-", "hosts-", "chunk", "beta"))]
    assert penstock("train", "-h").stdout == short


def test_every_command_takes_help_all():
    assert penstock("--help-all").stdout == penstock("--help").stdout != ""
    command = [sys.executable, "-m", "penstock", "log", "--help-all"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "--tensorboard" in done.stdout


# ---- names of other trainers ---------------------------------------------------------------------


def test_names_of_other_trainers_and_underscores_are_the_same_options(job, tmp_path):
    """The two runs have the same run.toml."""
    rest = {"--warmup-steps": 1, "--max-skips": 3, "--keep": 4, "--beta2": 0.9}
    theirs = {
        "--model": "--model_name_or_path",
        "--seq-len": "--cutoff_len",
        "--steps": "--training.steps",
        "--lr": "--learning-rate",
        "--max-skips": "--max_skips",
        "--keep": "--save_total_limit",
        "--beta2": "--adam_beta2",
    }
    ours = job | {"--lr": 1e-4} | rest
    assert set(theirs) <= set(ours)
    for run, options in (
        ("1", ours),
        ("2", {theirs.get(n, n): v for n, v in ours.items()}),
    ):
        (tmp_path / run).mkdir()
        done = penstock("train", *words(options), "--out=model", cwd=tmp_path / run)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "1/model/run.toml").read_text() == (
        tmp_path / "2/model/run.toml"
    ).read_text()


def test_every_synonym_is_taken_and_every_other_name_is_answered(tmp_path):
    synonyms, answers = names_elsewhere()
    whole = {*listed(help_of("train", "--help-all"))}
    assert {o for _, o in synonyms} <= whole
    assert not {n for names, _ in synonyms + answers for n in names} & whole
    named = {n for _, says in answers for n in re.findall(r"--([a-z-]+)", says)}
    assert not named - whole - OF_PYTHON
    for names, _ in synonyms:
        for name in (names[0], names[-1].replace("-", "_")):
            refused(penstock("train", f"--{name}=", cwd=tmp_path), rf"^penstock: --{name} ")
    for names, says in answers:
        for name in (names[0], names[-1].replace("-", "_")):
            said = re.escape(f"there is no option --{name}: {says}") + "$"
            refused(penstock("train", f"--{name}", 1, cwd=tmp_path), said)
    refused(penstock("plan", "--learning-rate", 1), "--lr is an option of penstock train, not of")
    refused(penstock("generate", "--bf16"), r"there is no option --bf16 \(--help-all")
    assert list(tmp_path.iterdir()) == []


# ---- numbers that would wrap ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "option,most",
    [
        ("--seq-len", 2**30),
        ("--tokens-per-step", 2**40),
        ("--chunk-tokens", 2**30),
        ("--chunks-per-round", 2**20),
        ("--first-round-chunks", 2**20),
        ("--first-rounds", 2**20),
        ("--head-slice-tokens", 2**30),
        ("--frozen-layers", 4097),
        ("--threads", 4096),
        ("--trace-steps", 10**6),
        ("--gpu", 1023),
        ("--steps", 10**9),
        ("--warmup-steps", 10**9),
        ("--decay-steps", 10**9),
        ("--seed", 2**53),
    ],
)
def test_a_number_past_its_options_limit_is_refused_with_both_limits(job, tmp_path, option, most):
    for value in {most + 1 if most < 2**53 else 2**54, 2**64, 2**64 + 1}:
        refused(
            penstock("train", *words(job | {option: value, "--run-dir": "run"}), cwd=tmp_path),
            rf"{option} {value}: give a whole number from [01] to {most}",
        )
    refused(
        penstock("train", *words(job | {option: -1})),
        rf"{option} -1: give a whole number from [01] to",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option,value",
    [
        ("--lr", "1e31"),
        ("--weight-decay", "1e300"),
        ("--beta1", "-0.1"),
        ("--clip-norm", "inf"),
        ("--peak-tflops", "1e999"),
    ],
)
def test_a_number_past_what_fp32_holds_is_refused(job, option, value):
    refused(
        penstock("train", *words(job | {option: value})),
        rf"{option} {value}: give a number from 0 to 1e\+30",
    )


def test_numbers_that_wrapped_are_numbers(job, tmp_path):
    """4294967296 in 32 bits is 0: a slice of no tokens never ended, a trace of no steps was none;
    4294967297 threads were one."""
    for option, value in (
        ("--head-slice-tokens", 2**32),
        ("--threads", 2**32 + 1),
        ("--trace-steps", 2**32),
    ):
        refused(penstock("train", *words(job | {option: value, "--run-dir": tmp_path})), option)
    for command in (("demo", 1, 1, 2**32, "model"), ("demo", 1, 1, 2**64 + 64, "model")):
        refused(penstock(*command), "SEQLEN '.*': give a whole number from 1 to 1073741824")


@pytest.mark.parametrize(
    "field,value",
    [
        ("head_slice_tokens", 2**32),
        ("threads", 4097),
        ("trace_steps", 10**6 + 1),
        ("chunk_tokens", 2**32 + 64),
        ("chunks_per_round", 2**32),
        ("first_round_chunks", 2**32),
        ("first_rounds", 2**32),
        ("tokens_per_step", 2**41),
        ("seq_len", 2**32),
    ],
)
def test_the_api_refuses_what_the_command_refuses(tiny_model, field, value):
    with pytest.raises(ps.InvalidError, match=rf"(n_)?{field} is {value}: at most \d+ is possible"):
        Plan(
            ModelConfig.read(tiny_model),
            **({"seq_len": 64, "hardware": Hardware.estimate(2, "cpu")} | {field: value}),
        )


def make_plan(folder, **options):
    hardware = Hardware.estimate(2, "cpu")
    return Plan(ModelConfig.read(folder), seq_len=64, hardware=hardware, **options)


@pytest.fixture(scope="module")
def plan(tiny_model):
    return make_plan(tiny_model)


# ---- options that were passed over ---------------------------------------------------------------


PASSED_OVER = [
    ({"document_token": 512}, r"--document-token 512 is past the model's vocabulary of 512"),
    (
        {"document_end_token": 70000},
        r"--document-end-token 70000 is past the model's vocabulary of 512",
    ),
    (
        {"document_token": 1, "document_end_token": 0},
        r"--document-token 1 and --document-end-token 0 exclude each other",
    ),
    ({"lr_schedule": "wsd"}, r"--lr-schedule wsd needs --decay-steps"),
    ({"decay_steps": 2}, r"--decay-steps 2 is for --lr-schedule wsd alone"),
    (
        {"lr_schedule": "cosine", "decay_steps": 2},
        r"--decay-steps 2 is for --lr-schedule wsd alone",
    ),
    (
        {"lr_schedule": "wsd", "decay_steps": 4},
        r"--decay-steps 4 is more than the run's 3 steps",
    ),
    (
        {"lr_schedule": "constant", "min_lr": 1e-5},
        r"--min-lr 1e-05 is never reached by --lr-schedule constant",
    ),
]


@pytest.mark.parametrize("options,pattern", PASSED_OVER)
def test_an_option_that_would_be_passed_over_is_refused_by_the_command_and_by_the_api(
    job, plan, tiny_model, tiny_shard, tmp_path, options, pattern
):
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    refused(penstock("train", *words(job | given | {"--run-dir": "run"}), cwd=tmp_path), pattern)
    assert list(tmp_path.iterdir()) == []
    of_plan = {k: v for k, v in options.items() if k.startswith("document")}
    arguments = re.sub(r"--([a-z-]+)", lambda m: m[1].replace("-", "_"), pattern)
    with pytest.raises(ps.InvalidError, match=arguments):
        plan = make_plan(tiny_model, **of_plan) if of_plan else plan
        Trainer(tiny_model, plan, str(tiny_shard), **({"total_steps": 3} | options))


def test_the_last_token_of_the_vocabulary_may_end_documents(job, tmp_path):
    assert (
        penstock(
            "train", *words(job | {"--document-end-token": 511, "--run-dir": tmp_path})
        ).returncode
        == 0
    )


def test_a_warmup_longer_than_the_run_is_said_once(job, tmp_path):
    done = penstock("train", *words(job | {"--warmup-steps": 20, "--run-dir": tmp_path}))
    assert (
        done.returncode == 0
        and done.stderr.count(
            "--warmup-steps 20 is more than the run's 3 steps: the learning rate reaches only 0.142857 of --lr"
        )
        == 1
    )
    assert (
        penstock(
            "train",
            *words(job | {"--warmup-steps": 20, "--run-dir": tmp_path, "--quiet": None}),
            "--force",
        ).stderr
        == ""
    )


@pytest.mark.parametrize("command", ["train", "plan", "profile"])
def test_gpu_is_refused_where_none_is_used(job, command):
    options = {
        "train": words(job),
        "plan": ["--model", job["--model"], "--seq-len", "64"],
        "profile": [],
    }[command]
    refused(
        penstock(command, *options, "--backend", "cpu", "--gpu", 0),
        "--gpu 0 and --backend cpu exclude each other",
    )
    done = penstock(command, *options, "--gpu", 1, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2 and "--gpu 1: there is no GPU that can be used here" in done.stderr


def test_more_threads_than_cpus_are_lowered_to_them_in_a_sentence(job, tmp_path):
    cpus = len(os.sched_getaffinity(0))
    done = penstock(
        "train", *words(job | {"--backend": "cpu", "--threads": 1000, "--run-dir": tmp_path})
    )
    assert (
        done.returncode == 0
        and f"--threads 1000 is more than the {cpus} CPUs of this machine: {cpus} are used"
        in done.stderr
    )
    assert f", {cpus} threads; no GPU" in done.stderr
    described = ROOT / "tests/golden/hardware-rtx4090.json"
    asked = f"plan --model {job['--model']} --seq-len 64 --hardware {described} --threads 1000"
    done = penstock(*asked.split())
    assert done.returncode == 0 and "--threads 1000 is more than the" in done.stderr


def test_info_counts_tokens_without_a_model(tiny_shard):
    done = penstock("info", "--data", tiny_shard, "--seq-len", 64)
    assert (done.returncode, done.stdout) == (
        0,
        "1 shard, 20000 tokens\n  312 sequences of 64 tokens\n",
    )


def test_what_is_needed_and_what_is_given_read_differently(tiny_model):
    """One byte less than the smallest caps: both figures were "2.0 MiB"."""
    ask = ("plan", "--model", tiny_model, "--seq-len", 64, "--chunk-tokens", 64)
    smallest = json.loads(penstock(*ask, "--smallest", "--json").stdout)
    for name in ("device", "host"):
        done = penstock(*ask, f"--{name}-mem", smallest[f"smallest_{name}_bytes"] - 1)
        needs, given = re.search(
            rf"needs (\S+ \S+) of {name} memory, (\S+ \S+) given", done.stderr
        ).groups()
        assert done.returncode == 2 and needs != given, done.stderr


@pytest.mark.long  # its loops take all CPUs from the tests beside it
def test_profile_says_when_other_work_takes_the_machine(tiny_model, tmp_path):
    """One busy loop a CPU beside it: rates come out at about half."""
    hogs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in os.sched_getaffinity(0)
    ]
    try:
        done = penstock(
            "profile", "--backend", "cpu", "--quick", env={"XDG_CACHE_HOME": str(tmp_path)}
        )
        quiet = penstock(
            *f"plan --quiet --model {tiny_model} --seq-len 64".split(),
            env={"XDG_CACHE_HOME": str(tmp_path / "2")},
        )
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    says = r"other work took (\d+)% of "
    percent = re.search(says + r"this machine's CPUs while it was measured", done.stderr)[1]
    assert done.returncode == 0 and 10 < int(percent) <= 100
    cached, ask = {"XDG_CACHE_HOME": str(tmp_path)}, ("--model", tiny_model, "--seq-len", 64)
    for asked in (("info",), ("plan", *ask)):  # the file keeps it
        assert re.search(says, penstock(*asked, env=cached).stdout)[1] == percent
    for asked in (("info",), ("plan", *ask)):
        hardware = json.loads(penstock(*asked, "--json", env=cached).stdout)["hardware"]
        assert hardware["other_work_percent"] == int(percent)
    assert quiet.stderr == ""
