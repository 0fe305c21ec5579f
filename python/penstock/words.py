"""The words of a command line of the program, read and changed as the program reads them
(native/cli/args.c). This module imports nothing, because every start of the program asks it."""

# as native/cli/aliases.c
SYNONYMS = {
    "--model": ("--model-name-or-path", "--base-model"),
    "--seq-len": (
        "--max-length",
        "--max-seq-length",
        "--max-seq-len",
        "--cutoff-len",
        "--sequence-len",
        "--training.seq-len",
    ),
}


class Words:
    """Options with their values: --name A B, or --name=A."""

    def __init__(self, words: list[str]):
        self._groups: list[list[str]] = [[]]  # an option and what follows it; the first has none
        for word in words:
            if word.startswith("--"):
                self._groups.append([])
            self._groups[-1].append(word)

    def __iter__(self):
        return (word for group in self._groups for word in group)

    @property
    def names(self) -> set[str]:
        return {group[0].partition("=")[0] for group in self._groups[1:]}

    def _of(self, name: str) -> list[list[str]]:
        names = (name, *SYNONYMS.get(name, ()))
        return [g for g in self._groups[1:] if g[0].partition("=")[0] in names]

    @staticmethod
    def _values(group: list[str]) -> list[str]:
        _, equals, value = group[0].partition("=")
        return [value] if equals else group[1:]

    def values(self, name: str) -> list[str]:
        """All values of a list."""
        return [value for group in self._of(name) for value in self._values(group)]

    def last(self, name: str) -> str | None:
        """The value of an option that has one."""
        values = [self._values(group)[:1] for group in self._of(name)]
        return values[-1][0] if values and values[-1] else None

    def set(self, name: str, value: str) -> None:
        """Give an option that has one value another one."""
        groups = self._of(name)
        if not groups:
            self._groups.append([f"{name}={value}"])
            return
        rest = groups[-1][1:] if "=" in groups[-1][0] else groups[-1][2:]
        groups[-1][:] = [f"{name}={value}", *rest]

    def set_list(self, name: str, values: list[str]) -> None:
        """Give a list these values alone."""
        self.take([name])
        self._groups += [[f"{name}={value}"] for value in values]

    def take(self, names) -> list[str]:
        """Remove these options. Their words."""
        taken = [g for g in self._groups[1:] if g[0].partition("=")[0] in names]
        self._groups = [g for g in self._groups if not any(g is t for t in taken)]
        return [word for group in taken for word in group]
