"""The reader of a run's TOML file (native/cli/toml.c) against Python's tomllib: random documents,
mutated documents, and what the subset leaves out."""

import ctypes
import re

import io_native as ps
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from penstock.run_file import tomllib

CAP = 1 << 20


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """read(bytes) -> {table: {key: value}}, or ValueError with the message."""
    lib = ps.build_shim(
        ps.ROOT / "tests/native/toml_echo.c", tmp_path_factory.mktemp("shim") / "toml_echo.so"
    )
    lib.t_toml_echo.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]

    def call(data):
        out = ctypes.create_string_buffer(CAP)
        code = lib.t_toml_echo(data, len(data), out, CAP)
        text = out.value.decode("utf-8", "replace" if code else "strict")
        if code:
            assert re.match(r"\d+: .", text) and "\n" not in text, text
            raise ValueError(text)
        run = {}
        for item in text.split("\x1e")[1:]:
            table, key, kind, _line, *values = item.split("\x1f")
            values = [convert(v, kind[1]) for v in values]
            run.setdefault(table, {})[key] = values if kind[0] == "1" else values[0]
        return run

    return call


def convert(text, kind):
    if kind == "0":
        return text
    if kind == "2":
        return {"true": True, "false": False}[text]
    return float(text) if set(".eE") & set(text) else int(text)


def same(ours, theirs):
    """Equal values of equal types; tomllib alone keeps tables without keys."""
    assert repr(ours) == repr({t: keys for t, keys in theirs.items() if keys})


# ---- random documents ----------------------------------------------------------------------------

names = st.text("abcdefgXYZ0123456789-_", min_size=1, max_size=12)
characters = st.characters(
    exclude_categories=["Cs"], exclude_characters=[chr(c) for c in (*range(32), 127) if c != 9]
)
spaces = st.sampled_from(["", " ", "\t", "  "])
comments = st.one_of(st.just(""), st.text(characters, max_size=8).map(lambda t: "#" + t))
ends = st.tuples(spaces, comments, st.sampled_from(["\n", "\r\n"])).map("".join)
escapes = st.sampled_from(
    ["\\b", "\\t", "\\n", "\\f", "\\r", '\\"', "\\\\", "\\u00e9", "\\uFFFD", "\\U0001F600"]
)
# the echo of the test separates texts by these two
plain = characters.filter(lambda c: c not in '\x1e\x1f"\\')
strings = st.one_of(
    st.lists(st.one_of(plain, escapes), max_size=8).map(lambda cs: '"' + "".join(cs) + '"'),
    st.text(characters.filter(lambda c: c not in "\x1e\x1f'"), max_size=8).map("'{}'".format),
)
digits = st.lists(st.text("0123456789", min_size=1, max_size=3), min_size=1, max_size=3).map(
    "_".join
)
integers = digits.map(lambda d: d.lstrip("0_") or "0")
signs = st.sampled_from(["", "+", "-"])
exponents = st.tuples(st.sampled_from("eE"), signs, digits.filter(lambda d: len(d) < 3)).map(
    "".join
)
fractions = digits.map(".{}".format)
numbers = st.one_of(
    st.tuples(signs, integers).map("".join),
    st.tuples(signs, integers, fractions).map("".join),
    st.tuples(signs, integers, exponents).map("".join),
    st.tuples(signs, integers, fractions, exponents).map("".join),
)
booleans = st.sampled_from(["true", "false"])
gaps = st.one_of(spaces, ends)


def arrays(values):
    return st.tuples(
        st.lists(st.tuples(gaps, values, gaps).map("".join), max_size=4), st.booleans(), gaps
    ).map(lambda a: "[" + ",".join(a[0]) + ("," if a[0] and a[1] else "") + a[2] + "]")


values = st.one_of(strings, numbers, booleans, arrays(strings), arrays(numbers), arrays(booleans))
items = st.tuples(names, spaces, st.just("="), spaces, values, ends)


