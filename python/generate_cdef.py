#!/usr/bin/env python3
"""generate_cdef.py INCLUDE_DIR OUT - the public headers as declarations that cffi can parse.

Comments, preprocessor lines, PS_API and extern "C" go; enums, typedefs, structs and prototypes
stay, in the order the headers include each other. Enum constants in array sizes become numbers. Run
by the Makefile: the result lies beside the library it was made for (lib/penstock.cdef) and is never
committed.
"""

import re
import sys
from pathlib import Path


def header_order(include_dir: Path) -> list[Path]:
    """Every header of include_dir/penstock, each after those it includes."""
    order: list[Path] = []

    def visit(path: Path) -> None:
        if path in order:
            return
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
            visit(path.parent / name)
        order.append(path)

    for path in sorted((include_dir / "penstock").glob("*.h")):
        visit(path)
    return order


def strip(text: str) -> str:
    """Header text without comments, preprocessor lines, PS_API and the C++ guard."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"//[^\n]*", " ", text)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.S)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.M)
    return re.sub(r"\bPS_API\b", "", text)


def enum_constants(text: str) -> dict[str, int]:
    """Names and values of every enumerator."""
    values: dict[str, int] = {}
    for body in re.findall(r"enum\s*\w*\s*\{([^}]*)\}", text):
        following = 0
        for item in filter(None, (part.strip() for part in body.split(","))):
            name, _, expression = (part.strip() for part in item.partition("="))
            if expression:
                following = values[expression] if expression in values else int(expression, 0)
            values[name] = following
            following += 1
    return values


def generate(include_dir: Path) -> str:
    text = "\n".join(strip(path.read_text()) for path in header_order(include_dir))
    values = enum_constants(text)
    text = re.sub(r"\[\s*([A-Za-z_]\w*)\s*\]", lambda m: f"[{values[m[1]]}]", text)
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    out = Path(sys.argv[2])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(generate(Path(sys.argv[1])))
