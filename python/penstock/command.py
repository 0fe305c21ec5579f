"""What the commands that are written in Python share: how they refuse and fail."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from .errors import BudgetError, FormatError, InvalidError, PenstockError
from .files import DataError

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one sentence, with exit code 2."""

    def error(self, message: str):
        self.exit(REFUSED, f"{self.prog}: {message}\n")


def run(name: str, function: Callable[[], int]) -> int:
    """The exit code of function(). Its errors become one sentence on stderr."""
    try:
        return function()
    except (DataError, InvalidError, FormatError, BudgetError) as e:
        code, message = REFUSED, str(e)
    except (PenstockError, OSError) as e:
        code, message = FAILED, str(e)
    except KeyboardInterrupt:
        code, message = INTERRUPTED, "stopped; nothing was written"
    print(f"{name}: {message}", file=sys.stderr)
    return code