@st.composite
def documents(draw):
    text = "".join(draw(st.lists(ends, max_size=2)))
    for table in draw(st.lists(names, max_size=3, unique=True)):
        text += f"[{draw(spaces)}{table}{draw(spaces)}]" + draw(ends)
        for item in draw(st.lists(items, max_size=4, unique_by=lambda item: item[0])):
            text += draw(spaces) + "".join(item)
    return text


common = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@common
@given(documents())
def test_a_document_of_the_subset_has_the_values_that_tomllib_reads(read, text):
    same(read(text.encode()), tomllib.loads(text))


@common
@given(documents(), st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=2)), max_size=3))
@example("[a]\nb = 1\n", [(8, b"\r")])
@example("[a]\nb = '''", [])
def test_what_is_read_of_a_mutated_document_is_what_tomllib_reads(read, text, changes):
    data = bytearray(text.encode())
    for at, new in changes:
        data[at : at + 1] = new
    try:
        ours = read(bytes(data))
    except ValueError:
        return
    if b"\x1e" in data or b"\x1f" in data:
        return
    same(ours, tomllib.loads(data.decode()))


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text,message",
    [
        ("a = 1", "1: the key a stands before any [table]"),
        ("[a]\nb = 1\nb = 2", "3: the key b stands in [a] for the second time"),
        ("[a]\n[b]\n[a]", "3: the table [a] stands here for the second time"),
        ("[a]\nb.c = 1", "2: the key is dotted"),
        ("[a.b]", "1: the table's name is dotted"),
        ("[[a]]", "1: [[...]] is an array of tables"),
        ("[a]\n'b' = 1", "2: the key is missing or is no bare name"),
        ("[a]\nb", "2: the key b has no = after it"),
        ("[a]\nb =", "2: the value is no string"),
        ("[a]\nb = {c = 1}", "2: the value of b is an inline table"),
        ("[a]\nb = [[1]]", "2: an array has an array or a table in it"),
        ("[a]\nb = [1, 'x']", "2: the array has values of two kinds"),
        ("[a]\nb = [1 2]", "2: the array has neither , nor ]"),
        ("[a]\nb = [1,", "2: the value is no string"),
        ("[a]\nb = 1979-05-27", "2: the value is no string"),
        ("[a]\nb = 0x10", "2: the value is no string"),
        ("[a]\nb = inf", "2: the value is no string"),
        ("[a]\nb = 012", "2: the value is no string"),
        ("[a]\nb = 1__0", "2: the value is no string"),
        ("[a]\nb = 1.", "2: the value is no string"),
        ("[a]\nb = .5", "2: the value is no string"),
        ("[a]\nb = truex", "2: the value is no string"),
        ('[a]\nb = """x"""', '2: """ begins a string of several lines'),
        ('[a]\nb = "x', '2: the string has no " at its end'),
        ('[a]\nb = "\\x"', "2: a \\ in a string is followed by none of"),
        ('[a]\nb = "\\u12"', "2: \\u needs 4 hexadecimal digits"),
        ('[a]\nb = "\\ud800"', "2: U+D800 cannot stand in a string"),
        ('[a]\nb = "\\u0000"', "2: U+0000 cannot stand in a string"),
        ("[a]\nb = 1 c = 2", "2: the line goes on after its end"),
        ("[a]\n# \x01", "2: a comment has a control character"),
        ("[a]\nb = '\x01'", "2: the string has a control character"),
        ("\ufeff[a]", "1: the key is missing or is no bare name"),
        (b"[a]\n# \xff", "2: the line is not UTF-8"),
        ("#" * 65537, "1: the text has 65537 bytes: at most 65536 are possible"),
    ],
)
def test_what_is_not_of_the_subset_is_refused_with_its_line(read, text, message):
    with pytest.raises(ValueError) as refusal:
        read(text if isinstance(text, bytes) else text.encode())
    assert str(refusal.value).startswith(message)
