"""Trains a model directory by a plan."""

import math
import os
import shlex
import sys
from dataclasses import dataclass, fields, replace

import numpy as np

from . import run_file
from ._handle import ActiveHandle, Closable
from ._lib import as_dict, callback, check, encode_path, error, ffi, lib, progress_callback, struct
from .checkpoint import Checkpoint, CheckpointReport, Checkpoints
from .dataset import Dataset
from .engine import read_trace, read_where
from .errors import StateError
from .generator import generate
from .model import SAVE_DTYPES, Parameter
from .plan import Hardware, Plan, disk_dirs

REPLANS = {"off": lib.PS_REPLAN_OFF, "auto": lib.PS_REPLAN_AUTO, "cut": lib.PS_REPLAN_CUT}
LR_SCHEDULES = {"constant": 0, "cosine": 1, "linear": 2, "wsd": 3}
NO_DECAY = {
    "norm": lib.PS_NO_DECAY_NORM,
    "bias": lib.PS_NO_DECAY_BIAS,
    "embedding": lib.PS_NO_DECAY_EMBEDDING,
}


@dataclass(frozen=True)
class Validation:
    """The result of a validation: the fields of ps_validation (include/penstock/train.h)."""

    loss: float
    perplexity: float
    right: float
    tokens: int
    valid_tokens: int
    seconds: float


@dataclass(frozen=True)
class StepMetrics:
    """What a step did and what it took: the fields of ps_step_metrics
    (include/penstock/train.h)."""

    step: int
    loss: float
    objective: float
    z_loss: float
    right: float  # of a model with a `score`: the accuracy, or the mean absolute error; else NaN
    tokens: int
    valid_tokens: int
    grad_norm: float
    lr: float
    skipped: int
    n_skipped: int
    step_s: float
    predicted_step_s: float
    tokens_per_s: float
    mfu: float
    hfu: float
    n_switches: int  # to another plan, so far; switch_s: what those before this step took
    switch_s: float
    device_peak_bytes: int
    host_arena_peak_bytes: int
    host_peak_bytes: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    update_bytes_per_s: float
    # of the GPUs' sensors, 0: unknown. Of several GPUs the lowest, the sum, the highest, the sum.
    gpu_clock_mhz: float
    gpu_power_w: float
    gpu_temperature_c: float
    gpu_energy_j: float
    n_gpus_read: int  # GPUs that these four are of; 0: none is known
    fp8_flushed: float
    fp8_flushed_most: float
    expert_load: float
    expert_entropy: float
    experts_unused: int
    expected_step_s: float  # simulated with the rates that the run has now; 0: not known yet
    # after the step, where steps() was asked for them
    validation: Validation | None = None
    samples: list[list[int]] | None = None  # the token ids that follow each prompt


def _fields(cls, out) -> dict:
    """The fields of dataclass cls that the struct has."""
    return {f.name: getattr(out, f.name) for f in fields(cls) if hasattr(out, f.name)}


def _as_int32(values, what: str, n: int) -> np.ndarray:
    """values as n int32. ValueError names the first one that is no int32."""
    array = np.asarray(values).reshape(-1)
    if array.size != n:
        raise ValueError(f"{what} are {array.size}: give {n}")
    if array.dtype.kind not in "iu":
        raise ValueError(
            f"{what} have dtype {array.dtype}, and the first is {array[0]}: give integers"
        )
    bounds = np.iinfo(np.int32)
    past = np.flatnonzero((array < bounds.min) | (array > bounds.max))
    if past.size:
        raise ValueError(
            f"{what}: {array[past[0]]} at position {past[0]} is past int32: give ids below the "
            "vocabulary's size, or -1 "
            "for a target that is not counted"
        )
    return np.ascontiguousarray(array, np.int32)


_HYPERS = {"lr", "beta1", "beta2", "eps", "momentum", "weight_decay"}
_SETTINGS = _HYPERS | set(
    "nesterov no_decay lr_schedule min_lr warmup_steps total_steps decay_steps max_skips replan "
    "trust_rates seed first_step shuffle".split()
)


