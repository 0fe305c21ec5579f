"""The command `penstock`, also as `python -m penstock`: runs the program that belongs to this
package's library, but for the commands that are written in Python."""

import os
import signal
import subprocess
import sys
from importlib import import_module

from . import inputs

# each a module with main(argv), which returns the exit code
IN_PYTHON = "compare data embed export generate import log merge report score watch".split()
NAMES = {"import": "import_gguf"}  # of modules whose command has another name
OF_IDS = {"--tokens", "--plan"}  # options of the binary's own `generate`, which needs no tokenizer


def _in_python(words: list[str]) -> bool:
    of_ids = any(word.partition("=")[0] in OF_IDS for word in words)
    return words[:1] != [] and words[0] in IN_PYTHON and not (words[0] == "generate" and of_ids)


def _with_dashes(word: str) -> str:
    """The name of an option may be written with underscores."""
    name, equals, value = word.partition("=")
    is_name = word.startswith("--") and " " not in name
    return name.replace("_", "-") + equals + value if is_name else word


def _help(program: os.PathLike, words: list[str]) -> int:
    """The program's text, then that of the options which are Python's."""
    code = subprocess.run([program, *words]).returncode
    if code or words[0] not in inputs.DATA:
        return code
    from . import command

    def told() -> int:
        command.put("\n" + inputs.help_of_text(words[0]), end="")
        return command.OK

    return command.run("penstock", told)


def main():
    # Ctrl-C while modules are imported ends the process as it ends any program, without a
    # traceback: command.run() takes over.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    words = [_with_dashes(word) for word in sys.argv[1:]]
    if _in_python(words):
        words = ["--help" if word == "--help-all" else word for word in words]
        module = NAMES.get(words[0], words[0])
        sys.exit(import_module(f"penstock.{module}").main(words[1:]))
    from ._lib import program_path

    try:
        program = program_path()
    except FileNotFoundError as missing:
        sys.exit(str(missing))
    if {"--help", "--help-all", "-h"} & {*words[1:]}:
        sys.exit(_help(program, words))
    if words and inputs.needed(words[0], words[1:]):
        from . import command

        def prepared() -> int:
            words[1:] = inputs.prepare(words[0], words[1:])
            return command.OK

        if code := command.run("penstock", prepared):
            sys.exit(code)
    os.execv(program, ["penstock", *words])


if __name__ == "__main__":
    main()
