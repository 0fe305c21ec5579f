#!/usr/bin/env python3
"""Writes a freshly initialised model directory in Hugging Face layout.

    python models/init_model.py CONFIG OUT [--seed N] [--dtype bf16|fp32] [--tokenizer FILE]
                                           [--max-shard-size 5GB] [--overwrite]
    python models/init_model.py models/8b.json my_8B_model

Values, where L is num_hidden_layers:
    matrices             normal(0, initializer_range), which is 0.02 by default
    o_proj, down_proj    normal(0, initializer_range / sqrt(2 L)), so that the variance of the
                         residual stream does not grow with depth
    norms, biases        1, 0; where a family's norms multiply by 1 + w (Gemma), w is 0

- Memory stays below 200 MB whatever the model's size: values are made in slices of 2^20 elements.
- A tensor's values depend on the seed and on its name alone. Philox is keyed by both, and each
  slice has its own counter. The number of threads, the shard size and the order of tensors change
  nothing.
- The directory appears under its name when it is complete. A model in it is replaced as a whole or
  not at all; other files in it stay.

Exit codes: 0 done, 1 the disk failed at the end, 2 bad input, 130 interrupted.

This script stands alone on purpose: it needs Python and numpy, but no build of Penstock. It
therefore has its own copy of two things: open_input() (python/penstock/files.py,
native/core/file.c) and the replacement of a model directory (native/io/stage.c). Change both copies
together.
"""

import argparse
import collections
import concurrent.futures
import ctypes
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import time

import numpy as np

SLICE = 1 << 20
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
}
GEMMA = ("gemma2", "gemma3_text")
# what transformers takes for absent keys
KV_HEADS = dict(qwen2=32, qwen3=32, mistral=8, ministral=8, gemma2=4, gemma3_text=4, smollm3=4)
HEAD_DIM = dict(qwen3=128, gemma2=256, gemma3_text=256)
TIED = (*GEMMA, "smollm3")
# a block's norms, before and after o_proj in the file
BEFORE = {"olmo2": ()}
AFTER = {
    "olmo2": ("post_attention", "post_feedforward"),
    **dict.fromkeys(GEMMA, ("post_attention", "pre_feedforward", "post_feedforward")),
}
DTYPES = {"bf16": ("BF16", 2, "bfloat16"), "fp32": ("F32", 4, "float32")}

# kind: "ones", "zeros", or the standard deviation
Tensor = collections.namedtuple("Tensor", "name shape kind")


class BadInput(Exception):
    pass


class Halfway(Exception):
    """The new model counts, but the replacement of the old one is not complete."""


# ---- the config ----------------------------------------------------------------------------------


