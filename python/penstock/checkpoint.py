"""Checkpoints on disk: what Trainer.checkpoint() wrote, opened and checked."""

import os
import time
import warnings
from dataclasses import dataclass

from ._handle import Closable, Handle
from ._lib import check, encode_path, ffi, lib, struct, text
from .errors import PenstockError
from .lora import Lora

_CUT = "chunk_tokens chunks_per_round first_round_chunks first_rounds head_slice_tokens".split()
_TERMS = (
    "z_loss label_smoothing router_aux_loss router_z_loss clip_norm document_token "
    "document_end_token fp8_bf16_first fp8_bf16_last fp8_bf16_down fp8_head fp8_fast_accumulation"
).split()


@dataclass(frozen=True)
class CheckpointReport:
    """What writing a checkpoint took.

    path, step, n_bytes   of the checkpoint
    held_s                seconds until the state was read, and updates waited for nothing any more
    durable_s             seconds until the checkpoint was on the disk under its name
    waited_s              seconds for which updates waited, added up over the streams
    """

    path: str
    step: int
    n_bytes: int
    held_s: float
    durable_s: float
    waited_s: float


def every(interval) -> tuple[int, float]:
    """(steps, seconds) of an interval: 200, "200", "30m" or "2h". One of the two is 0. ValueError
    otherwise."""
    number, unit = (str(interval)[:-1], str(interval)[-1:]) if interval else ("", "")
    try:
        if unit in ("m", "h") and 0 < (seconds := float(number) * (60 if unit == "m" else 3600)):
            return 0, seconds
        if 0 < (steps := int(number + unit)):
            return steps, 0.0
    except ValueError:
        pass
    raise ValueError(
        f"{interval!r} is no interval: give a number of steps, or a time such as '30m'"
    )


class Checkpoints:
    """The checkpoints of Trainer.steps(): when the next is begun. A failure is a warning."""

    def __init__(self, trainer, folder, interval, keep: int):
        self._trainer, self._folder, self._keep = trainer, folder, keep
        self._steps, self._seconds = every(interval)
        self._due, self._begun = time.monotonic() + self._seconds, 0

    def waits(self, reported: int) -> bool:
        """The next step must not be submitted yet. A checkpoint is due after it, so that the one
        that is being written ends first and gets its name. All of that one's steps are to be
        reported before, of which `reported` are."""
        due = self._steps and (self._trainer.steps_submitted + 1) % self._steps == 0
        return bool(due) and reported < self._begun

    def submitted(self) -> None:
        """Called after each submitted step: begin a checkpoint of it where one is due."""
        if self._steps and self._trainer.steps_submitted % self._steps:
            return
        # an interval counts from the begin of the last one, but two do not run at once
        if not self._steps and (time.monotonic() < self._due or self._trainer.checkpoint_runs):
            return
        self.end(wait=True)
        self._due = time.monotonic() + self._seconds
        self._begun = self._trainer.steps_submitted
        self._try(self._trainer.checkpoint, self._folder, self._keep, False)

    def end(self, wait: bool) -> None:
        self._try(self._trainer.finish_checkpoint, wait)

    @staticmethod
    def _try(call, *args) -> None:
        try:
            call(*args)
        except (PenstockError, OSError) as e:
            warnings.warn(f"no checkpoint was written, and training goes on: {e}", stacklevel=4)


class Checkpoint(Closable):
    """The checkpoint in `directory`. Every file is checked against the manifest's SHA-256.

    step         steps that were trained: the next step's number
    n_bytes      of its files, the manifest apart

    Raises FormatError, which names the file that is damaged or missing, and InputOutputError.
    """

    def __init__(self, directory):
        out = ffi.new("ps_checkpoint **")
        check(lib.ps_checkpoint_open(out, encode_path(directory)))
        self._take(out[0])

    @classmethod
    def latest(cls, folder) -> "Checkpoint | None":
        """The newest whole checkpoint of a folder: the one that was written last, whatever its
        step. None where the folder has no checkpoint. Raises FormatError where it has some, and
        none of them is whole."""
        out = ffi.new("ps_checkpoint **")
        check(lib.ps_checkpoint_latest(out, encode_path(folder)))
        if out[0] == ffi.NULL:
            return None
        checkpoint = cls.__new__(cls)
        checkpoint._take(out[0])
        return checkpoint

    def _take(self, ptr) -> None:
        self._handle = Handle("checkpoint", ptr, lib.ps_checkpoint_close)
        self._info = struct("ps_checkpoint_info")
        check(lib.ps_checkpoint_get_info(ptr, self._info))
        self.path = os.fsdecode(ffi.string(lib.ps_checkpoint_dir(ptr)))
        self.step, self.n_bytes = self._info.step, self._info.bytes
        self.n_skipped = self._info.n_skipped

    @property
    def plan_options(self) -> dict:
        """Options of Plan with which a resumed run gives the same bits: recipe, optimizer, batch,
        how the batch is cut, terms of the loss, clipping, documents."""
        return {
            name: getattr(self._info, name)
            for name in ("seq_len", "tokens_per_step", *_CUT, *_TERMS)
        } | {
            "recipe": text(lib.ps_recipe_name(self._info.recipe)),
            "state_bits": self._info.state_bits,
            "optimizer": text(lib.ps_optimizer_name(self._info.optimizer)),
            "clip_by": ("step", "previous")[self._info.clip_by],
            "non_finite": ("stop", "skip")[self._info.non_finite],
            "lora": Lora.of(self._info.lora),
        }

    def close(self) -> None:
        self._handle.drop()
