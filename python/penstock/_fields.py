"""What messages of the library call its fields: the keyword arguments that set them, and options
while a command runs."""

import contextlib

# The keyword of Plan, Trainer, Generator and Hardware for a field, where the two differ.
KEYWORDS = {
    "adapter_dir": "adapter",
    "device": "gpu",
    "device_mem_bytes": "device_mem",
    "disk_mem_bytes": "disk_mem",
    "host_mem_bytes": "host_mem",
    "lr_kind": "lr_schedule",
    "n_devices": "gpus",
    "n_frozen_layers": "frozen_layers",
    "n_sequences": "batch",
    "n_threads": "threads",
    "pinned_mem_bytes": "pinned_mem",
    "ramp": "batch_ramp",
    "val_dataset": "val",
}
# Options of commands that are written in Python, whose keywords have the fields' own names.
_SAME = ("context", "dtype", "experts", "prefill_tokens")

_set = []  # gives the library the names; empty: the library is not loaded
_commands = [0]  # that run


def _tell() -> None:
    names = dict(KEYWORDS)
    if _commands[0]:
        names |= {name: name for name in _SAME}
        names = {field: "--" + name.replace("_", "-") for field, name in names.items()}
    for give in _set:
        give(names)


def loaded(give) -> None:
    """The library is loaded: give(names) sets its names of fields."""
    _set[:] = [give]
    _tell()


@contextlib.contextmanager
def as_options():
    """A context in which messages name options."""
    _commands[0] += 1
    _tell()
    try:
        yield
    finally:
        _commands[0] -= 1
        _tell()
