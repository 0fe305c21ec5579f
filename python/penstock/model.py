"""Models: configuration, parameters, and tensors on disk."""

from dataclasses import dataclass

import numpy as np

from ._handle import Handle, Owner
from ._lib import as_dict, check, encode_path, ffi, lib, struct, text

ROLES = ("matrix", "norm", "bias")


@dataclass(frozen=True)
class Parameter:
    """A tensor under its Hugging Face name. role: "matrix", "norm" or "bias". unit: 0 is the
    embedding, 1 to n_layers are the blocks, n_layers + 1 is the head. offset: in the unit, in
    elements."""

    index: int
    name: str
    shape: tuple
    role: str
    unit: int
    offset: int


class ModelConfig:
    """A model's configuration. The fields of ps_model_config (include/penstock/model.h) are
    attributes: vocab_size, n_layers, dim and so on."""

    def __init__(self, ptr):
        self._ptr = ptr

    @classmethod
    def read(cls, path) -> "ModelConfig":
        """Read a model directory or its config.json. FormatError names file, field, value and
        limit."""
        cfg = struct("ps_model_config")
        check(lib.ps_model_config_read(cfg, encode_path(path)))
        return cls(cfg)

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._ptr, name)
        except AttributeError:
            raise AttributeError(f"ModelConfig has no field {name!r}") from None

    def __repr__(self) -> str:
        scalars = {k: v for k, v in as_dict(self._ptr).items() if not isinstance(v, list | dict)}
        fields = ", ".join(f"{k}={v}" for k, v in scalars.items())
        return f"ModelConfig({fields})"

    @property
    def architecture(self) -> str:
        check(lib.ps_model_config_check(self._ptr, b"model"))
        return text(lib.ps_model_family_name(self._ptr.family))

    def _model(self):
        """The model of the configuration, a ps_model; FormatError where it is out of range."""
        out = ffi.new("ps_model **")
        check(lib.ps_model_create(out, self._ptr))
        return ffi.gc(out[0], lib.ps_model_destroy)

    @property
    def n_elements(self) -> int:
        """The number of parameters; tied ones count once."""
        return lib.ps_model_n_elements(self._model())

    def params(self) -> list[Parameter]:
        """Every parameter tensor, in the library's order."""
        model, out, info = self._model(), [], ffi.new("ps_param_info *")
        for i in range(lib.ps_model_n_params(model)):
            check(lib.ps_model_param(model, i, info))
            shape = tuple(info.shape[d] for d in range(info.n_dims))
            out.append(
                Parameter(i, text(info.name), shape, ROLES[info.role], info.unit, info.offset)
            )
        return out

    def flops(self, seq_len: int) -> dict:
        """Model FLOPs of one sequence: matmul (the blocks' products, forward), attn_fwd,
        attn_bwd, head, sequence (all of it)."""
        out = struct("ps_flops")
        check(lib.ps_model_flops(self._model(), seq_len, out))
        return as_dict(out)


class TensorFile(Owner):
    """A .safetensors file or a model directory, opened for reading. `names` lists its tensors."""

    def __init__(self, path):
        out = ffi.new("ps_tensor_file **")
        check(lib.ps_tensors_open(out, encode_path(path)))
        self._handle = Handle("tensor file", out[0], lib.ps_tensors_close)
        self.names = [
            text(self._info(i).name) for i in range(lib.ps_tensors_count(self._handle.ptr))
        ]

    def _info(self, idx: int):
        info = ffi.new("ps_tensor_info *")
        check(lib.ps_tensors_info(self._handle.ptr, idx, info))
        return info

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32. KeyError: it has no tensor of that name."""
        idx = lib.ps_tensors_find(self._handle.ptr, name.encode())
        if idx == 2**64 - 1:
            raise KeyError(name)
        info = self._info(idx)
        array = np.empty(tuple(info.shape[d] for d in range(info.n_dims)), np.float32)
        check(
            lib.ps_tensors_read(
                self._handle.ptr, idx, 0, info.n, lib.PS_F32, ffi.cast("void *", array.ctypes.data)
            )
        )
        return array
