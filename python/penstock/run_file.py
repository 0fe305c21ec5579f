"""Runs that a TOML file describes. The program `penstock` checks the file: it has the table of
options, with their types and limits."""

import dataclasses
import inspect
import re
import subprocess
import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ._lib import encode_path, program_path
from .dataset import Dataset
from .errors import InvalidError
from .lora import Lora
from .model import ModelConfig
from .plan import Hardware, Plan

_HARDWARE = ("threads", "backend", "gpu", "host_mem", "device_mem")


def read(path) -> dict:
    """Every option of the run in the file: its value, or its default where it has one. InvalidError
    names file and line."""
    done = subprocess.run(
        [program_path(), "info", b"--config=" + encode_path(path)], capture_output=True
    )
    if done.returncode:
        message = done.stderr.decode("utf-8", "replace").strip().removeprefix("penstock: ")
        raise InvalidError(message)
    tables = tomllib.loads(done.stdout.decode())
    return {key.replace("-", "_"): v for table in tables.values() for key, v in table.items()}


def _arguments(function) -> set:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def _lora(options: dict) -> Lora:
    base = options.get("base_dtype", "bf16")
    if options.get("adapter"):
        return dataclasses.replace(Lora.read(options["adapter"]), base=base)
    names = {"rank": "lora_rank", "alpha": "lora_alpha", "targets": "lora_targets"}
    given = {name: options[key] for name, key in names.items() if key in options}
    return Lora(**given, rslora=options["lora_rslora"], base=base)


def _stages(path, options: dict) -> None:
    """Batch ramps as Plan takes them: ["65536:1000"] becomes [(65536, 1000)]."""
    stages = []
    for stage in options.get("batch_ramp", ()):
        match = re.fullmatch(r"(\d+):(\d+)", stage) if isinstance(stage, str) else None
        if isinstance(stage, str) and not match:
            raise InvalidError(f"{path}: batch-ramp {stage}: give TOKENS:STEPS for each stage")
        stages.append((int(match[1]), int(match[2])) if match else stage)
    options["batch_ramp"] = stages


def prepare(path, changes: dict) -> tuple:
    """What Trainer takes for the run: the model's directory, a plan, the data, its settings."""
    from .train import Trainer  # which imports this module

    options = read(path)
    of_plan, of_trainer = _arguments(Plan.__init__), _arguments(Trainer.__init__)
    known = options.keys() | of_plan | of_trainer | {"model", "data", "steps", *_HARDWARE}
    for name in changes.keys() - known:
        raise TypeError(f"{name!r} is no option of a run")
    options |= changes
    _stages(path, options)
    if "steps" in options:
        options.setdefault("total_steps", options["steps"])
    for option in ("model", "data", "seq_len"):
        if not options.get(option):
            raise InvalidError(f"{path}: {option.replace('_', '-')} is missing: a run needs it")
    if not options.get("val") or options["val"] == ["none"]:
        options["val"], options["val_tokens"] = None, 0
    model = ModelConfig.read(options["model"])
    data = options["data"]
    if not callable(data) and not isinstance(data, Dataset):
        data = Dataset(data, model.vocab_size)
    hardware = options.pop("hardware", None) or Hardware.cached(
        **{name: options[name] for name in _HARDWARE if name in options},
        gpus=options.get("gpus", 1),
        fp8=(options.get("recipe") or "").startswith("fp8"),
        model=model,
        disk=options.get("disk"),
    )
    chosen = {name: v for name, v in options.items() if name in of_plan}
    chosen.setdefault(
        "one_document",
        options["document_token"] < 0
        and options["document_end_token"] < 0
        and isinstance(data, Dataset)
        and not data.marks_documents,
    )
    if options.get("adapter") or options.get("lora_rank"):
        chosen.setdefault("lora", _lora(options))
    plan = Plan(model, hardware=hardware, **chosen)
    settings = {name: v for name, v in options.items() if name in of_trainer}
    settings.setdefault("trust_rates", settings.get("replan") == "off")  # as the command
    if not settings.get("total_steps") and isinstance(data, Dataset):
        settings["total_steps"] = max(1, plan.steps_of(data.n_sequences(options["seq_len"])))
    return options["model"], plan, data, settings