def regular(path, flags):
    """An opener that never waits, for example for a named pipe. See the note on copies above."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", path)


def load_json(path):
    try:
        with open(path, encoding="utf-8", opener=regular) as f:
            value = json.load(f)
    except OSError as e:
        raise BadInput(f"{path}: cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{path}: is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: must be a JSON object")
    return value


def load_config(path):
    cfg = load_json(path)
    names = cfg.get("architectures")
    if names is None:
        names = [a for a, t in ARCHITECTURES.items() if t == cfg.get("model_type")]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        given = cfg.get("architectures") or cfg.get("model_type")
        raise BadInput(
            f"{path}: architectures is {json.dumps(given)}: one of {', '.join(ARCHITECTURES)} is "
            "needed"
        )
    cfg["architectures"], kind = names, ARCHITECTURES[names[0]]
    if cfg.setdefault("model_type", kind) != kind:
        raise BadInput(
            f"{path}: model_type is {json.dumps(cfg['model_type'])} but architectures says "
            f"{names[0]}"
        )
    sizes = read_sizes(path, cfg, kind)
    for key in ("attention_bias", "mlp_bias"):
        if cfg.get(key) and not (kind == "qwen2" and key == "attention_bias"):
            raise BadInput(
                f"{path}: {key} is {json.dumps(cfg[key])}: such biases are not supported, set it "
                "to false"
            )
    std = cfg.get("initializer_range", 0.02)
    if isinstance(std, bool) or not isinstance(std, (int, float)) or not 0 < std <= 10:
        raise BadInput(
            f"{path}: initializer_range is {json.dumps(std)}: a number above 0 and at most 10 is "
            "needed"
        )
    return cfg, sizes


def read_sizes(path, cfg, kind):
    def size(key, default=None, limit=1 << 24):
        value = cfg.get(key, default)
        value = default if value is None else value
        if value is None:
            raise BadInput(f"{path}: {key} is missing: the config must give it")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise BadInput(
                f"{path}: {key} is {json.dumps(value)}: a whole number from 1 to {limit} is needed"
            )
        return value

    s = argparse.Namespace(kind=kind)
    s.vocab, s.dim, s.ffn = (
        size("vocab_size"),
        size("hidden_size", limit=1 << 20),
        size("intermediate_size", limit=1 << 22),
    )
    s.layers, s.heads = (
        size("num_hidden_layers", limit=4096),
        size("num_attention_heads", limit=1 << 14),
    )
    absent = s.heads if "num_key_value_heads" in cfg else KV_HEADS.get(kind, s.heads)
    s.kv_heads = size("num_key_value_heads", absent, limit=1 << 14)
    head_dim = None if "head_dim" in cfg else HEAD_DIM.get(kind)
    if head_dim is None and cfg.get("head_dim") is None:
        if s.dim % s.heads:
            raise BadInput(
                f"{path}: hidden_size is {s.dim}: without head_dim it must be a multiple of "
                f"num_attention_heads, {s.heads}"
            )
        head_dim = s.dim // s.heads
    s.head_dim = size("head_dim", head_dim, limit=4096)
    if s.heads % s.kv_heads:
        raise BadInput(
            f"{path}: num_attention_heads is {s.heads}: it must be a multiple of "
            f"num_key_value_heads, {s.kv_heads}"
        )
    if s.head_dim % 2:
        raise BadInput(f"{path}: head_dim is {s.head_dim}: it must be even, RoPE turns pairs")
    s.tied = cfg.get("tie_word_embeddings", kind in TIED)
    if not isinstance(s.tied, bool):
        raise BadInput(
            f"{path}: tie_word_embeddings is {json.dumps(s.tied)}: true or false is needed"
        )
    return s


def list_tensors(cfg, s):
    std = float(cfg.get("initializer_range", 0.02))
    out = std / math.sqrt(2 * s.layers)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    one = "zeros" if s.kind in GEMMA else "ones"  # Gemma's norms multiply by 1 + w
    yield Tensor("model.embed_tokens.weight", (s.vocab, s.dim), std)
    for i in range(s.layers):
        p = f"model.layers.{i}."
        for name in BEFORE.get(s.kind, ("input",)):
            yield Tensor(f"{p}{name}_layernorm.weight", (s.dim,), one)
        fused = s.kind == "phi3"
        for name, rows in [("qkv", q + 2 * kv)] if fused else (("q", q), ("k", kv), ("v", kv)):
            yield Tensor(f"{p}self_attn.{name}_proj.weight", (rows, s.dim), std)
        if s.kind == "qwen2":
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                yield Tensor(f"{p}self_attn.{name}_proj.bias", (rows,), "zeros")
        if s.kind in ("qwen3", "gemma3_text", "olmo2"):
            for name, n in (("q", q), ("k", kv)):
                n = n if s.kind == "olmo2" else s.head_dim
                yield Tensor(f"{p}self_attn.{name}_norm.weight", (n,), one)
        yield Tensor(p + "self_attn.o_proj.weight", (s.dim, q), out)
        for name in AFTER.get(s.kind, ("post_attention",)):
            yield Tensor(f"{p}{name}_layernorm.weight", (s.dim,), one)
        for name, n in [("gate_up", 2)] if fused else (("gate", 1), ("up", 1)):
            yield Tensor(f"{p}mlp.{name}_proj.weight", (n * s.ffn, s.dim), std)
        yield Tensor(p + "mlp.down_proj.weight", (s.dim, s.ffn), out)
    yield Tensor("model.norm.weight", (s.dim,), one)
    if not s.tied:
        yield Tensor("lm_head.weight", (s.vocab, s.dim), std)


# ---- values --------------------------------------------------------------------------------------


def to_bf16(x):
    """The bf16 bits of fp32 values, rounded to nearest even. Overwrites x."""
    bits = x.view(np.uint32)
    odd = bits >> 16
    odd &= 1
    bits += odd
    bits += 0x7FFF
    bits >>= 16
    return bits.astype(np.uint16)


def make_slice(seed, tensor, k, n, dtype):
    """Bytes of elements [k * SLICE, k * SLICE + n) of the tensor."""
    if tensor.kind in ("ones", "zeros"):
        x = np.full(n, tensor.kind == "ones", dtype=np.float32)
    else:
        digest = hashlib.sha256(f"{seed}:{tensor.name}".encode()).digest()
        key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
        counter = np.array([0, 0, k, 0], dtype=np.uint64)
        x = np.random.Generator(np.random.Philox(key=key, counter=counter)).standard_normal(
            n, dtype=np.float32
        )
        x *= np.float32(tensor.kind)
    return (
        to_bf16(x).astype("<u2", copy=False) if dtype == "bf16" else x.astype("<f4", copy=False)
    ).data


def slices(seed, tensors, dtype, workers):
    """The bytes of all tensors in order. Threads make them ahead of the writer."""
    jobs = (
        (t, k, min(SLICE, math.prod(t.shape) - k * SLICE))
        for t in tensors
        for k in range(-(-math.prod(t.shape) // SLICE))
    )
    pending = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for t, k, n in jobs:
            pending.append(pool.submit(make_slice, seed, t, k, n, dtype))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# ---- files ---------------------------------------------------------------------------------------


def cut_shards(tensors, element, limit):
    shards, room = [[]], limit
    for t in tensors:
        size = math.prod(t.shape) * element
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(t)
        room -= size
    return shards


def write_shard(path, shard, seed, dtype, workers, progress):
    name, element, _ = DTYPES[dtype]
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for t in shard:
        end = at + math.prod(t.shape) * element
        header[t.name] = {"dtype": name, "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for piece in slices(seed, shard, dtype, workers):
            f.write(piece)
            progress(piece.nbytes)


def write_model(folder, tensors, args, progress):
    shards = cut_shards(tensors, DTYPES[args.dtype][1], args.max_shard_size)
    workers = min(4, os.cpu_count() or 1)
    files, weight_map = [], {}
    for i, shard in enumerate(shards):
        one = len(shards) == 1
        files.append(
            "model.safetensors" if one else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        )
        write_shard(
            os.path.join(folder, files[-1]), shard, args.seed, args.dtype, workers, progress
        )
        weight_map.update((t.name, files[-1]) for t in shard)
    if len(shards) > 1:
        total = sum(math.prod(t.shape) for t in tensors) * DTYPES[args.dtype][1]
        write_json(
            os.path.join(folder, "model.safetensors.index.json"),
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )
    return files


def write_json(path, value):
    with open(path, "x", encoding="utf-8") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
        f.write("\n")


def token_names(path, tokenizer):
    """id -> token of a tokenizer.json. BPE and WordPiece have an object of tokens, Unigram a
    list."""
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocab, dict):
        names = {i: t for t, i in vocab.items()}
    elif isinstance(vocab, list):
        names = {i: entry[0] for i, entry in enumerate(vocab)}
    else:
        raise BadInput(f"{path}: model.vocab is missing: a Hugging Face tokenizer.json is needed")
    names.update((t["id"], t["content"]) for t in tokenizer.get("added_tokens") or [])
    if not names or not all(isinstance(i, int) for i in names):
        raise BadInput(f"{path}: model.vocab must map tokens to whole numbers")
    return names


def load_tokenizer(path, cfg):
    """The tokenizer_config.json that AutoTokenizer needs."""
    names = token_names(path, load_json(path))
    if max(names) >= cfg["vocab_size"]:
        raise BadInput(
            f"{path}: has token id {max(names)}: the config's vocab_size is {cfg['vocab_size']}, "
            f"raise it to {max(names) + 1} or more"
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # what a model's forward() takes: transformers would add token_type_ids
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if cfg.get("max_position_embeddings"):
        config["model_max_length"] = cfg["max_position_embeddings"]
    for which in ("bos", "eos"):
        token = cfg.get(f"{which}_token_id")
        token = token[0] if isinstance(token, list) and token else token
        if token in names:
            config[f"{which}_token"] = names[token]
    return config


def write_tokenizer(folder, path, config):
    shutil.copyfile(path, os.path.join(folder, "tokenizer.json"))
    write_json(os.path.join(folder, "tokenizer_config.json"), config)
    for name in TOKENIZER:  # files beside the given tokenizer replace the derived ones
        beside = os.path.join(os.path.dirname(os.path.abspath(path)), name)
        if name != "tokenizer.json" and os.path.isfile(beside):
            shutil.copyfile(beside, os.path.join(folder, name))


# ---- replacing the model of a directory as a whole -----------------------------------------------
# native/io/stage.c explains the steps and uses the same names.


OURS, SAVE, OLD, PENDING, REPLACING = (
    ".penstock-",
    ".penstock-save-",
    ".penstock-old-",
    ".penstock-new",
    ".replacing",
)
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
)
WEIGHTS = re.compile(
    r"(.+?)(?:-[0-9]{5}-of-[0-9]{5}\.safetensors|\.safetensors(?:\.index\.json)?)", re.DOTALL
)
DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
REFUSED = (
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EBUSY,
    errno.EPERM,
    errno.EACCES,
    errno.EROFS,
)


def in_model(name):
    return (
        name in ("config.json", "generation_config.json")
        or name in TOKENIZER
        or bool(WEIGHTS.fullmatch(name))
    )


def there(path):
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def superseded(folder, name):
    """The whole model in the folder replaces file `name` of an older model. Weights of one stem are
    replaced together, and so are the files of a tokenizer."""
    m = WEIGHTS.fullmatch(name)
    names = [
        name,
        *(TOKENIZER if name in TOKENIZER else ()),
        *((f"{m[1]}.safetensors", f"{m[1]}.safetensors.index.json") if m else ()),
    ]
    return in_model(name) and any(there(os.path.join(folder, n)) for n in names)


def is_at(fd, path):
    found = there(path)
    return found is not None and os.path.samestat(os.fstat(fd), found)


def lock(fd, how):
    """True: locked now. False: another process has the lock. None: this file system has no
    locks."""
    try:
        fcntl.flock(fd, how)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:  # EINVAL: this file system cannot sync directories
            raise
    finally:
        os.close(fd)


def copy_facts(source, target):
    st, now = os.stat(source), os.stat(target)
    if (st.st_uid, st.st_gid) != (now.st_uid, now.st_gid):
        os.chown(target, st.st_uid, st.st_gid)
    for name in os.listxattr(source):
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError:
            if not name.startswith(("security.", "trusted.")):  # the system sets these itself
                raise
    os.chmod(target, stat.S_IMODE(st.st_mode))
    os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))


def carry(source, target):
    """Link a file to `target`; copy a folder, with links to its files."""
    st = there(source)
    if st is None:
        return
    if st.st_dev != os.stat(os.path.dirname(source)).st_dev:
        raise OSError(errno.EXDEV, "a mount point cannot be carried", source)
    if not stat.S_ISDIR(st.st_mode):
        os.link(source, target, follow_symlinks=False)
        return
    os.mkdir(target, 0o700)
    for name in os.listdir(source):
        carry(os.path.join(source, name), os.path.join(target, name))
    copy_facts(source, target)
    sync(target)


def remove_tree(path):
    if stat.S_ISDIR(os.lstat(path).st_mode):
        os.chmod(path, 0o700)
        for name in os.listdir(path):
            remove_tree(os.path.join(path, name))
        os.rmdir(path)
    else:
        os.unlink(path)


def retire(source, target, top, fresh):
    """Empty a directory whose place `target` has taken. Files that `target` does not know move
    there. top: both are model directories, not folders in them. fresh: the place was taken just
    now."""
    os.chmod(source, 0o700)
    for name in os.listdir(source):
        a, b = os.path.join(source, name), os.path.join(target, name)
        old, new = os.lstat(a), there(b)
        if top and (name == PENDING or (superseded(target, name) if fresh else in_model(name))):
            remove_tree(a)
        elif new is None:
            os.rename(a, b)
        elif stat.S_ISDIR(old.st_mode):
            retire(a, b, False, fresh)
        elif fresh and not os.path.samestat(old, new):
            os.rename(a, b)
        else:
            os.unlink(a)
    os.rmdir(source)


def move_pending(out):
    """Move the files of out/.penstock-new into `out`. May be called again after any failure."""
    pending = os.path.join(out, PENDING)
    try:
        if there(os.path.join(pending, REPLACING)):
            old = [n for n in os.listdir(out) if superseded(pending, n)]
            for name in sorted(old, key=lambda n: n != "config.json"):
                os.unlink(os.path.join(out, name))
            sync(out)
            os.unlink(os.path.join(pending, REPLACING))
            sync(pending)
        for name in sorted(
            os.listdir(pending), key=lambda n: (n == "config.json", n.endswith(".index.json"))
        ):
            os.rename(os.path.join(pending, name), os.path.join(out, name))
        sync(out)
        os.rmdir(pending)
    except OSError as e:
        raise Halfway(
            f"{out}: the new model is complete in {pending} and counts, but "
            f"{e.filename or 'a file'} cannot be "
            f"moved: {e.strerror}; the next save into {out} tries again"
        ) from None


def settle(out):
    """Complete the move of an earlier save, or wait for one that another process makes."""
    pending = os.path.join(out, PENDING)
    while there(pending):
        fd = os.open(pending, DIR_FLAGS)
        try:
            lock(fd, fcntl.LOCK_EX)
            if is_at(fd, pending):
                move_pending(out)
        finally:
            os.close(fd)


def exchange(a, b):
    """Let two directories change places. False: they cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    at_cwd, rename_exchange = -100, 2
    if libc.renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), rename_exchange) == 0:
        return True
    if ctypes.get_errno() in REFUSED:
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), b)


