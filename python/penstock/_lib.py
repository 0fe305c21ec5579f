"""The C library: its place and its declarations.

The declarations (penstock.cdef) are generated from the public headers when the library is built,
and lie beside it, so that both are of one version. The size of every public struct is compared when
the library is loaded.
"""

import contextlib
import os
import sys
from pathlib import Path

from cffi import FFI

from . import _fields
from .errors import OF_STATUS, PenstockError

LIBRARY, DECLARATIONS = "libpenstock.so", "penstock.cdef"


def _library_path() -> Path:
    """The package's own library; else $PENSTOCK_LIB; else the one in $PENSTOCK_BUILD or, by
    default, in the source tree's build/."""
    package = Path(__file__).resolve().parent
    bundled = package / "_native" / LIBRARY
    if bundled.exists():
        return bundled
    if os.environ.get("PENSTOCK_LIB"):
        return Path(os.environ["PENSTOCK_LIB"])
    root = package.parent.parent
    return root / os.environ.get("PENSTOCK_BUILD", "build") / "lib" / LIBRARY


def program_path() -> Path:
    """The program `penstock` that belongs to the library. FileNotFoundError: there is none."""
    library = _library_path()
    # in the package; in a build folder
    places = [library.parent / "penstock", library.parent.parent / "bin" / "penstock"]
    program = next((p for p in places if p.exists()), None)
    if program is None:
        raise FileNotFoundError(
            f"penstock: the program is missing beside {library.parent / LIBRARY}: run `make` in "
            "the source tree, or install the package again"
        )
    return program


def _load():
    path = _library_path()
    declarations = path.with_name(DECLARATIONS)
    for needed in (path, declarations):
        if not needed.exists():
            raise ImportError(
                f"penstock: {needed} is missing: run `make` in the source tree, or set "
                f"PENSTOCK_LIB to {LIBRARY}"
            )
    ffi = FFI()
    ffi.cdef(declarations.read_text())
    lib = ffi.dlopen(str(path))
    names = ffi.list_types()[0]
    # the types of all names at once: cffi parses each text with all names before it
    pointers = ffi.typeof(f"void (*)({', '.join(f'{name} *' for name in names)})").args
    for name, ctype in zip(names, (pointer.item for pointer in pointers), strict=True):
        if ctype.kind != "struct" or not ctype.fields:
            continue
        size = lib.ps_abi_size(name.encode())
        if size != ffi.sizeof(ctype):
            raise ImportError(
                f"penstock: {name} has {size} bytes in {path} and {ffi.sizeof(ctype)} in "
                f"{declarations.name}: "
                "run `make`, which makes both from the same headers"
            )
    return ffi, lib


ffi, lib = _load()


def text(pointer) -> str:
    """A borrowed C string as str."""
    return ffi.string(pointer).decode("utf-8", "replace")


_field_names = []  # the table that the library reads, and its strings


def _name_fields(names: dict[str, str]) -> None:
    """Let messages call the fields `names` by the values."""
    strings = [[ffi.new("char[]", word.encode()) for word in pair] for pair in names.items()]
    table = ffi.new("ps_field_name[]", [*strings, [ffi.NULL, ffi.NULL]])
    check(lib.ps_field_names_set(table))
    _field_names[:] = [table, strings]


def error(status: int) -> PenstockError:
    """The exception for a negative status, with the calling thread's last error."""
    return OF_STATUS[status](text(lib.ps_last_error()) or text(lib.ps_status_name(status)))


def check(status: int) -> None:
    """Raise the exception of a negative status."""
    if status < 0:
        raise error(status)


_fields.loaded(_name_fields)


def encode_path(path) -> bytes:
    """A path as bytes for the library. ValueError: it has a NUL, which would end it in C."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError(f"{path!r} contains a NUL, which no path has")
    return encoded


def struct(name: str, **fields):
    """A new public struct with struct_bytes set where it has one."""
    value = ffi.new(f"{name} *")
    if any(field == "struct_bytes" for field, _ in ffi.typeof(name).fields):
        value.struct_bytes = ffi.sizeof(name)
    for field, content in fields.items():
        setattr(value, field, content)
    return value


def callback(kind: str, function, failures: list, error: int = 0):
    """A C function of type `kind` that calls function(). What it raises goes into failures, and the
    C function then returns `error`."""
    returned = {"error": error} if error else {}  # a function without result takes none
    return ffi.callback(
        kind, function, onerror=lambda _type, exc, _traceback: failures.append(exc), **returned
    )


_shown = [ffi.NULL]  # where the library's messages go, the innermost context's last


@contextlib.contextmanager
def printed_warnings(name: str, quiet: bool = False):
    """A context in which the library's warnings go to stderr, each once, after the command's
    name. After a context within another one they go where they went before."""
    seen = set()

    @ffi.callback("ps_log_fn")
    def show(_user, level, message):
        line = text(message)
        if level >= lib.PS_LOG_WARN and line not in seen:
            seen.add(line)
            print(f"{name}: {line}", file=sys.stderr)

    _shown.append(ffi.NULL if quiet else show)
    lib.ps_log_set(_shown[-1], ffi.NULL)
    try:
        yield
    finally:
        _shown.pop()
        lib.ps_log_set(_shown[-1], ffi.NULL)


def progress_callback(progress, failures: list):
    """A ps_progress_fn for progress(what, done_bytes, total_bytes); NULL where that is None."""

    def report(_user, what, done, total):
        progress(text(what), done, total)

    return callback("ps_progress_fn", report, failures) if progress else ffi.NULL


def _as_list(array) -> list:
    kind = ffi.typeof(array).item.kind
    item = as_dict if kind == "struct" else _as_list if kind == "array" else lambda v: v
    return [item(v) for v in array]


def as_dict(value) -> dict:
    """A struct's fields as Python values: char arrays as str, other arrays as lists, structs as
    dicts; struct_bytes and reserved left out."""
    value = value[0] if ffi.typeof(value).kind == "pointer" else value
    out = {}
    for name, field in ffi.typeof(value).fields:
        if name in ("struct_bytes", "reserved"):
            continue
        content = getattr(value, name)
        if field.type.kind == "array":
            content = text(content) if field.type.item.cname == "char" else _as_list(content)
        elif field.type.kind == "struct":
            content = as_dict(content)
        out[name] = content
    return out


def version() -> str:
    """The library's version, "0.1.0"."""
    return text(lib.ps_version())
