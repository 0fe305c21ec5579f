"""Models: configuration, parameters, and tensors on disk."""

from dataclasses import dataclass

import numpy as np

from ._handle import Handle, Owner
from ._lib import as_dict, check, encode_path, ffi, lib, struct, text

ROLES = ("matrix", "norm", "bias", "constant")
DTYPES = {"fp32": lib.PS_F32, "bf16": lib.PS_BF16}
SAVE_DTYPES = DTYPES | {"mxfp4": lib.PS_SAVE_MXFP4}  # of gpt-oss
_ARRAYS = {"fp32": np.float32, "bf16": np.uint16}  # numpy has no bf16: its bits


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 as the bits of bf16, rounded to nearest even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Parameter:
    """A tensor under its Hugging Face name. role: "matrix", "norm", "bias" or "constant". unit: 0
    is the embedding, 1 to n_layers are the blocks, n_layers + 1 is the head. offset: in the unit,
    in elements. exact: it stays fp32, in files too, whatever the dtype."""

    index: int
    name: str
    shape: tuple
    role: str
    unit: int
    offset: int
    exact: bool = False


def params_of(model) -> list[Parameter]:
    """Every parameter tensor of a ps_model, in the library's order."""
    out, info = [], ffi.new("ps_param_info *")
    for i in range(lib.ps_model_n_params(model)):
        check(lib.ps_model_param(model, i, info))
        shape = tuple(info.shape[d] for d in range(info.n_dims))
        place = ROLES[info.role], info.unit, info.offset, info.exact != 0
        out.append(Parameter(i, text(info.name), shape, *place))
    return out


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

    def write(self, model_dir, dtype: str, path) -> None:
        """Write config.json of model_dir, from which this was read, as the file path beside weights
        of type dtype: "fp32", "bf16" or, of gpt-oss, "mxfp4"."""
        where = encode_path(model_dir), SAVE_DTYPES[dtype], encode_path(path)
        check(lib.ps_model_config_write(self._ptr, *where))

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
        return params_of(self._model())

    def check(self, tensors: "TensorFile", name) -> None:
        """FormatError, which begins with `name`: the tensors are not the model's weights."""
        check(lib.ps_model_check_tensors(self._model(), tensors._handle.ptr, encode_path(name)))

    def carried(self, tensors: "TensorFile") -> list[str]:
        """The tensors of other parts of a vision-language model, which a save carries over; those
        of the widest elements first."""
        model = self._model()
        names = [n for n in tensors.names if lib.ps_model_carries(model, n.encode())]
        return sorted(names, key=tensors.width, reverse=True)

    def text_alone(self) -> "ModelConfig":
        """The same, whose write() writes the config of the text model alone."""
        ptr = ffi.new("ps_model_config *", self._ptr[0])
        ptr.multimodal = 0
        return ModelConfig(ptr)

    @property
    def figure(self) -> str | None:
        """What StepMetrics.right is of: "accuracy", "mean_absolute_error"; None: no `score`."""
        name = lib.ps_problem_figure(self.problem)
        return text(name) if name else None

    def score(self, problem: str, n_labels: int = 0) -> "ModelConfig":
        """The same with a head for `problem`: "single-label", "multi-label", "regression", "pairs",
        or "embedding", which has no labels (ps_problem in include/penstock/model.h)."""
        ptr = ffi.new("ps_model_config *", self._ptr[0])
        names = [text(lib.ps_problem_name(i)) for i in range(lib.PS_N_PROBLEMS)]
        if problem not in names[1:]:
            raise ValueError(f"problem {problem!r}: one of {', '.join(names[1:])}")
        check(lib.ps_model_config_score(ptr, names.index(problem), n_labels))
        return ModelConfig(ptr)

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

    def _find(self, name: str) -> tuple:
        idx = lib.ps_tensors_find(self._handle.ptr, name.encode())
        if idx == 2**64 - 1:
            raise KeyError(name)
        return idx, self._info(idx)

    def shape(self, name: str) -> tuple:
        info = self._find(name)[1]
        return tuple(info.shape[d] for d in range(info.n_dims))

    def dtype(self, name: str) -> str:
        """As in the file's header: "BF16"."""
        return text(self._find(name)[1].dtype)

    def width(self, name: str) -> float:
        """Bytes of an element in the file."""
        info = self._find(name)[1]
        return info.bytes / max(info.n, 1)

    def name_on_disk(self, name: str) -> str:
        """The name that tensor `name` of the text model has in these files: that of a
        vision-language checkpoint has a prefix more."""
        out = ffi.new("char[]", len(name.encode()) + 32)
        where = self._handle.ptr, name.encode(), out, len(out)
        check(lib.ps_tensors_name_on_disk(*where))
        return text(out)

    def read_bytes(self, name: str, first: int, n: int) -> np.ndarray:
        """n bytes of the tensor's data from byte `first` on, as they are in the file."""
        out = np.empty(n, np.uint8)
        dst = ffi.cast("void *", out.ctypes.data)
        check(lib.ps_tensors_read_bytes(self._handle.ptr, self._find(name)[0], first, n, dst))
        return out

    def n_bytes(self, name: str) -> int:
        return self._find(name)[1].bytes

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32. KeyError: it has no tensor of that name."""
        return self.read_range(name, 0, None, "fp32").reshape(self.shape(name))

    def read_range(self, name: str, first: int, n: int | None, dtype: str) -> np.ndarray:
        """n elements from element `first` on, in one dimension; None: all. dtype "fp32", or "bf16",
        whose bits are uint16: rounded to nearest even where the file has more."""
        idx, info = self._find(name)
        array = np.empty(info.n - first if n is None else n, _ARRAYS[dtype])
        dst = ffi.cast("void *", array.ctypes.data)
        check(lib.ps_tensors_read(self._handle.ptr, idx, first, array.size, DTYPES[dtype], dst))
        return array


def mxfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Of fp32 rows the elements and the scales in MXFP4; the sums of squares of what that changes,
    and of the rows."""
    x = np.ascontiguousarray(x, np.float32)
    elements = np.empty((len(x), x.shape[1] // 32, 16), np.uint8)
    scales = np.empty(elements.shape[:2], np.uint8)
    error = ffi.new("double[2]")
    to = (ffi.cast("uint8_t *", a.ctypes.data) for a in (elements, scales))
    check(lib.ps_mxfp4_encode(ffi.cast("float *", x.ctypes.data), x.size, *to, error))
    return elements, scales, list(error)


def write_tensors(directory, specs, pieces, max_shard_bytes: int, raw=()) -> None:
    """Write a model's safetensors into a directory, with an index where they are several files.
    specs: (name, shape, dtype) of each tensor, fp32 before bf16. pieces: arrays, which one after the other are the tensors'
    data. raw: (name, shape, dtype in the file, bytes) of tensors that come after those of specs,
    and are written as they are. Until all of it is on the disk the directory stays as it was."""
    out, keep = ffi.new("ps_tensor_writer **"), []
    n = len(specs) + len(raw)
    given = ffi.new("ps_tensor_spec[]", n)
    for spec, (name, shape, dtype, *n_bytes) in zip(given, [*specs, *raw], strict=True):
        keep.append(ffi.new("char[]", name.encode()))
        spec.name, spec.n_dims = keep[-1], len(shape)
        spec.shape[0 : len(shape)] = shape
        if n_bytes:
            keep.append(ffi.new("char[]", dtype.encode()))
            spec.file_dtype, spec.bytes = keep[-1], n_bytes[0]
        else:
            spec.dtype = DTYPES[dtype]
    where = encode_path(directory)
    check(lib.ps_tensors_create(out, where, b"model", given, n, max_shard_bytes, ffi.NULL, 0))
    try:
        for piece in pieces:
            data = ffi.cast("void *", piece.ctypes.data)
            check(lib.ps_tensors_append(out[0], data, piece.nbytes))
    except BaseException:
        lib.ps_tensors_abort(out[0])
        raise
    check(lib.ps_tensors_finish(out[0]))