class Stage:
    """The directory `path`, into which the new model is written."""

    def __init__(self, out):
        self.target = os.path.realpath(out)
        self.parent, self.base = os.path.split(self.target)
        self.fd = None
        over = os.path.isdir(self.target)
        if over:
            settle(self.target)
        self.clear(over)
        self.make(self.target if over else self.parent, "" if over else "." + self.base)
        cwd = os.path.join(os.getcwd(), "")
        self.beside = not over
        if over and self.base and not cwd.startswith(os.path.join(self.target, "")):
            try:
                self.rename(SAVE)
                self.beside = True
            except OSError:
                pass  # the stage stays inside the directory

    def make(self, folder, prefix):
        while True:
            self.path = os.path.join(folder, prefix + SAVE + secrets.token_hex(8))
            os.mkdir(self.path)
            try:
                self.fd = os.open(self.path, DIR_FLAGS)
            except FileNotFoundError:
                continue  # another save took it for a leftover
            except OSError:
                os.rmdir(self.path)
                raise
            if lock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB) is not False and is_at(
                self.fd, self.path
            ):
                break
            os.close(self.fd)
        self.mode = stat.S_IMODE(os.fstat(self.fd).st_mode)
        os.fchmod(self.fd, 0o700)

    def rename(self, kind):
        path = os.path.join(self.parent, "." + self.base + kind + secrets.token_hex(8))
        os.rename(self.path, path)
        self.path = path

    def clear(self, over):
        """Remove what saves that were cut off have left."""
        inside = (
            [os.path.join(self.target, n) for n in os.listdir(self.target) if n.startswith(SAVE)]
            if over
            else []
        )
        stem = "." + self.base
        for path in inside + [
            os.path.join(self.parent, n)
            for n in os.listdir(self.parent)
            if n.startswith((stem + SAVE, stem + OLD))
        ]:
            try:
                self.clear_one(path, over)
            except OSError as e:
                print(
                    f"init_model: {path}, left by a save that was cut off, cannot be removed: "
                    f"{e.strerror}",
                    file=sys.stderr,
                )

    def clear_one(self, path, over):
        fd = os.open(path, DIR_FLAGS)
        try:
            trusted = {os.geteuid(), *([os.stat(self.target).st_uid] if over else [])}
            if (
                os.fstat(fd).st_uid in trusted
                and lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                and is_at(fd, path)
            ):
                if OLD not in os.path.basename(path):
                    remove_tree(path)
                elif over:
                    retire(path, self.target, True, False)
        finally:
            os.close(fd)

    def abort(self):
        if self.fd is not None:
            if is_at(self.fd, self.path):  # not so after it has taken the target's place
                remove_tree(self.path)
            os.close(self.fd)
            self.fd = None

    def commit(self):
        for name in os.listdir(self.path):
            sync(os.path.join(self.path, name))
        sync(self.path)
        if not os.path.isdir(self.target):
            os.fchmod(self.fd, self.mode)
            os.rename(self.path, self.target)
            self.sync_parent()
        elif not (self.beside and self.change_places()):
            self.move_in()

    def sync_parent(self):
        try:
            sync(self.parent)
        except OSError as e:
            raise Halfway(
                f"{self.target}: has the new model, but it may not outlast a power cut: "
                f"{e.strerror}"
            ) from None

    def change_places(self):
        kept = [
            n
            for n in os.listdir(self.target)
            if not n.startswith(OURS) and not superseded(self.path, n)
        ]
        done = False
        try:
            for name in kept:
                carry(os.path.join(self.target, name), os.path.join(self.path, name))
            copy_facts(self.target, self.path)
            ready = True
        except OSError:
            ready = False  # a file cannot be linked
        if ready:
            sync(self.path)
            self.rename(OLD)
            done = exchange(self.path, self.target)
            if not done:
                self.rename(SAVE)
        if not done:
            for name in kept:
                if there(os.path.join(self.path, name)):
                    remove_tree(os.path.join(self.path, name))
            return False
        self.sync_parent()  # until the exchange is on the disk, the old directory must stay whole
        try:
            retire(self.path, self.target, True, True)
        except OSError as e:
            print(
                f"init_model: {self.target}: has the new model, but the old directory could not be "
                "removed: it is "
                f"{self.path}: {e.strerror}; the next save tries again",
                file=sys.stderr,
            )
        return True

    def move_in(self):
        with open(os.path.join(self.path, REPLACING), "xb"):
            pass
        os.fchmod(self.fd, stat.S_IMODE(os.stat(self.target).st_mode) & 0o777)
        sync(self.path)
        pending = os.path.join(self.target, PENDING)
        while True:
            settle(self.target)
            try:
                os.rename(self.path, pending)
                break
            except OSError as e:
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        try:
            sync(self.target)
        except OSError as e:
            raise Halfway(
                f"{self.target}: has the new model, but it may not outlast a power cut: "
                f"{e.strerror}"
            ) from None
        move_pending(self.target)


