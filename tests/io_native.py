"""ctypes onto build/lib/libpenstock.so for the tests of files and configs."""

import ctypes as c
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / os.environ.get("PENSTOCK_BUILD", "build")
u32, u64, i32, f32 = c.c_uint32, c.c_uint64, c.c_int32, c.c_float
F32, BF16 = 0, 1
EINVAL, EFORMAT, ENOMEM, EIO, ESTATE = -1, -2, -4, -5, -7
NONE = 2**64 - 1


class Rope(c.Structure):
    _fields_ = (
        [(n, u32) for n in "kind rotary_dim original_positions keep_fraction".split()]
        + [
            (n, c.c_double)
            for n in "theta factor low_freq_factor high_freq_factor attention_factor beta_fast beta_slow mscale mscale_all_dim".split()
        ]
        + [(n, c.c_double * 128) for n in ("short_factor", "long_factor")]
    )


class ModelConfig(c.Structure):
    _fields_ = (
        [
            (n, u32)
            for n in "struct_bytes family vocab_size n_layers dim n_heads n_kv_heads head_dim ffn_dim max_positions".split()
        ]
        + [(n, u32) for n in "tied_embeddings activation qkv_bias qk_norm window".split()]
        + [(n, i32) for n in "bos_token_id eos_token_id pad_token_id".split()]
        + [
            (n, f32)
            for n in "norm_eps attention_scale attention_softcap logit_softcap embedding_scale residual_scale logit_scale dropout".split()
        ]
        + [(n, u32) for n in "n_experts n_experts_used expert_dim norm_topk_prob".split()]
        + [("router_aux_loss", f32), ("multimodal", u32)]
        + [(n, u32) for n in "interleaved_rope reserved o_bias attention_sinks".split()]
        + [(n, f32) for n in ("glu_alpha", "glu_limit")]
        + [(n, u32) for n in ("problem", "n_labels")]
        + [(n, u32) for n in "value_norm global_head_dim global_kv_heads shared_keys".split()]
        + [(n, c.c_double) for n in ("position_beta", "local_rope_theta")]
        + [(n, u32) for n in "kv_rank q_rank value_dim shared_dim n_expert_groups".split()]
        + [("n_groups_used", u32), ("router_sigmoid", u32), ("router_scale", f32)]
        + [("attention_gate", u32)]
        + [("linear_" + n, u32) for n in "key_heads value_heads key_dim value_dim".split()]
        + [
            (n, u32)
            for n in "linear_conv_width double_wide_mlp per_layer_dim per_layer_vocab".split()
        ]
        + [("rope", Rope), ("layer_flags", c.c_uint8 * 4096)]
    )


class ParamInfo(c.Structure):
    _fields_ = [("name", c.c_char * 96)] + [
        (n, u32) for n in ("unit", "role", "n_dims", "reserved")
    ]
    _fields_ += [("shape", u64 * 3), ("offset", u64), ("n", u64)]
    _fields_ += [("init_mean", f32), ("init_std", f32), ("exact", u32), ("reserved_", u32)]


class Flops(c.Structure):
    _fields_ = [(n, c.c_double) for n in ("matmul", "attn_fwd", "attn_bwd", "head", "sequence")]


class TensorInfo(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("dtype", c.c_char * 12),
        ("n_dims", u32),
        ("shape", u64 * 8),
        ("n", u64),
        ("bytes", u64),
    ]


class TensorSpec(c.Structure):
    _fields_ = [("name", c.c_char_p), ("dtype", u32), ("n_dims", u32), ("shape", u64 * 8)]
    _fields_ += [("file_dtype", c.c_char_p), ("bytes", u64)]


class Failed(Exception):
    def __init__(self, code, message):
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


