"""Plans of a training step under two memory caps, and the machine's rates that plans are made
from."""

import copy
import inspect
import json
import os
import re
import warnings
from pathlib import Path

import numpy as np

from ._handle import Handle, Owner
from ._lib import as_dict, callback, check, encode_path, error, ffi, lib, struct, text
from .engine import TRACE_DTYPE, Schedule
from .errors import InvalidError
from .hosts import Hosts
from .lora import Lora
from .model import ModelConfig, Parameter, params_of

RECIPES = tuple(text(lib.ps_recipe_name(i)) for i in range(lib.PS_N_RECIPES))
OPTIMIZERS = tuple(text(lib.ps_optimizer_name(i)) for i in range(lib.PS_N_OPTIMIZERS))
NON_FINITE = {"stop": lib.PS_NON_FINITE_STOP, "skip": lib.PS_NON_FINITE_SKIP}
CLIP_BY = {"step": lib.PS_CLIP_BY_STEP, "previous": lib.PS_CLIP_BY_PREVIOUS}
_UNITS = {
    "": 1,
    "b": 1,
    "k": 1e3,
    "kb": 1e3,
    "m": 1e6,
    "mb": 1e6,
    "g": 1e9,
    "gb": 1e9,
    "t": 1e12,
    "tb": 1e12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_LEAST_WITHOUT_UNIT, _SIZES_END = 2**20, 1e18


def parse_bytes(size, name: str) -> int:
    """The bytes of a size such as 20 * 2**30, "20GiB", "512MiB" or "2e9"; None and 0: no cap.
    `name` is the argument's name, for messages. A number below 1 MiB without a unit is refused,
    because its unit was forgotten."""
    if size is None:
        return 0
    match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE]\+?\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if not match or match[2].lower() not in _UNITS:
        raise ValueError(f"{name}={size!r} is not a size: write 20GiB, 512MiB or 2e9")
    amount = float(match[1]) * _UNITS[match[2].lower()] if isinstance(size, str) else size
    if amount >= _SIZES_END:
        raise ValueError(f"{name}={size!r} is too large: it must be below 1e18 bytes")
    size_bytes = int(amount)
    if not match[2] and 0 < size_bytes < _LEAST_WITHOUT_UNIT:
        raise ValueError(
            f'{name}={size!r} is {size_bytes} byte{"s" * (size_bytes != 1)}: write "{match[1]}{"GiB" if size_bytes < 1024 else "MiB"}"'
        )
    return size_bytes


def _backend(name: str) -> int:
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"backend {name!r} is unknown: give auto, cpu or cuda")
    unused = lib.ps_hardware_gpu_unused() if name == "auto" else ffi.NULL
    if unused != ffi.NULL:
        warnings.warn(f"training on the CPU, as no GPU can be used: {text(unused)}", stacklevel=3)
    gpu = name == "cuda" or (name == "auto" and lib.ps_hardware_n_gpus() > 0)
    return lib.PS_BACKEND_CUDA if gpu else lib.PS_BACKEND_CPU


def disk_dirs(disk) -> bytes:
    """One directory of a disk, or several, as the library takes them."""
    return b",".join(map(encode_path, [disk] if isinstance(disk, (str, os.PathLike)) else disk))


def _caps(device_mem, host_mem) -> tuple[int, int]:
    return parse_bytes(device_mem, "device_mem"), parse_bytes(host_mem, "host_mem")