def _set(cfg, settings: dict) -> None:
    """Set fields of a ps_train_config by the names of Trainer's arguments."""
    for name, value in settings.items():
        if name in _HYPERS and math.isnan(value):
            raise ValueError(f"{name} is nan: give a number, or None for the optimizer's default")
        if name == "lr_schedule":
            if value not in LR_SCHEDULES:
                raise ValueError(f"lr_schedule {value!r}: one of {', '.join(LR_SCHEDULES)}")
            name, value = "lr_kind", LR_SCHEDULES[value]
        if name == "replan":
            if value not in REPLANS:
                raise ValueError(f"replan {value!r}: one of {', '.join(REPLANS)}")
            value = REPLANS[value]
        if name == "no_decay":
            unknown = sorted(set(value) - NO_DECAY.keys())
            if unknown or isinstance(value, str):
                raise ValueError(
                    f"no_decay {value!r}: give a list of some of {', '.join(NO_DECAY)}"
                )
            value = sum(NO_DECAY[group] for group in set(value))
        setattr(cfg, name, int(value) if isinstance(value, bool) else value)


# The callbacks hold no reference to their trainer. There is no cycle, and so the trainer ends with
# the last reference to it.


def _batch_callback(data, failures: list):
    """A ps_batch_fn that calls data(step) -> (tokens, targets). Its exceptions go to failures."""

    def fill(_user, step, tokens, targets, n):
        batch = data(step)
        if not isinstance(batch, (tuple, list, np.ndarray)) or len(batch) != 2:
            got = (
                f"{type(batch).__name__} of {len(batch)}"
                if hasattr(batch, "__len__")
                else type(batch).__name__
            )
            raise ValueError(
                f"batch({step}) is a {got}: return (tokens, targets), {n} integers each"
            )
        for dst, values, what in zip((tokens, targets), batch, ("tokens", "targets")):
            ffi.memmove(
                dst, ffi.from_buffer(_as_int32(values, f"the {what} of batch({step})", n)), 4 * n
            )
        return lib.PS_OK

    return callback("ps_batch_fn", fill, failures, lib.PS_EINVAL)