def _load():
    lib = c.CDLL(str(BUILD / "lib" / "libpenstock.so"))
    p, pp, s = c.c_void_p, c.POINTER(c.c_void_p), c.c_char_p
    for name, result, args in [
        ("ps_last_error", s, []),
        ("ps_abi_size", c.c_size_t, [s]),
        ("ps__live_allocations", c.c_int64, []),
        ("ps_model_family_name", s, [u32]),
        ("ps_model_config_read", i32, [c.POINTER(ModelConfig), s]),
        ("ps_model_config_check", i32, [c.POINTER(ModelConfig), s]),
        ("ps_model_create", i32, [c.POINTER(c.c_void_p), c.POINTER(ModelConfig)]),
        ("ps_model_destroy", None, [c.c_void_p]),
        ("ps_model_n_units", u32, [c.c_void_p]),
        ("ps_model_unit_elements", u64, [c.c_void_p, u32]),
        ("ps_model_n_params", u32, [c.c_void_p]),
        ("ps_model_param", i32, [c.c_void_p, u32, c.POINTER(ParamInfo)]),
        ("ps_model_find", u32, [c.c_void_p, s]),
        ("ps_model_n_elements", u64, [c.c_void_p]),
        ("ps_model_flops", i32, [c.c_void_p, u64, c.POINTER(Flops)]),
        ("ps_tensors_open", i32, [pp, s]),
        ("ps_tensors_close", None, [p]),
        ("ps_tensors_count", u64, [p]),
        ("ps_tensors_info", i32, [p, u64, c.POINTER(TensorInfo)]),
        ("ps_tensors_find", u64, [p, s]),
        ("ps_tensors_read", i32, [p, u64, u64, u64, i32, p]),
        ("ps_tensors_create", i32, [pp, s, s, c.POINTER(TensorSpec), u64, u64, c.POINTER(s), u32]),
        ("ps_tensors_append", i32, [p, p, u64]),
        ("ps_tensors_finish", i32, [p]),
        ("ps_tensors_abort", None, [p]),
        ("ps_dataset_open", i32, [pp, c.POINTER(s), u32, u32]),
        ("ps_dataset_close", None, [p]),
        ("ps_dataset_n_shards", u32, [p]),
        ("ps_dataset_n_tokens", u64, [p]),
        ("ps_dataset_n_sequences", u64, [p, u64]),
        ("ps_dataset_read", i32, [p, u64, u64, p, p, p]),
        ("ps_dataset_order", u64, [u64, u64, u64, i32]),
    ]:
        f = getattr(lib, name)
        f.restype, f.argtypes = result, args
    assert lib.ps_abi_size(b"ps_model_config") == c.sizeof(ModelConfig)
    assert lib.ps_abi_size(b"ps_tensor_info") == c.sizeof(TensorInfo)
    assert lib.ps_abi_size(b"ps_tensor_spec") == c.sizeof(TensorSpec)
    assert lib.ps_abi_size(b"ps_param_info") == c.sizeof(ParamInfo)
    return lib


lib = _load()


def check(code):
    if code != 0:
        raise Failed(code, lib.ps_last_error().decode())


def one_sentence(message, *parts):
    """What every message for a person must be: a single line, not empty, naming the given parts."""
    assert message and "\n" not in message and len(message) < 700, message
    for part in parts:
        assert str(part) in message, (part, message)


def read_config(path):
    out = ModelConfig()
    check(lib.ps_model_config_read(c.byref(out), os.fsencode(path)))
    return out


class Model:
    """The ps_model of a configuration."""

    def __init__(self, config):
        self._as_parameter_ = c.c_void_p()
        check(lib.ps_model_create(c.byref(self._as_parameter_), c.byref(config)))

    def __del__(self):
        lib.ps_model_destroy(self)


