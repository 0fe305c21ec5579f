"""Checkpoints on disk: what Trainer.checkpoint() wrote, opened and checked."""

import os

from ._handle import Handle, Owner
from ._lib import check, encode_path, ffi, lib, struct, text

_CUT = ("chunk_tokens", "chunks_per_round", "first_round_chunks", "head_slice_tokens")


class Checkpoint(Owner):
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
        """The newest whole checkpoint of a folder; None where it has none at all. FormatError:
        there are checkpoints, and none is whole."""
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

    @property
    def plan_options(self) -> dict:
        """Options of Plan with which a resumed run gives the same bits: recipe, optimizer, batch,
        and how the batch is cut."""
        cfg = struct("ps_train_config")
        check(lib.ps_checkpoint_config(self._handle.ptr, cfg))
        return {
            name: getattr(self._info, name) for name in ("seq_len", "tokens_per_step", *_CUT)
        } | {
            "recipe": text(lib.ps_recipe_name(self._info.recipe)),
            "optimizer": text(lib.ps_optimizer_name(self._info.optimizer)),
            "clip": cfg.clip_norm > 0,
        }

    def close(self) -> None:
        self._handle.drop()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