# ---- the command ---------------------------------------------------------------------------------


def shard_size(text):
    m = re.fullmatch(r"([0-9.]+)\s*(|[KMGT]i?B|B)", text, re.IGNORECASE)
    try:
        n = int(
            float(m[1])
            * (1024 if "I" in m[2].upper() else 1000)
            ** " KMGT".index((m[2].upper() + " ")[0].replace("B", " "))
        )
    except (TypeError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 5GB, 500MB or 2GiB") from None
    if n < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is too small: write 5GB, 500MB or 2GiB")
    return n


def parse_args(argv):
    p = argparse.ArgumentParser(
        description="Write a freshly initialised model directory in Hugging Face layout."
    )
    p.add_argument(
        "config", help="config.json of a Llama, Qwen2 or Qwen3 model, such as models/8b.json"
    )
    p.add_argument("out", help="directory to make")
    p.add_argument("--seed", type=int, default=0, help="seed of the values (default: 0)")
    p.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        help="dtype of the tensors (default: the config's torch_dtype, else bf16)",
    )
    p.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json to copy into the directory")
    p.add_argument(
        "--max-shard-size",
        type=shard_size,
        default="5GB",
        metavar="SIZE",
        help="largest file (default: 5GB)",
    )
    p.add_argument(
        "--overwrite", action="store_true", help="replace a model directory of this name"
    )
    return p.parse_args(argv)