class Tensors:
    """ps_tensor_file as a context manager."""

    def __init__(self, path):
        self.p = c.c_void_p()
        check(lib.ps_tensors_open(c.byref(self.p), os.fsencode(path)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        lib.ps_tensors_close(self.p)

    def infos(self):
        out = []
        for i in range(lib.ps_tensors_count(self.p)):
            info = TensorInfo()
            check(lib.ps_tensors_info(self.p, i, c.byref(info)))
            out.append(
                (
                    info.name.decode(),
                    info.dtype.decode(),
                    tuple(info.shape[: info.n_dims]),
                    info.n,
                    info.bytes,
                )
            )
        return out

    def read(self, name, dtype=F32, first=0, n=None):
        import numpy as np

        i = lib.ps_tensors_find(self.p, name.encode())
        assert i != NONE, name
        info = TensorInfo()
        check(lib.ps_tensors_info(self.p, i, c.byref(info)))
        n = info.n - first if n is None else n
        out = np.zeros(n, np.float32 if dtype == F32 else np.uint16)
        check(lib.ps_tensors_read(self.p, i, first, n, dtype, out.ctypes.data))
        return out


def read_or_refused(path):
    """A config that is read is valid; one that is not is refused in one sentence that names the
    file: None."""
    try:
        config = read_config(path)
    except Failed as e:
        assert e.code == EFORMAT
        one_sentence(e.message, pathlib.Path(path) / "config.json")
        return None
    assert lib.ps_model_config_check(c.byref(config), b"x") == 0
    return config


def specs(tensors):
    """(name, dtype, shape) to an array of ps_tensor_spec."""
    array = (TensorSpec * max(len(tensors), 1))()
    for spec, (name, dtype, shape) in zip(array, tensors):
        spec.name, spec.dtype, spec.n_dims = (
            name.encode() if isinstance(name, str) else name,
            dtype,
            len(shape),
        )
        spec.shape[: len(shape)] = shape
    return array


def create(folder, tensors, limit=0, stem="model", meta=()):
    flat = (c.c_char_p * max(2 * len(meta), 1))(*[x.encode() for pair in meta for x in pair])
    w = c.c_void_p()
    check(
        lib.ps_tensors_create(
            c.byref(w),
            os.fsencode(folder),
            stem.encode(),
            specs(tensors),
            len(tensors),
            limit,
            flat,
            len(meta),
        )
    )
    return w


def write(folder, tensors, limit=0, stem="model", meta=(), piece=1 << 20):
    """tensors: (name, dtype, shape, bytes)."""
    w = create(folder, [t[:3] for t in tensors], limit, stem, meta)
    data = b"".join(t[3] for t in tensors)
    for at in range(0, len(data), piece):
        check(lib.ps_tensors_append(w, data[at : at + piece], len(data[at : at + piece])))
    check(lib.ps_tensors_finish(w))


class Dataset:
    def __init__(self, *paths, vocab=65536):
        array = (c.c_char_p * max(len(paths), 1))(*[os.fsencode(p) for p in paths])
        self.p = c.c_void_p()
        check(lib.ps_dataset_open(c.byref(self.p), array, len(paths), vocab))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        lib.ps_dataset_close(self.p)

    def n(self, seq_len):
        return lib.ps_dataset_n_sequences(self.p, seq_len)

    def read(self, seq_len, idx):
        import numpy as np

        tokens, targets = np.zeros(max(seq_len, 1), np.int32), np.zeros(max(seq_len, 1), np.int32)
        begins = np.full(max(seq_len, 1), 9, np.uint8)
        out = (tokens.ctypes.data, targets.ctypes.data, begins.ctypes.data)
        check(lib.ps_dataset_read(self.p, seq_len, idx, *out))
        self.begins = begins
        return tokens, targets


def build_shim(source, out):
    """A shared object of one C file and the library's archive: reaches internal functions, which
    libpenstock.so hides."""
    archive = BUILD / "lib" / "libpenstock.a"
    if not archive.exists():
        subprocess.run(
            [
                "make",
                "-C",
                ROOT,
                f"VENV={sys.prefix}",
                f"BUILD={os.path.relpath(BUILD, ROOT)}",
                os.path.relpath(archive, ROOT),
            ],
            check=True,
        )
    flags = [
        "-shared",
        "-fPIC",
        "-D_GNU_SOURCE",
        f"-I{ROOT}/include",
        f"-I{ROOT}/native",
        "-pthread",
    ]
    subprocess.run(
        [os.environ.get("CC", "cc"), *flags, "-o", out, source, archive, "-lm", "-ldl"], check=True
    )
    return c.CDLL(str(out))