class Hardware:
    """A machine and its rates. The fields of ps_hardware (include/penstock/hardware.h) are
    attributes."""

    def __init__(self, ptr):
        self._ptr = ptr

    @classmethod
    def estimate(cls, threads: int = 0, backend: str = "auto", gpu: int = 0) -> "Hardware":
        """Rates estimated from core counts and clocks alone. backend "auto" is "cuda" where there
        is a GPU, else "cpu"."""
        hw = struct("ps_hardware")
        check(lib.ps_hardware_estimate(hw, _backend(backend), gpu, threads))
        return cls(hw)

    @classmethod
    def measure(
        cls,
        threads: int = 0,
        seconds: float = 0.0,
        backend: str = "auto",
        gpu: int = 0,
        host_mem=None,
        device_mem=None,
    ) -> "Hardware":
        """Measure matrix products, attention, a norm, copies and host ops, for about `seconds` in
        all. 0: 1 second, with a GPU 16, because a GPU's clock falls under load. host_mem and
        device_mem: caps of the process's and the GPU's memory meanwhile; BudgetError where one is
        too low."""
        hw = struct("ps_hardware")
        check(
            lib.ps_hardware_measure(
                hw, _backend(backend), gpu, threads, *_caps(device_mem, host_mem), seconds
            )
        )
        return cls(hw)

    @staticmethod
    def gpu_state(gpu: int = 0) -> dict:
        """What the GPU's sensors say now: the fields of ps_gpu_state. 0: unknown."""
        out = struct("ps_gpu_state")
        check(lib.ps_hardware_gpu_state(out, lib.PS_BACKEND_CUDA, gpu))
        return as_dict(out)

    @classmethod
    def profile(
        cls, threads: int = 0, seconds: float = 0.0, backend: str = "auto", gpu: int = 0
    ) -> "Hardware":
        """Measure longer, as `penstock profile` does, and also rates that plans do not use. seconds
        0: 5 seconds, with a GPU 125."""
        hw = struct("ps_hardware")
        check(lib.ps_hardware_profile(hw, _backend(backend), gpu, threads, 0, seconds))
        return cls(hw)

    def write(self, path) -> None:
        """Write a file that read() takes."""
        check(lib.ps_hardware_write(self._ptr, encode_path(path)))

    @classmethod
    def read(cls, path) -> "Hardware":
        """The machine that a file describes, to make plans for it. The command line, write() and
        cached() write such files."""
        hw = struct("ps_hardware")
        check(lib.ps_hardware_describe(hw, encode_path(path)))
        return cls(hw)

    @classmethod
    def of_gpu(cls, name: str) -> "Hardware":
        """An estimate of a machine with a GPU of this name, such as "rtx4090", to plan for a GPU
        that is not here. PenstockError names the GPUs that are known."""
        hw = struct("ps_hardware")
        check(lib.ps_hardware_of_gpu(hw, name.encode()))
        return cls(hw)

    @classmethod
    def cached(
        cls,
        threads: int = 0,
        backend: str = "auto",
        gpu: int = 0,
        host_mem=None,
        gpus: int = 1,
        fp8: bool = False,
        device_mem=None,
        model: ModelConfig | None = None,
        disk=None,
    ) -> "Hardware":
        """This machine's rates, measured once for each thread count and then read from the user's
        cache ($XDG_CACHE_HOME/penstock or ~/.cache/penstock), which the command line uses too.
        gpus: measure the rates of so many GPUs together, too. fp8: measure those of FP8 products,
        too, on a GPU that has them. model: those that its plan needs besides: of experts, of
        delta-nets, of heads above 256. disk: those of a disk, as Trainer takes it.

        Two cases give a warning. The cache cannot be written: the next call measures again.
        host_mem or device_mem leaves no room to measure: the rates are estimated."""
        hw, told = struct("ps_hardware"), []

        @ffi.callback("ps_hardware_note_fn")
        def note(_user, which, line):
            if which in (lib.PS_HARDWARE_ESTIMATES, lib.PS_HARDWARE_NOT_KEPT):
                told.append(text(line))

        device_mem_bytes, host_mem_bytes = _caps(device_mem, host_mem)
        ask = struct(
            "ps_hardware_ask",
            backend=_backend(backend),
            device=gpu,
            n_threads=threads,
            n_devices=gpus,
            fp8=int(fp8),
            model=model._ptr if model else ffi.NULL,
            device_mem_bytes=device_mem_bytes,
            host_mem_bytes=host_mem_bytes,
            note=note,
        )
        drives = ffi.new("char[]", disk_dirs(disk)) if disk is not None else ffi.NULL
        ask.disk = drives
        check(lib.ps_hardware_get(hw, ask))
        for line in told:
            warnings.warn(line, stacklevel=2)
        return cls(hw)

    @classmethod
    def cache_path(cls, threads: int = 0, backend: str = "auto", gpu: int = 0) -> Path | None:
        """The file of cached(); None where neither XDG_CACHE_HOME nor HOME is set."""
        out, hw = ffi.new("char[]", 4096), cls.estimate(threads, backend, gpu)
        status = lib.ps_hardware_cache_path(out, len(out), hw._ptr)
        if status == lib.PS_ESTATE:
            return None
        check(status)
        return Path(os.fsdecode(ffi.string(out)))

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        return as_dict(self._ptr)[name]

    def as_dict(self) -> dict:
        return as_dict(self._ptr)


