"""The README and the pages of docs/ against the Makefile, the binary's --help, the sources and the
package; no path of one machine in any tracked file."""

import itertools
import json
import re
import shlex
import subprocess
import sys
import textwrap
import xml.etree.ElementTree
from functools import partial

import penstock
import pytest
from conftest import BUILD, ROOT
from penstock.__main__ import IN_PYTHON, NAMES
from penstock.words import SYNONYMS

sys.path.insert(0, str(ROOT / "bench"))
import pages  # noqa: E402

MAKEFILE = (ROOT / "Makefile").read_text()
PAGES = {p: p.read_text() for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
TEXT = "\n".join(PAGES.values())
SHELL = [
    line.split("#")[0]
    for page, text in PAGES.items()
    if page.name != "tutorial.md"  # tests/test_tutorial.py runs it
    for block in re.findall(r"```sh\n(.*?)```", text, re.S)
    for line in block.replace("\\\n", " ").splitlines()
]
PYTHON = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.S)
CODE = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.S))


def tracked():
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / n for n in names.stdout.split("\0") if n and (ROOT / n).is_file()]


def sources():
    """Text of everything that declares a name which a page may use."""
    return "\n".join(
        p.read_text()
        for folder in ("include", "native", "tests/native", "python/penstock")
        for p in sorted((ROOT / folder).rglob("*"))
        if p.suffix in (".c", ".h", ".cu", ".cuh", ".cpp", ".py")
    )


def test_every_make_target_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.M))
    named = set(re.findall(r"`make ([a-z][a-z-]*)", TEXT)) | {
        w for line in SHELL for w in re.findall(r"^make ([a-z-]+)", line)
    }
    assert {"demo", "test"} <= named <= targets


def test_the_build_page_has_every_target_and_variable_of_the_makefile():
    page = (ROOT / "docs/build.md").read_text()
    table = page.split("## Variables")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    variables = {v for row in rows for v in re.findall(r"`([A-Z_]+)`", row)}
    help_text = "".join(line for line in MAKEFILE.splitlines(True) if line.startswith("#"))
    assert not {v for v in variables if not re.search(rf"\b{v}\b", help_text)}
    assert set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.M)) <= variables
    targets = set(re.findall(r"^([a-z][a-z-]*):.*## ", MAKEFILE, re.M)) - {"all", "help"}
    assert targets <= set(re.findall(r"`make ([a-z-]+)`", page))


def test_every_line_of_a_plan_that_the_page_explains_is_printed():
    table = (ROOT / "docs/plan.md").read_text().split("line by line")[1].split("\n## ")[0]
    labels = re.findall(r"^\| `([a-z ]+)` \|", table, re.M)
    printed = set(
        re.findall(r'"([a-z]+(?: [a-z]+)?) {2,}', (ROOT / "native/plan/plan_text.c").read_text())
    )
    assert len(labels) > 8 and set(labels) == printed


def test_every_field_of_metrics_is_explained_once():
    def written(file, function):
        text = (ROOT / "native/cli" / file).read_text().split(f"{function}(")[1].split("\n}\n")[0]
        return re.findall(r'cli_json_\w+\(&?j, "(\w+)"', text)

    fields = written("metrics.c", "void step_json") + written("metrics.c", "int cli_metrics_write")
    fields += written("metrics.c", "void gpu_json") + written(
        "validation.c", "void cli_val_metrics"
    )
    table = (ROOT / "docs/watch.md").read_text().split("## The fields of")[1].split("\n## ")[0]
    first = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert len(fields) > 25 and sorted(re.findall(r"`(\w+)`", " ".join(first))) == sorted(fields)


def names_elsewhere():
    """The tables of native/cli/aliases.c: names of other trainers, and what they are here."""
    text = re.sub(r'"\s*"', "", (ROOT / "native/cli/aliases.c").read_text())
    tables = text.split("synonyms[] = {")[1].split("answers[] = {")
    rows = [re.findall(r'\{"([^"]+)",\s*"([^"]+)"\}', table) for table in tables]
    return [[(names.split(), says) for names, says in table] for table in rows]


