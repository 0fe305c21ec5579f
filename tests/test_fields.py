"""Messages of the library name fields; a shell names them as its users know them."""

import inspect
import pathlib
import re

import pytest
from penstock import Generator, Hardware, Plan, Trainer, _fields
from penstock._lib import check, ffi, lib, struct
from penstock.errors import InvalidError

ROOT = pathlib.Path(__file__).resolve().parent.parent
NATIVE = [
    path
    for path in sorted((ROOT / "native").rglob("*"))
    if path.suffix in (".c", ".h", ".cu", ".cuh") and "cli" not in path.relative_to(ROOT).parts
]
# Messages that have options all the same, and why.
HAVE_OPTIONS = {
    "native/hosts/launcher.c": "a command to type",
    "native/io/safetensors.c": "a command to type, of DeepSpeed",
    "native/model/config.c": "a command to type, of Hugging Face",
    "native/train/labels.c": "a command to type",
    "native/train/hosts.c": "tasks compare the text, whatever shell started each",
}
# Names in messages that are no field of a struct: a group of fields, and arguments of functions.
NO_FIELDS = {"fp8_*", "hardware", "model_dir"}
LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')
OPTION = re.compile(r'(?:^"|[^-\w])--[a-z%"]')


def named_fields():
    """The literals in the library's calls of ps__field()."""
    found = set()
    for path in NATIVE:
        for call in re.findall(r"ps__field\(([^()]*)\)", path.read_text()):
            found.update(re.findall(r'"([a-z0-9_.*]+)"', call))
    return found


def test_no_message_of_the_library_names_an_option():
    found = {
        str(path.relative_to(ROOT))
        for path in NATIVE
        for literal in LITERAL.findall(path.read_text())
        if OPTION.search(literal)
    }
    assert found == HAVE_OPTIONS.keys()
    assert OPTION.search('"--seq-len"') and OPTION.search('"(--%s)"')


def test_what_messages_name_is_a_field_and_an_option():
    """An option that sets the field, or that native/cli/job.c names for it."""
    fields = set()
    for name in ffi.list_types()[0]:
        kind = ffi.typeof(name)
        for field, what in (kind.fields or ()) if kind.kind == "struct" else ():
            fields.add(field)
            if what.type.kind == "struct":
                fields.update(f"{field}.{part}" for part, _ in what.type.fields)
    named = named_fields()
    assert len(named) > 30 and named - NO_FIELDS <= fields
    job = (ROOT / "native/cli/job.c").read_text()
    options = set(re.findall(r"\b(?:plan|train)_config\.([a-z0-9_.]+),", job))
    assert named <= options | set(re.findall(r'\{"([a-z0-9_.*]+)", "--', job))


def test_python_names_its_own_arguments():
    takers = (Plan, Trainer, Generator, Hardware.cached)
    keywords = {name for taker in takers for name in inspect.signature(taker).parameters}
    assert set(_fields.KEYWORDS.values()) <= keywords


def refusal():
    config = struct("ps_train_config")
    lib.ps_train_config_init(config)
    config.lr_kind = lib.PS_LR_KIND_WSD
    with pytest.raises(InvalidError) as refused:
        check(lib.ps_train_config_check(config, lib.PS_OPTIMIZER_SGD))
    return str(refused.value).partition(" needs")[0]


def test_each_shell_has_names_of_its_own():
    assert refusal() == "lr_schedule wsd"
    with _fields.as_options():
        assert refusal() == "--lr-schedule wsd"
    check(lib.ps_field_names_set(ffi.NULL))
    assert refusal() == "lr_kind wsd"
    with _fields.as_options():
        pass
    assert refusal() == "lr_schedule wsd"
    for name in (b"", b"x" * (lib.PS_MAX_FIELD_NAME + 1)):
        field, text = ffi.new("char[]", b"lr_kind"), ffi.new("char[]", name)
        table = ffi.new("ps_field_name[]", [[field, text], [ffi.NULL, ffi.NULL]])
        with pytest.raises(InvalidError, match="the field lr_kind has the name '"):
            check(lib.ps_field_names_set(table))
    assert refusal() == "lr_schedule wsd"