# An argument of Plan() that is called as a field of ps_plan_config sets it, None but for its default.
# These have other values than the field.
_FIELDS = {name for name, _ in ffi.typeof("ps_plan_config").fields}
_OTHER_VALUES = {"recipe", "optimizer", "layout", "non_finite", "clip_by", "replan"}
_OTHER_VALUES |= {"lora", "hosts", "progress"}
_SIZES = ("device_mem", "host_mem", "pinned_mem", "disk_mem", "reserve")


def _named(kind: str, parse, name: str | None) -> dict:
    """The field `kind` of a choice by its name; none where that is None."""
    if name is None:
        return {}
    out = ffi.new("ps_plan_layout *" if kind == "layout" else f"ps_{kind} *")
    check(parse(out, name.encode()))
    return {kind: out[0]}


def _configure(given: dict) -> tuple:
    """ps_plan_config and the Hardware of Plan's arguments, and the array of the batch ramp, which
    must live as long as the library reads the config."""
    lora, hardware, gpus = given["lora"], given["hardware"], given["gpus"]
    if not 1 <= gpus <= lib.PS_MAX_DEVICES:
        raise InvalidError(f"gpus is {gpus}: give 1 to {lib.PS_MAX_DEVICES}")
    non_finite = given["non_finite"]
    if non_finite is not None and non_finite not in NON_FINITE:
        raise ValueError(f"non_finite {non_finite!r}: one of {', '.join(NON_FINITE)}")
    clip_by = given["clip_by"]
    if clip_by is not None and clip_by not in CLIP_BY:
        raise ValueError(f"clip_by {clip_by!r}: one of {', '.join(CLIP_BY)}")
    fields = {
        "n_threads": given["threads"],
        "n_frozen_layers": given["frozen_layers"],
        "n_devices": gpus,
        "non_finite": NON_FINITE.get(non_finite),
        "clip_by": CLIP_BY.get(clip_by),
        **_named("recipe", lib.ps_recipe_parse, given["recipe"]),
        **_named("optimizer", lib.ps_optimizer_parse, given["optimizer"]),
        **_named("layout", lib.ps_layout_parse, given["layout"]),
        **{name: given[name] for name in given.keys() & _FIELDS - _OTHER_VALUES},
        "replan": given["replan"] != "off",
        **{f"{name}_bytes": parse_bytes(given[name], name) for name in _SIZES},
    }
    config = struct("ps_plan_config")
    lib.ps_plan_config_init(config)
    for name, value in fields.items():
        if value is not None:
            setattr(config, name, int(value) if isinstance(value, (bool, np.bool_)) else value)
    if lora:
        lora.fill(config.lora)
    lib.ps_plan_config_resolve(config)
    stages = [
        {"tokens_per_step": tokens, "n_steps": steps} for tokens, steps in given["batch_ramp"]
    ]
    ramp = ffi.new("ps_ramp_stage[]", stages)
    config.ramp, config.n_ramp = ramp, len(stages)
    hardware = hardware or Hardware.cached(
        given["threads"],
        host_mem=given["host_mem"] if given["reserve"] is None else None,
        gpus=gpus,
        fp8=text(lib.ps_recipe_name(config.recipe)).startswith("fp8"),
        device_mem=given["device_mem"],
        model=given["model"],
    )
    return config, hardware, ramp


def _logits_callback(on_logits, failures: list):
    """A ps_logits_fn for on_logits(step, token, logits). Its exceptions go to failures."""

    def give(_user, step, token, logits, n):
        on_logits(step, token, np.frombuffer(ffi.buffer(logits, 4 * n), np.float32))
        return lib.PS_OK

    return callback("ps_logits_fn", give, failures, lib.PS_EINVAL)


