"""LoRA adapters: what a plan is made with, read from an adapter, merged into a model."""

import math
from dataclasses import dataclass
from pathlib import Path

from ._lib import check, encode_path, ffi, lib, struct, text
from .errors import InvalidError
from .files import DataError
from .model import ModelConfig, TensorFile


@dataclass(frozen=True)
class Lora:
    """Adapters for a plan: y = x W^T + s (x A^T) B^T, with A[rank, n_in] and B[n_out, rank]. All
    of the model's own weights are frozen. There is no dropout.

    alpha    s = alpha / rank; None: twice the rank
    targets  "all-linear", or names such as "q_proj,v_proj" or ["q_proj", "v_proj"]
    rslora   s = alpha / sqrt(rank)
    base     how the frozen matrices of the blocks are kept and streamed: "bf16" (as the recipe has
             weights), "fp8" (1.0625 bytes a weight), "nf4" or "mxfp4" (0.53125)
    """

    rank: int
    alpha: float | None = None
    targets: str | list | tuple = "all-linear"
    rslora: bool = False
    base: str = "bf16"

    @classmethod
    def read(cls, directory) -> "Lora":
        """What the adapter in `directory`, in PEFT's layout, has. FormatError names what is not
        supported."""
        out = struct("ps_lora")
        check(lib.ps_adapter_read(out, encode_path(directory)))
        return cls.of(out)

    @classmethod
    def of(cls, lora) -> "Lora | None":
        """That of a ps_lora; None where it has no adapters."""
        names = ffi.new("char[]", lib.PS_LORA_NAMES_BYTES)
        check(lib.ps_lora_targets_text(names, len(names), lora.targets))
        if not lora.rank:
            return None
        base = text(lib.ps_base_name(lora.base))
        return cls(lora.rank, lora.alpha, text(names), bool(lora.rslora), base)

    def fill(self, out) -> None:
        """Set a ps_lora, whose alpha stays the default where it is None."""
        names = self.targets if isinstance(self.targets, str) else ",".join(self.targets)
        targets = ffi.new("uint32_t *")
        check(lib.ps_lora_targets_parse(targets, names.encode()))
        base = ffi.new("uint32_t *")
        check(lib.ps_base_parse(base, self.base.encode()))
        out.rank, out.targets, out.rslora = self.rank, targets[0], self.rslora
        out.base = base[0]
        if self.alpha is not None:
            if math.isnan(self.alpha):
                raise InvalidError("alpha is nan: give a number, or None for twice the rank")
            out.alpha = self.alpha


SCORE = "base_model.model.score.weight"  # of a classifier's adapter


def scorer(folder: Path, adapter=None) -> ModelConfig:
    """The model of a directory that has a `score`, or whose adapter has one."""
    model = ModelConfig.read(folder)
    config = Path(adapter or "") / "config.json"
    if adapter and not model.n_labels and config.exists():
        own = ModelConfig.read(config)
        if own.n_labels:
            return model.score(text(lib.ps_problem_name(own.problem)), own.n_labels)
    if adapter and not model.n_labels:
        tensors = TensorFile(Path(adapter) / "adapter_model.safetensors")
        n = tensors.shape(SCORE)[0] if SCORE in tensors else 0
        if n:
            return model.score("regression" if n == 1 else "single-label", n)
    if not model.n_labels:
        raise DataError(f"{folder}: has no score: it is no classifier and no reward model")
    return model