def rows_of(names, says):
    """Rows of a table in Markdown, which go on below one another within 100 columns."""
    listed = ", ".join(f"`--{n}`" for n in names)
    said = re.sub(r"--[\w-]+", lambda m: f"`{m[0]}`", says)
    wrap = partial(textwrap.wrap, break_on_hyphens=False)
    lines = itertools.zip_longest(wrap(listed, 50), wrap(said, 42), fillvalue="")
    return [f"| {a} | {b} |".replace("|  |", "| |") for a, b in lines]


def test_the_names_of_other_trainers_are_those_of_the_program():
    synonyms, answers = names_elsewhere()
    page = (ROOT / "docs/coming-from.md").read_text().split("## Names")[1]
    wanted = [
        [
            "| elsewhere | Penstock |",
            "|---|---|",
            *(row for n, o in synonyms for row in rows_of(n, "--" + o)),
        ],
        [
            "| elsewhere | what to do |",
            "|---|---|",
            *(row for n, s in answers for row in rows_of(n, s)),
        ],
    ]
    for table in wanted:
        assert "\n".join(table) in page, "docs/coming-from.md wants:\n" + "\n".join(table)
    names = [n for n, _ in synonyms + answers for n in n]
    assert len(names) > 100 and len({*names}) == len(names)
    assert not [n for n in names if "_" in n]
    for option, known in SYNONYMS.items():
        assert {*known} == {f"--{n}" for ns, o in synonyms if "--" + o == option for n in ns}


def test_every_option_that_a_page_names_is_in_a_help_text():
    texts = "".join(
        subprocess.run(
            [BUILD / "bin/penstock", c, "--help-all"], capture_output=True, text=True, check=True
        ).stdout
        for c in ("train", "plan", "demo", "info", "profile", "generate")
    )
    texts += "".join(
        (ROOT / f"python/penstock/{name}.py").read_text()
        for name in (
            "command",
            "data",
            "inputs",
            "export",
            "import_gguf",
            "compare",
            "generate",
            "trace",
            "watch",
            "report",
            "score",
            "embed",
            "recipe_table",
            "log",
        )
    )
    texts += "".join(p.read_text() for p in (ROOT / "bench").rglob("*.py"))
    texts += "".join(f"--{n}" for table in names_elsewhere() for names, _ in table for n in names)
    # torchrun's and srun's own
    texts += "--nnodes --node-rank --nproc-per-node --master-addr --no-python"
    texts += " --ntasks-per-node --ntasks"
    texts += (
        " --local-dir --exclude --port --enable-lora --lora-modules"  # hf's, llama.cpp's, vLLM's
    )
    texts += " --ulimit --user --rm --gpus --build-arg --tag --version"  # Docker's, nvcc's
    texts += " --cflags --libs"  # pkg-config's
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", TEXT))
    assert named and not {o for o in named if f"--{o}" not in texts}


def test_every_command_of_a_page_exists():
    for line in SHELL:
        for command in line.split("&&"):
            words = [w for w in shlex.split(command) if "=" not in w]
            if not words or words[0] in ("make", "mkdir", "."):
                continue
            if words[0] == "penstock" and words[1] in IN_PYTHON:
                name = NAMES.get(words[1], words[1])
                assert (ROOT / f"python/penstock/{name}.py").exists(), line
                continue
            if words[0].endswith("penstock"):
                assert (
                    subprocess.run(
                        [BUILD / "bin/penstock", words[1], "--help"], capture_output=True
                    ).returncode
                    == 0
                ), line
            elif words[0] in ("cp", "gcc", "nvcc"):  # test_install.py runs the compilers
                assert (ROOT / next(w for w in words[1:] if w[0] != "-")).exists(), line
            elif words[0].startswith("./stream_array"):
                continue
            elif words[0] == "docker":
                assert all((ROOT / w).exists() for w in words if w.startswith("python/")), line
            else:
                assert words[0].endswith("python"), line
                script = words[1]
                if script == "-m":
                    module = words[2]
                    if module == "penstock":
                        module = f"penstock.{NAMES.get(words[3], words[3])}"
                    script = f"python/{module.replace('.', '/')}.py"
                assert (ROOT / script).exists(), line


