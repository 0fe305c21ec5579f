"""The README against the Makefile, the binary's --help and the package; no path of one machine in
any tracked file."""

import re
import shlex
import subprocess

import penstock
import pytest
from conftest import BUILD, ROOT

README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
SHELL = [
    line.split("#")[0]
    for block in re.findall(r"```sh\n(.*?)```", README, re.S)
    for line in block.splitlines()
]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


def tracked():
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / n for n in names.stdout.split("\0") if n and (ROOT / n).is_file()]


def test_every_make_target_the_readme_names_exists():
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.M))
    named = set(re.findall(r"`make ([a-z][a-z-]*)", README)) | {
        w for line in SHELL for w in re.findall(r"^make ([a-z-]+)", line)
    }
    assert {"demo", "test"} <= named <= targets


def test_every_option_the_readme_names_is_in_a_help_text():
    texts = "".join(
        subprocess.run(
            [BUILD / "bin/penstock", c, "--help"], capture_output=True, text=True, check=True
        ).stdout
        for c in ("train", "plan", "demo", "info", "profile")
    )
    texts += "".join(
        (ROOT / f).read_text() for f in ("python/penstock/data.py", "python/penstock/trace.py")
    )
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", README))
    assert named and not {o for o in named if f"--{o}" not in texts}


def test_every_command_of_the_readme_exists():
    for line in SHELL:
        words = [w for w in shlex.split(line) if "=" not in w]
        if not words or words[0] == "make":
            continue
        if words[0].endswith("bin/penstock"):
            assert (
                subprocess.run(
                    [BUILD / "bin/penstock", words[1], "--help"], capture_output=True
                ).returncode
                == 0
            ), line
        else:
            assert words[0].endswith("bin/python"), line
            script = (
                words[1] if words[1] != "-m" else "python/" + words[2].replace(".", "/") + ".py"
            )
            assert (ROOT / script).exists(), line


def test_every_file_the_readme_names_exists():
    names = re.findall(r"`((?:models|python|docs|bench|include)/[\w./-]+|LICENSE)`?", README)
    assert len(names) > 6 and not [n for n in names if not (ROOT / n.split()[0]).exists()]


def test_every_link_of_the_bench_log_opens_and_every_entry_is_indexed():
    index, entries = ROOT / "bench/LOG.md", sorted((ROOT / "bench/log").glob("*.md"))
    target = re.compile(r"(?:\]\(|^\[[\w-]+\]: )([\w./-]+\.md)", re.M)
    links = {
        f: {(f.parent / to).resolve() for to in target.findall(f.read_text())}
        for f in [index, *entries]
    }
    assert entries and not [
        (f.name, p.name) for f, to in links.items() for p in to if not p.exists()
    ]
    assert not [f.name for f in entries if f.resolve() not in links[index]]
    names = set(re.findall(r"^\[([\w-]+)\]: ", index.read_text(), re.M))
    assert names == set(re.findall(r"\| \[([\w-]+)\] \|$", index.read_text(), re.M))


def test_the_readmes_engine_example_runs_as_it_stands(capsys):
    exec(PYTHON[1], {})
    assert capsys.readouterr().out.startswith("10.0 ")


def test_the_readmes_training_example_runs(tiny_model, tiny_shard, tmp_path, capsys):
    small = (
        PYTHON[0].replace("256", "64").replace("100", "4")
    )  # before the paths go in: pytest-100/ is a path too
    exec(
        small.replace("my_model", str(tiny_model))
        .replace("my_shards", str(tiny_shard))
        .replace("my_trained", str(tmp_path / "out")),
        {},
    )
    assert (tmp_path / "out/model.safetensors").exists() and "3 " in capsys.readouterr().out


def test_the_package_exports_what_it_says():
    assert all(getattr(penstock, name) is not None for name in penstock.__all__)


def test_no_tracked_file_names_a_path_of_one_machine():
    machine = re.compile(rb"(?<![\w.])/(?:work|root|home/\w+|Users/\w+|tmp/\w+)/")
    found = [str(p.relative_to(ROOT)) for p in tracked() if machine.search(p.read_bytes())]
    assert found == []


def test_shell_scripts_are_executable_and_python_compiles():
    for path in tracked():
        if path.suffix == ".py":
            compile(path.read_text(), str(path), "exec")
        if path.suffix == ".sh" or path.name == "run":
            assert path.stat().st_mode & 0o111, path