def check_out(out, overwrite, need):
    parent = there = os.path.dirname(os.path.abspath(out))
    if os.path.lexists(out) and not os.path.isdir(out):
        raise BadInput(f"{out}: is a file: choose another name")
    if os.path.isdir(out) and any(not n.startswith(SAVE) for n in os.listdir(out)):
        if not overwrite:
            raise BadInput(
                f"{out}: is not empty: choose another name, or replace it with --overwrite"
            )
        if not any(
            os.path.isfile(os.path.join(out, p))
            for p in ("config.json", os.path.join(PENDING, "config.json"))
        ):
            raise BadInput(
                f"{out}: has no config.json and so is no model directory: choose another name"
            )
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    try:
        free = shutil.disk_usage(there).free
        if need > free:
            raise BadInput(
                f"{out}: needs {need / 1e9:.1f} GB of disk, and {free / 1e9:.1f} GB are free: free "
                "some, or choose another place"
            )
        os.makedirs(parent, exist_ok=True)
    except OSError as e:
        raise BadInput(f"{parent}: cannot be used: {e.strerror}") from None
    if there != parent:
        print(f"init_model: {out}: its parent {parent} did not exist and is made", file=sys.stderr)


def progress_printer(total):
    start, state = time.monotonic(), {"done": 0, "shown": time.monotonic()}
    live = sys.stderr.isatty()

    def progress(n):
        state["done"] += n
        now = time.monotonic()
        if now - state["shown"] >= (0.2 if live else 10) or (live and state["done"] == total):
            state["shown"] = now
            rate = state["done"] / max(now - start, 1e-9)
            left = (total - state["done"]) / max(rate, 1)
            line = f"  {state['done'] / 1e9:8.3f} of {total / 1e9:.3f} GB  {rate / 1e6:6.0f} MB/s  {left:5.0f} s left"
            print(
                ("\r" if live else "") + line, end="" if live else "\n", file=sys.stderr, flush=True
            )

    return progress, lambda: print(file=sys.stderr) if live else None