def test_every_file_that_a_page_names_exists():
    """A path is named from the root or from native/, a source file also by its name alone."""
    folders = "models|python|docs|bench|include|tests|native|" + "|".join(
        p.name for p in (ROOT / "native").iterdir() if p.is_dir()
    )
    names = {p.name for f in ("native", "include", "tests") for p in (ROOT / f).rglob("*.*")}
    paths = {w.rstrip("/") for c in CODE for w in c.split() if re.match(rf"(?:{folders})/", w)}
    files = {c for c in CODE if re.fullmatch(r"[\w-]+\.(?:c|h|cu|cuh|cpp)", c)}
    assert len(paths) > 20
    assert not {p for p in paths if not any(ROOT.glob(p)) and not any(ROOT.glob(f"native/{p}"))}
    assert not files - names


def test_every_identifier_that_a_page_names_exists():
    text = sources()
    words = set(re.findall(r"\w+", text))
    named = {w for c in CODE for w in re.findall(r"\b(?:ps|PS)_\w+", c)}
    assert len(named) > 5 and not named - words
    fields = {f for c in CODE for f in re.findall(r"\bps_\w+[.](\w+)", c)}
    assert not fields - words


def test_every_message_that_the_page_explains_is_in_the_sources():
    shell = "".join(p.read_text() for p in (ROOT / "python").glob("*.sh"))
    text = re.sub(r'"\s*"', "", sources()) + shell  # a string over several lines is one
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^- \*\*`([^`]+)`\*\*", page, re.M)
    parts = {p.strip() for m in messages for p in m.split("...") if p.strip()}
    assert len(messages) > 4 and not {p for p in parts if p not in text}


def test_every_link_of_a_page_opens():
    links = [
        (page, to)
        for page, text in PAGES.items()
        for to in re.findall(r"\]\(([^)#\s]+)", text)
        if "://" not in to
    ]
    assert len(links) > 10 and not [
        (page.name, to) for page, to in links if not (page.parent / to).exists()
    ]
    for picture in (ROOT / "docs").glob("*.svg"):
        xml.etree.ElementTree.parse(picture)


def test_every_section_that_a_link_names_exists():
    """By GitHub's names of headings."""
    headings = {
        page: {
            re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-")
            for line in re.findall(r"^#+ (.*)", text, re.M)
        }
        for page, text in PAGES.items()
    }
    links = [
        ((page.parent / to).resolve() if to else page, section)
        for page, text in PAGES.items()
        for to, section in re.findall(r"\]\(([^):#]*)#([\w-]+)\)", text)
    ]
    assert len(links) > 10
    assert [(p.name, s) for p, s in links if p in PAGES and s not in headings[p]] == []


def test_every_page_and_section_that_the_sources_name_exists():
    """As docs/design/training.md, "Metrics", also where a comment breaks the line between them."""
    programs = [p for f in ("tests", "bench", "models", "python") for p in (ROOT / f).rglob("*.py")]
    text = "\n".join([sources(), *(p.read_text() for p in programs)])
    text = re.sub(r"\n[ ]*(?:\*|//|#)?[ ]*", " ", text)
    named = {*re.findall(r'(docs/[\w/-]+\.md)(?:, "([^"]+)")?', text)}
    assert len([s for _, s in named if s]) > 5 and not [
        (page, section)
        for page, section in named
        if not re.search(rf"^#+ .*{section}", PAGES.get(ROOT / page, ""), re.M)
    ]


def test_the_design_has_pages_of_a_few_screens_and_its_overview_names_each():
    overview = ROOT / "docs/design/README.md"
    pages = {p: text for p, text in PAGES.items() if p.parent == overview.parent}
    lines = {p.name: len(text.splitlines()) for p, text in pages.items()}
    assert len(lines) > 10 and not {p: n for p, n in lines.items() if not 60 <= n <= 250}
    named = re.findall(r"^\| \[[\w-]+\.md\]\(([\w-]+\.md)\)", PAGES[overview], re.M)
    assert sorted([*named, overview.name]) == sorted(lines)


def test_no_page_uses_a_word_that_the_glossary_replaced():
    words = (
        r"at home|(?:comes?|goes|sent|sends?) home|lent|fates?|dealer|preamble|(?:low|upp)er turn"
    )
    found = [
        (page.name, w)
        for page, text in PAGES.items()
        for w in re.findall(rf"\b(?:{words})\b", " ".join(text.split()), re.I)
    ]
    assert found == []


def test_prose_fits_100_columns():
    long = [
        f"{page.relative_to(ROOT)}:{number}: {len(line)} columns"
        for page, text in PAGES.items()
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > 100
    ]
    assert long == []


def test_every_link_of_the_bench_log_opens_and_every_entry_is_indexed():
    index, entries = ROOT / "bench/LOG.md", sorted((ROOT / "bench/log").glob("*.md"))
    target = re.compile(r"(?:\]\(|^\[[\w-]+\]: )([\w./-]+\.md)", re.M)
    others = [ROOT / "bench/README.md", ROOT / "bench/ROWS.md"]
    links = {
        f: {(f.parent / to).resolve() for to in target.findall(f.read_text())}
        for f in [index, *entries, *others]
    }
    assert entries and not [
        (f.name, p.name) for f, to in links.items() for p in to if not p.exists()
    ]
    assert not [f.name for f in entries if f.resolve() not in links[index]]
    names = set(re.findall(r"^\[([\w-]+)\]: ", index.read_text(), re.M))
    assert names == set(re.findall(r"\| \[([\w-]+)\] \|$", index.read_text(), re.M))


def test_tables_of_the_pages_are_those_that_bench_pages_writes(tmp_path, monkeypatch):
    assert [page.name for page in pages.differing()] == [], "run python3 bench/pages.py"
    for name in pages.PAGES:
        page = tmp_path / name
        page.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text()
        assert "<!-- rows: " in text
        page.write_text(re.sub(r"(<!-- rows: \S+ -->\n.*?\d)", r"\g<1>1", text, flags=re.S))
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert [str(p.relative_to(tmp_path)) for p in pages.differing()] == list(pages.PAGES)
    assert len(PAGES[ROOT / "docs/performance.md"].splitlines()) <= 150


def test_every_measured_row_has_a_machine_and_what_was_printed_its_entry(tmp_path):
    machines = [r.get("name", r.get("kind")) for r in pages.lines(pages.RESULTS / "machines.jsonl")]
    rows = pages.measured()
    assert len(rows) > 200 and {r["machine_name"] for r in rows} <= {*machines}
    printed = pages.lines(pages.RESULTS / "printed.jsonl")
    entries = {r["source"]: (ROOT / r["source"]).read_text() for r in printed}
    assert not [r for r in printed if f"{r['tokens_per_s']:,}" not in entries[r["source"]]]
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1, "machine_name": "h200-1"}\n{"a":  2}\n')
    assert pages.name_rows("h200-2", file) == 1
    assert file.read_text().splitlines()[0] == '{"a": 1, "machine_name": "h200-1"}'
    assert json.loads(file.read_text().splitlines()[1]) == {"a": 2, "machine_name": "h200-2"}


def test_the_engine_example_runs_as_it_stands(capsys):
    exec(PYTHON[1], {})
    assert capsys.readouterr().out.startswith("10.0 ")


def test_the_training_example_runs(tiny_model, tiny_shard, tmp_path, capsys):
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