class Trainer(Closable):
    """Trains the model directory `model_dir` by `plan`.

    with Trainer("my_model", plan, data="shards/", lr=3e-4, total_steps=100) as trainer:
        for metrics in trainer.steps(100):
            print(metrics.step, metrics.loss)
        trainer.save("trained")

    data                  a Dataset, a path, a list of paths, or batch(step) -> (tokens, targets):
                          two integer arrays of tokens_per_step elements, sequence after sequence. A
                          target of -1 is not counted. A GPU waits for batch(), which therefore may
                          not use CUDA itself, nor wait for a thread that does (PyTorch's pinning
                          of memory does)
    lr, weight_decay      of the plan's optimizer; None: its default
    beta1, beta2, eps     adamw's; beta1 and beta2 are lion's too. None: the optimizer's default
    momentum, nesterov    sgd's
    no_decay              what gets no weight decay: some of "norm", "bias", "embedding"
    lr_schedule           constant (default), cosine, linear or wsd, over total_steps
    val                   validation data, as data but no function; the plan must have val_tokens
    max_skips             of a plan with non_finite "skip": more steps in a row stop the run
    init_weights          draw the weights from seed; model_dir then needs config.json alone
    adapter               of a plan with lora: the directory of an adapter to go on training, in
                          PEFT's layout; None: a fresh one, drawn from seed
    disk                  of a plan with disk_mem: a directory on a drive of this machine, or a list
                          of them, one a drive. What the plan has there is gone with the trainer
    replan                whether the trainer plans again where steps take another time than planned:
                          off (default), auto: by plans with the same bits, cut: by others too
    trust_rates           True: host memory is not measured in place, see arena()
    progress              progress(what, done_bytes, total_bytes) is called while weights are loaded
                          and before it; total_bytes is 0 in a stage that is not counted in bytes

    Threads: calls of several threads take turns. Any thread may call cancel(), where() and
    steps_done at any time, also inside batch().

    A trainer that is not closed ends when it is dropped and its steps are done. One that still runs
    at the interpreter's exit is cancelled. Raises FormatError, InputOutputError, OutOfMemoryError,
    InvalidError.
    """

    def __init__(
        self,
        model_dir,
        plan: Plan,
        data,
        *,
        lr: float | None = None,
        min_lr: float | None = None,
        lr_schedule: str | None = None,
        warmup_steps: int | None = None,
        total_steps: int | None = None,
        decay_steps: int | None = None,
        beta1: float | None = None,
        beta2: float | None = None,
        eps: float | None = None,
        momentum: float | None = None,
        nesterov: bool | None = None,
        weight_decay: float | None = None,
        no_decay: tuple[str, ...] | list[str] | None = None,
        max_skips: int | None = None,
        seed: int | None = None,
        first_step: int | None = None,
        shuffle: bool | None = None,
        init_weights: bool | None = None,
        val=None,
        adapter=None,
        disk=None,
        replan: str | None = None,
        trust_rates: bool | None = None,
        progress=None,
    ):
        given = locals()
        cfg = struct("ps_train_config")
        lib.ps_train_config_init(cfg)
        names = _SETTINGS | {"init_weights"}
        _set(cfg, {name: given[name] for name in names if given[name] is not None})
        held = ffi.new("char[]", encode_path(adapter)) if adapter is not None else ffi.NULL
        cfg.adapter_dir = held
        drives = ffi.new("char[]", disk_dirs(disk)) if disk is not None else ffi.NULL
        cfg.disk = drives
        self._open(model_dir, plan, data, cfg, progress, val=val)

    @classmethod
    def resume(
        cls,
        checkpoint,
        model_dir,
        plan: Plan,
        data,
        *,
        val=None,
        disk=None,
        progress=None,
        **changes,
    ):
        """A trainer that goes on from `checkpoint`: a Checkpoint, or the path of one. Schedule,
        hyperparameters and seed are the checkpoint's, unless `changes` has others
        under the names of the constructor. With a plan made with checkpoint.plan_options, k + k
        steps give the bits of 2k steps. Raises what the constructor raises; InvalidError also
        where the run cannot go on from this checkpoint. convert_state=True converts weights and
        state of a checkpoint of another recipe or other state_bits."""
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        cfg = struct("ps_train_config")
        check(lib.ps_checkpoint_config(checkpoint._handle.ptr, cfg))
        unknown = sorted(changes.keys() - _SETTINGS - {"convert_state"})
        if unknown:
            raise TypeError(f"{unknown[0]!r} is no setting of a trainer")
        _set(cfg, changes)
        drives = ffi.new("char[]", disk_dirs(disk)) if disk is not None else ffi.NULL
        cfg.disk = drives
        trainer = cls.__new__(cls)
        trainer._open(model_dir, plan, data, cfg, progress, checkpoint, val)
        return trainer

    @classmethod
    def from_file(cls, path, *, progress=None, **changes):
        """A trainer of the run that a TOML file describes (docs/run-file.md): `penstock train
        --config` reads the same file. `changes` has other values under the keys' names, with _ for
        -. Keys of the command alone, such as out and checkpoint-every, are checked and not used.
        Raises InvalidError, which names file and line, and what Plan and the constructor raise."""
        model_dir, plan, data, settings = run_file.prepare(path, changes)
        return cls(model_dir, plan, data, progress=progress, **settings)

    def _open(self, model_dir, plan, data, cfg, progress, checkpoint=None, val=None):
        self.total_steps = cfg.total_steps
        self.plan = self._first_plan = plan  # plan: the one that runs, see _follow_plan()
        self._failures, self._writing = plan.failures, None
        self._failures.clear()
        run = cfg.run = ffi.new("char[]", shlex.join(sys.orig_argv).encode())
        self._first_step = checkpoint.step if checkpoint else cfg.first_step
        self.params = {p.name: p for p in plan.params()}
        uses, source = self._bind_data(cfg, data)
        if plan.hosts and plan.hosts.n > 1:
            uses = (*uses, plan.hosts._handle)
        if val is not None:
            val = val if isinstance(val, Dataset) else Dataset(val, plan.model.vocab_size)
            cfg.val_dataset = val._handle.ptr
            uses, source = (*uses, val._handle), (source, val)
        source = (source, plan)  # which holds on_logits
        report = progress_callback(progress, self._failures)
        out = ffi.new("ps_trainer **")
        plan._handle.wait_for_dropped()
        common = (out, encode_path(model_dir), plan._handle.ptr, cfg)
        if checkpoint is None:
            check(lib.ps_trainer_create(*common, report, ffi.NULL))
        else:
            check(lib.ps_trainer_resume(*common, checkpoint._handle.ptr, report, ffi.NULL))
        self._handle = ActiveHandle(
            "trainer",
            out[0],
            lib.ps_trainer_destroy,
            uses,
            lib.ps_trainer_cancel,
            lib.ps_trainer_at_rest,
            source,
        )
        self._running = plan._handle
        del run  # the library has a copy
        if self._failures:  # progress raised
            self.close()
            raise self._failures[0]

    def _bind_data(self, cfg, data) -> tuple:
        """Set cfg's data. Returns the handles that the trainer uses, and what must live as long."""
        if callable(data):
            source = cfg.batch_fn = _batch_callback(data, self._failures)
            return (self.plan._handle,), source
        source = data if isinstance(data, Dataset) else Dataset(data, self.plan.model.vocab_size)
        cfg.dataset = source._handle.ptr
        return (self.plan._handle, source._handle), source

    def _check(self, status: int) -> None:
        if status < 0 and status not in (lib.PS_ECANCELLED, lib.PS_ESTATE) and self._failures:
            raise self._failures[0] from error(status)
        check(status)

    def steps(
        self,
        n: int,
        checkpoints=None,
        checkpoint_every=None,
        keep: int = 2,
        validate_every: int = 0,
        sample_every: int = 0,
        samples: dict | None = None,
    ):
        """Run n steps, and yield the StepMetrics of each. While a step is reported the next one
        runs, but where a validation or samples follow: after each validate_every-th and
        sample_every-th step of the training, 0: never.

        samples            the arguments of sample(), such as {"prompts": [[1, 2]], "seed": 1}

        checkpoints        folder for checkpoints, which are written beside the steps
        checkpoint_every   steps, counted from step 0, or a time: 200, "30m", "2h"
        keep               how many of the newest checkpoints of this training stay

        A checkpoint that cannot be written is a warning, and training goes on. The last one is
        complete when the loop ends. InvalidError: the folder has checkpoints of another training.

        The loop may be left early, by break, an exception or Ctrl-C. The step in flight then
        finishes first. The weights are those after steps_done steps, and can be read and saved."""
        if bool(sample_every) != bool(samples):
            raise ValueError("sample_every and samples are given together")
        if (checkpoints is None) != (checkpoint_every is None):
            raise ValueError("checkpoints and checkpoint_every are given together")
        writes = checkpoints is not None
        if writes:
            with self._handle.turn():
                check(lib.ps_trainer_checkpoints_check(self._handle.ptr, encode_path(checkpoints)))
            checkpoints = Checkpoints(self, checkpoints, checkpoint_every, keep)
        submitted = done = 0
        try:
            while done < n:
                at = self._first_step + self.steps_done
                stops = [
                    done + every - at % every for every in (validate_every, sample_every) if every
                ]
                stop = min(stops, default=n)
                while submitted < min(n, done + 2, stop):
                    if writes and checkpoints.waits(self._first_step + self.steps_done):
                        break
                    ahead = min(n, done + 2, stop) - submitted if not writes else 1
                    with self._handle.turn():
                        self._check(lib.ps_trainer_submit(self._handle.ptr, ahead))
                        self._follow_plan()
                    submitted += ahead
                    if writes:
                        checkpoints.submitted()
                metrics = self._wait()
                done += 1
                if validate_every and (metrics.step + 1) % validate_every == 0:
                    metrics = replace(metrics, validation=self.validate())
                if sample_every and (metrics.step + 1) % sample_every == 0:
                    metrics = replace(metrics, samples=self.sample(**samples))
                yield metrics
                if writes:
                    checkpoints.end(wait=False)
        except (GeneratorExit, KeyboardInterrupt):
            self.finish()
            raise
        finally:
            if writes:
                checkpoints.end(wait=True)

    def _wait(self) -> StepMetrics:
        out = ffi.new("ps_step_metrics *")
        with self._handle.turn():
            self._check(lib.ps_trainer_wait(self._handle.ptr, out))
            self._follow_plan()
        return StepMetrics(**_fields(StepMetrics, out))

    def _follow_plan(self) -> None:
        """After a switch `plan` is the plan that runs."""
        ptr = self._handle.ptr
        if lib.ps_trainer_plan(ptr) != self._running.ptr:
            self.plan = self._first_plan._of_trainer(lib.ps_trainer_take_plan(ptr))
            self._handle.exchange(self._running, self.plan._handle)
            self._running = self.plan._handle

    def validate(self) -> Validation:
        """The loss on the first plan.val_tokens tokens of val, with the weights as they are. A
        training gives the same bits with it. StateError: steps are in flight."""
        out = ffi.new("ps_validation *")
        with self._handle.turn():
            self._check(lib.ps_trainer_validate(self._handle.ptr, out))
        return Validation(**_fields(Validation, out))

    def arena(self) -> tuple[Hardware, dict]:
        """What this trainer's own host memory does, as measured before weights were loaded: the
        plan's Hardware with these rates in place, and the rate that differs most from the plan's, a
        ps_rate_difference. Its kind is 0 where nothing was measured: with trust_rates, and in less
        than 4 GiB (CPU backend: 256 MiB)."""
        rates, most = struct("ps_hardware"), ffi.new("ps_rate_difference *")
        self._check(lib.ps_trainer_arena(self._handle.ptr, rates, most))
        return Hardware(rates), as_dict(most)

    def sample(self, prompts, *, max_new_tokens: int = 64, **options) -> list[list[int]]:
        """The token ids that follow each of `prompts`, lists of token ids, with the weights as they
        are. The options are those of Generator.run(). A training gives the same bits with it. The
        plan must have sample_sequences. StateError: steps are in flight. NumericError: the logits
        are not finite; training may go on."""
        with self._handle.turn():
            out, _ = generate(
                lambda *args: lib.ps_trainer_sample(self._handle.ptr, *args),
                prompts,
                max_new_tokens=max_new_tokens,
                **options,
            )
        return out

    def finish(self) -> list[StepMetrics]:
        """Wait for the steps in flight. Returns the metrics of the steps that no loop reported."""
        rest = []
        # No counter is kept here: Ctrl-C may come between the library's answer and the counting.
        while True:
            try:
                rest.append(self._wait())
            except StateError:
                break
        return rest

    def cancel(self) -> None:
        """Stop at the next op. Some weights may then be one step ahead of the others; the error
        says so. Any thread may call it. Does nothing once the trainer is closed."""
        self._handle.cancel()

    @property
    def steps_done(self) -> int:
        with self._handle.beside():
            return lib.ps_trainer_steps_done(self._handle.ptr)

    def where(self) -> str:
        """What each stream has done and what it waits for, a line a stream; "" before the first
        step."""
        return read_where(lib.ps_trainer_where, self._handle)

    def _param(self, name) -> Parameter:
        return name if isinstance(name, Parameter) else self.params[name]

    def read(self, name) -> np.ndarray:
        """A parameter as float32, of the master copy where there is one. StateError: steps are in
        flight."""
        return self._read(lib.ps_trainer_read_param, name)

    def grad(self, name) -> np.ndarray:
        """The last step's gradient of a parameter as float32, divided by the number of counted
        targets, before clipping."""
        return self._read(lib.ps_trainer_read_grad, name)

    def _read(self, function, name) -> np.ndarray:
        param = self._param(name)
        out = np.empty(param.shape, np.float32)
        with self._handle.turn():
            check(
                function(self._handle.ptr, param.index, ffi.from_buffer("float[]", out), out.size)
            )
        return out

    def write(self, name, values) -> None:
        """Set a parameter to an array of its shape."""
        param = self._param(name)
        values = np.ascontiguousarray(values, np.float32)
        if values.shape != param.shape:
            raise ValueError(
                f"{param.name} has shape {param.shape}, but the array has {values.shape}"
            )
        with self._handle.turn():
            check(
                lib.ps_trainer_write_param(
                    self._handle.ptr, param.index, ffi.from_buffer("float[]", values), values.size
                )
            )

    def save(self, directory, dtype: str | None = None) -> None:
        """Save the model as a Hugging Face directory, with safetensors in "bf16" (the default),
        "fp32" or, of gpt-oss, "mxfp4". With a plan with lora: save the adapter in PEFT's layout, by default in "fp32".
        Whatever ends the save, the directory holds the whole old model or the whole new one. Its
        other files stay."""
        dtype = dtype or ("fp32" if self.plan.config.lora.rank else "bf16")
        with self._handle.turn():
            check(lib.ps_trainer_save(self._handle.ptr, encode_path(directory), SAVE_DTYPES[dtype]))

    def checkpoint(self, folder, keep: int = 0, wait: bool = True) -> str:
        """Write the complete state as the checkpoint `folder`/step-N, whose path is returned.
        keep: how many of the newest checkpoints of this training stay there; 0: all.

        With wait, no step may be in flight (StateError), and the checkpoint is on the disk at the
        end. Without, it is of all steps that are submitted so far, and is written while these end
        and others run. finish_checkpoint() then waits for it. So do the next checkpoint() and
        close().

        InputOutputError: the older checkpoints stay. InvalidError: another training has written a
        checkpoint of this step there."""
        self.finish_checkpoint()
        os.makedirs(folder, exist_ok=True)
        path = ffi.new("char[]", 4096)
        with self._handle.turn():
            done = self._first_step + lib.ps_trainer_steps_done(self._handle.ptr)
            if wait and done < self.steps_submitted:
                raise StateError("steps are in flight: wait for them, or give wait=False")
            check(
                lib.ps_checkpoint_path(path, len(path), encode_path(folder), self.steps_submitted)
            )
            check(lib.ps_trainer_checkpoint_begin(self._handle.ptr, path))
        self._writing = os.fsdecode(ffi.string(path)), folder, keep
        if wait:
            self.finish_checkpoint()
        return os.fsdecode(ffi.string(path))

    @property
    def steps_submitted(self) -> int:
        """Steps that were submitted, first_step included: the next step's number."""
        with self._handle.turn():
            return self._first_step + lib.ps_trainer_steps_submitted(self._handle.ptr)

    @property
    def checkpoint_runs(self) -> bool:
        """A checkpoint is being written, and finish_checkpoint() would wait."""
        with self._handle.turn():
            return bool(lib.ps_trainer_checkpoint_running(self._handle.ptr))

    def finish_checkpoint(self, wait: bool = True) -> CheckpointReport | None:
        """End the checkpoint that is being written, and remove those that are not kept. None where
        there is none, or, without wait, where it is not complete yet. Raises what made it fail."""
        if self._writing is None:
            return None
        if not wait and self.checkpoint_runs:
            return None
        (path, folder, keep), self._writing = self._writing, None
        report = struct("ps_checkpoint_report")
        with self._handle.turn():
            check(lib.ps_trainer_checkpoint_end(self._handle.ptr, report))
            if keep:
                check(lib.ps_checkpoints_prune(encode_path(folder), keep))
        return CheckpointReport(
            path, report.step, report.bytes, report.held_s, report.durable_s, report.waited_s
        )

    def trace(self) -> np.ndarray:
        """The trace of the last plan.config.trace_steps steps (engine.TRACE_DTYPE)."""
        return read_trace(lib.ps_trainer_trace, self._handle)

    def write_trace(self, path) -> None:
        """Write the trace as Chrome / Perfetto JSON."""
        self.plan.schedule.write_trace(path, self.trace(), self.plan.stream_names)

    def close(self) -> None:
        """Wait for the steps in flight, and release the memory. StateError: called inside
        batch()."""
        self._handle.close()