def _events(trace, what: str) -> np.ndarray:
    if getattr(trace, "dtype", None) != TRACE_DTYPE:
        raise ValueError(
            f"{what} takes a trace of Trainer.trace() or simulate(), an array of engine.TRACE_DTYPE"
        )
    return np.ascontiguousarray(trace)


class Plan(Owner):
    """The fastest plan for one step of `model` under both caps.

    Plan(ModelConfig.read("my_model"), seq_len=4096, device_mem="20GiB", host_mem="80GiB")

    device_mem, host_mem   caps, in bytes or as "20GiB"; None: no cap on the device, and what the
                           machine allows on the host
    pinned_mem             how much host memory the system lets a process pin; None: all
    disk_mem               the most that optimizer state may take of a disk, whose directories the
                           Trainer is given; None: no disk
    disk_tbw               TB that the drives are rated to be written; the plan says how long they
                           last
    tokens_per_step        0: 8 sequences
    recipe                 "fp32", "fp32-master", "bf16", "fp24-master", "fp8" or "fp8-master"; None:
                           "bf16", with lora "fp32-master"
    state_bits             8: optimizer state in 8 bits; 0: as the recipe says
    fp8_bf16_first, fp8_bf16_last
                           with FP8: so many first and last blocks compute in bf16; None: 1 each
    fp8_bf16_down          with FP8: all down projections compute in bf16
    fp8_head               with FP8: the head's products have FP8 operands too
    fp8_fast_accumulation  with FP8: forward products sum with the GPU's fast accumulation, which
                           keeps 14 bits of a sum on an H100
    optimizer              "adamw", "lion" or "sgd"; None: adamw. A Trainer of the plan uses it
    chunk_tokens, chunks_per_round, first_round_chunks, first_rounds, head_slice_tokens
                           0: the planner chooses
    clip_norm              limit of the gradient's global norm; 0: no clipping; None: 1
    clip_by                whose norm clips: "step", its own; or "previous", that of the step
                           before: the first step updates nothing then; None: "step"
    non_finite             "stop", or "skip": a Trainer leaves weights and state as they are where a
                           step's loss or gradient is not finite, of up to max_skips steps in a row
    document_token         the token that begins a document; -1, None: none
    document_end_token     the token that ends a document; -1, None: none
    one_document           every sequence is one document: attention is faster on a GPU
    deterministic          every run gives the same bits, on a GPU too
    frozen_layers          the first so many layers are not trained: the embedding, then the blocks
    forward_only           nothing is trained: a step of a Trainer computes the loss alone. The last
                           step of a pass over a dataset counts the sequences that are left
    batch_ramp             [(tokens_per_step, steps), ...]: the training's first steps have fewer
                           tokens, stage after stage
    z_loss                 adds z_loss * logsumexp(logits)^2 to the loss that is trained
    label_smoothing        this part of a target is spread over the vocabulary
    router_aux_loss        coefficient of the experts' auxiliary loss; None: that of config.json,
                           with LoRA 0
    router_z_loss          adds router_z_loss times the mean of logsumexp(router logits)^2
    val_tokens             tokens of a validation beside training (Trainer.validate()); 0: none. The
                           plan is the same without, unless only another plan holds it
    sample_sequences,      prompts that Trainer.sample() computes at once, and the tokens that a
    sample_context         prompt and its text may have together; 0: none. The plan is the same
                           without
    lora                   a Lora: adapters are trained, and the model's own weights are frozen
    gpus                   GPUs that train together, 1 to 8; device_mem is the cap of each. With a
                           Hardware of the CPU backend they are arenas (docs/gpus.md)
    layout                 how they share a step: "data-parallel", "ring" of layers, or "auto",
                           which takes the one that is predicted to be faster; None: auto
    replan                 as Trainer's: but for "off", host memory of another search counts
    hosts                  Hosts that train together: tokens_per_step is of all. They take the cut
                           into chunks and rounds that rank 0 finds. The first Plan measures the
                           network between them, unless a Hardware states its rate. That
                           rate is not kept: state one to have the same plan at each start
    reserve                host memory of the process beside the plan's, in bytes or as "1GiB";
                           None: what the process held when it first asked for a Hardware or a Plan
    keep_grads             gradients are copied to the host wherever the update runs, for
                           Trainer.grad()
    on_logits              on_logits(step, token, logits) gets the logits of each token of a step of
                           a Trainer, in any order, before the step's metrics. token counts the
                           step's tokens; logits is a float32 array of the vocabulary's size, valid
                           during the call
    progress               progress(n_evaluated, best_step_s) is called while the search runs:
                           evaluations so far, and the predicted step of the fastest plan that fits
                           (0: none yet). What it raises is raised after the search

    Raises InvalidError, and BudgetError, which says what is needed and what fits.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        seq_len: int,
        device_mem=None,
        host_mem=None,
        pinned_mem=None,
        disk_mem=None,
        disk_tbw: float = 0.0,
        tokens_per_step: int = 0,
        recipe: str | None = None,
        state_bits: int = 0,
        optimizer: str | None = None,
        chunk_tokens: int = 0,
        chunks_per_round: int = 0,
        first_round_chunks: int = 0,
        first_rounds: int = 0,
        head_slice_tokens: int = 0,
        clip_norm: float | None = None,
        clip_by: str | None = None,
        non_finite: str | None = None,
        threads: int = 0,
        trace_steps: int | None = None,
        keep_grads: bool = True,
        document_token: int | None = None,
        document_end_token: int | None = None,
        one_document: bool = False,
        deterministic: bool = False,
        frozen_layers: int = 0,
        forward_only: bool = False,
        batch_ramp=(),
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        router_aux_loss: float | None = None,
        router_z_loss: float = 0.0,
        val_tokens: int = 0,
        sample_sequences: int = 0,
        sample_context: int = 0,
        lora: Lora | None = None,
        fp8_bf16_first: int | None = None,
        fp8_bf16_last: int | None = None,
        fp8_bf16_down: bool = False,
        fp8_head: bool = False,
        fp8_fast_accumulation: bool = False,
        reserve=None,
        hardware: Hardware | None = None,
        gpus: int = 1,
        layout: str | None = None,
        replan: str = "off",
        hosts: Hosts | None = None,
        on_logits=None,
        progress=None,
    ):
        self.config, self.hardware, ramp = _configure(locals())
        self.failures: list = []  # what on_logits raised
        if on_logits is not None:
            self._on_logits = self.config.logits_fn = _logits_callback(on_logits, self.failures)
        self.model, self.hosts = model, hosts
        if hosts:
            self.hardware = Hardware(ffi.new("ps_hardware *", self.hardware._ptr[0]))
            hosts._join(self.config, self.hardware._ptr)
        failures: list = []
        watch = progress and callback(
            "ps_plan_progress_fn",
            lambda _user, n_evaluated, best_step_s: progress(n_evaluated, best_step_s),
            failures,
        )
        self.config.progress = watch or ffi.NULL
        out = ffi.new("ps_plan **")
        status = lib.ps_plan_create(out, model._ptr, self.config, self.hardware._ptr)
        self.config.ramp = self.config.progress = ffi.NULL
        del ramp, watch
        if failures:
            lib.ps_plan_destroy(out[0])
            raise failures[0]
        if hosts and status == lib.PS_EBUDGET:
            raise hosts._refused(self.config, error(status))
        check(status)
        self._handle = Handle("plan", out[0], lib.ps_plan_destroy)
        if hosts:
            hosts._found(self.report)

    def _of_trainer(self, ptr) -> "Plan":
        """The plan `ptr` of the same training, which a trainer has made and Python owns."""
        plan = copy.copy(self)
        plan._handle = Handle("plan", ptr, lib.ps_plan_destroy)
        return plan

    @classmethod
    def smallest(cls, model: ModelConfig, **options) -> tuple[int, int]:
        """The least device memory that a plan fits in under host_mem, and the least host memory
        under device_mem, in bytes. One byte less is refused. 0: no plan fits. Takes the arguments
        of Plan()."""
        given = inspect.signature(cls).bind(model, **options)
        given.apply_defaults()
        config, hardware, ramp = _configure(given.arguments)
        if given.arguments["hosts"]:
            config.n_hosts = given.arguments["hosts"].n
        device, host = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        check(lib.ps_plan_smallest(model._ptr, config, hardware._ptr, device, host))
        del ramp
        return device[0], host[0]

    def params(self) -> list[Parameter]:
        """Every parameter tensor that the plan trains or streams, adapters among them."""
        return params_of(lib.ps_plan_model(self._handle.ptr))

    def steps_of(self, n_sequences: int) -> int:
        """How many whole steps so many sequences are, from the first stage of the batch ramp on."""
        out = ffi.new("uint64_t *")
        check(lib.ps_plan_steps_of(self._handle.ptr, n_sequences, out))
        return out[0]

    @property
    def report(self) -> dict:
        """The plan's figures: the fields of ps_plan_report (include/penstock/plan.h)."""
        out = struct("ps_plan_report")
        check(lib.ps_plan_get_report(self._handle.ptr, out))
        return as_dict(out)

    def __str__(self) -> str:
        return text(lib.ps_plan_text(self._handle.ptr))

    def json(self) -> dict:
        """The whole plan: every decision, the memory map and the predicted times."""
        return json.loads(text(lib.ps_plan_json(self._handle.ptr)))

    @property
    def schedule(self) -> Schedule:
        """The compiled step."""
        borrowed = lib.ps_plan_schedule(self._handle.ptr)
        return Schedule(Handle("schedule", borrowed, lambda _ptr: None, (self._handle,)))

    @property
    def stream_names(self) -> list[str]:
        return [
            text(lib.ps_plan_stream_name(self._handle.ptr, i))
            for i in range(self.schedule.n_streams)
        ]

    def stalls(self, trace: np.ndarray) -> list[dict]:
        """What each stream waited for, from a trace of whole steps (Trainer.trace(), simulate()):
        dicts of stream, what, awaited_stream, and seconds a step. They are sorted by stream; the
        longest wait of a stream comes first."""
        room, n = 128, ffi.new("uint64_t *")
        out = ffi.new("ps_stall[]", room)
        events = _events(trace, "stalls()")
        check(
            lib.ps_plan_stalls(
                self._handle.ptr,
                ffi.from_buffer("ps_trace_event[]", events),
                len(events),
                out,
                room,
                n,
            )
        )
        return [
            {
                "stream": s.stream,
                "what": text(s.what),
                "awaited_stream": s.awaited_stream,
                "seconds": s.seconds,
            }
            for s in out[0 : min(n[0], room)]
        ]

    def op_times(self, trace: np.ndarray) -> list[dict]:
        """How long each stream ran which ops, from a trace as stalls() takes it: dicts of stream,
        op ("gemm gate_up"), n_ops and seconds, both a step. They are sorted by stream; the longest
        of a stream come first. Of a simulated trace they are what the plan expects."""
        events, n = _events(trace, "op_times()"), ffi.new("uint64_t *")
        given = self._handle.ptr, ffi.from_buffer("ps_trace_event[]", events), len(events)
        check(lib.ps_plan_op_times(*given, ffi.NULL, 0, n))
        out = ffi.new("ps_op_time[]", n[0])
        check(lib.ps_plan_op_times(*given, out, n[0], n))
        return [
            {"stream": t.stream, "op": text(t.op), "n_ops": t.n_ops, "seconds": t.seconds}
            for t in out
        ]

    def throughput(self, trace: np.ndarray) -> dict:
        """h2d_bytes_per_s, d2h_bytes_per_s and update_bytes_per_s (updates on the host) while such
        ops run, from a trace as stalls() takes it. 0: there are none."""
        events, out = _events(trace, "throughput()"), struct("ps_throughput")
        check(
            lib.ps_plan_throughput(
                self._handle.ptr, ffi.from_buffer("ps_trace_event[]", events), len(events), out
            )
        )
        return as_dict(out)

    def simulate(self, n_steps: int = 2) -> tuple[np.ndarray, np.ndarray]:
        """The predicted trace of n_steps steps (TRACE_DTYPE), and the end of each step in ns."""
        events, ends = np.zeros(n_steps * self.schedule.n_ops, TRACE_DTYPE), np.zeros(n_steps)
        check(
            lib.ps_plan_simulate(
                self._handle.ptr,
                n_steps,
                ffi.from_buffer("ps_trace_event[]", events),
                ffi.from_buffer("double[]", ends),
            )
        )
        return events, ends
