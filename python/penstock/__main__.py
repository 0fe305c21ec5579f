"""The command `penstock`, also as `python -m penstock`: runs the program that belongs to this
package's library."""

import os
import sys

from ._lib import LIBRARY, _library_path


def main():
    library = _library_path()
    # in the package; in a build folder
    places = [library.parent / "penstock", library.parent.parent / "bin" / "penstock"]
    program = next((p for p in places if p.exists()), None)
    if program is None:
        sys.exit(
            f"penstock: the program is missing beside {library.parent / LIBRARY}: run `make` in "
            "the source tree, "
            "or install the package again"
        )
    os.execv(program, ["penstock", *sys.argv[1:]])


if __name__ == "__main__":
    main()