def run(args):
    cfg, sizes = load_config(args.config)
    if args.dtype is None:
        given = cfg.get("torch_dtype") or cfg.get("dtype")
        args.dtype = "fp32" if given == "float32" else "bf16"
    cfg.pop("dtype", None)
    cfg["torch_dtype"] = DTYPES[args.dtype][2]
    tokenizer = load_tokenizer(args.tokenizer, cfg) if args.tokenizer else None
    tensors = list(list_tensors(cfg, sizes))
    n = sum(math.prod(t.shape) for t in tensors)
    total = n * DTYPES[args.dtype][1]
    check_out(args.out, args.overwrite, total)
    try:
        stage = Stage(args.out)
    except OSError as e:
        raise BadInput(f"{args.out}: cannot be written: {e.strerror}") from None
    print(
        f"{args.out}: {cfg['architectures'][0]}, {n:,} parameters in {len(tensors)} tensors, "
        f"{args.dtype}, seed {args.seed}"
    )
    try:
        progress, end = progress_printer(total)
        files = write_model(stage.path, tensors, args, progress)
        end()
        write_json(os.path.join(stage.path, "config.json"), cfg)
        if args.tokenizer:
            write_tokenizer(stage.path, args.tokenizer, tokenizer)
        size = sum(e.stat().st_size for e in os.scandir(stage.path))
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the replacement is short: let it finish
        stage.commit()
    finally:
        stage.abort()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    print(
        f"{args.out}: {size:,} bytes in {len(files)} safetensors "
        f"file{'s' * (len(files) > 1)}{', with tokenizer' if tokenizer else ''}"
    )


SIGNALS = (signal.SIGINT, signal.SIGTERM)


def interrupted(signum, frame):
    raise KeyboardInterrupt


def main(argv=None):
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, interrupted)
    try:
        run(args)
    except BadInput as e:
        print(f"init_model: {e}", file=sys.stderr)
        return 2
    except Halfway as e:
        print(f"init_model: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(
            f"init_model: {e.filename or args.out}: {e.strerror or e}: no file was left",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("init_model: interrupted: no file was left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
