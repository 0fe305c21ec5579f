"""Generates tokens from a model directory, with a cache of keys and values."""

from dataclasses import replace

from ._handle import ActiveHandle, Closable
from ._lib import as_dict, callback, check, encode_path, ffi, lib, progress_callback, struct
from .lora import Lora
from .model import DTYPES
from .plan import Hardware, parse_bytes

EXPERTS = {"auto": 0, "whole": 1, "on-demand": 2}  # ps_generate_experts


def generate(
    call,
    prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed=0,
    stop_tokens=(),
    on_token=None,
) -> tuple[list[list[int]], dict]:
    """The tokens that call(requests, n, fn, user, stats) gives, and ps_generate_stats. The other
    arguments are those of Generator.run(), and of Trainer.sample()."""
    prompts = [[int(t) for t in p] for p in prompts]
    seeds = list(seed) if isinstance(seed, (list, tuple)) else [seed] * len(prompts)
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts: give one each")
    out, failures = [[] for _ in prompts], []

    def take(_user, request, token):
        out[request].append(token)
        return int(bool(on_token and on_token(request, token)))

    fn = callback("ps_token_fn", take, failures, error=-1)
    stop = ffi.new("int32_t[]", list(stop_tokens) or 1)
    tokens = [ffi.new("int32_t[]", p or 1) for p in prompts]
    requests = ffi.new("ps_generate_request[]", max(1, len(prompts)))
    for i, prompt in enumerate(prompts):
        r = requests[i]
        r.tokens, r.n_tokens, r.max_new_tokens = tokens[i], len(prompt), max_new_tokens
        r.temperature, r.top_p, r.top_k, r.seed = temperature, top_p, top_k, seeds[i]
        r.stop_tokens, r.n_stop_tokens = stop, len(stop_tokens)
    stats = ffi.new("ps_generate_stats *")
    status = call(requests, len(prompts), fn, ffi.NULL, stats)
    if failures:
        raise failures[0]
    check(status)
    return out, as_dict(stats)


class Generator(Closable):
    """Tokens that follow prompts, from the model directory `model_dir`.

    with Generator("my_model", batch=4, context=2048, device_mem="6GiB") as generator:
        print(generator.run([[1, 2, 3]], max_new_tokens=64))

    batch            prompts that are computed at once
    context          tokens that a prompt and what follows it may have together
    device_mem,      caps, in bytes or as "20GiB"; None: no cap. Blocks that do not fit on the
    host_mem         device are streamed
    dtype            "fp32" or "bf16", of weights, activations and cache
    prefill_tokens   tokens of prompts that a step computes at once; 0: 128, on a GPU 1024
    experts          how experts come to the device where not all fit: "whole" blocks in each step,
                     "on-demand", or "auto", the faster
    adapter          directory of a LoRA adapter of the model, in PEFT's layout; None: none
    base             how the frozen matrices beside an adapter are kept and streamed: "bf16", "fp8",
                     "nf4" or "mxfp4", such as the adapter was trained beside (Lora.base)
    deterministic    every run gives the same tokens, on a GPU too; some kernels are slower
    threads          host threads; 0: all CPUs
    backend, gpu     "auto", "cpu" or "cuda"; which of the visible GPUs
    hardware         a Hardware, in place of threads, backend and gpu
    progress         progress(what, done_bytes, total_bytes) is called while weights are loaded

    Raises FormatError, InputOutputError, OutOfMemoryError, InvalidError, and BudgetError, which
    says what is needed.
    """

    def __init__(
        self,
        model_dir,
        *,
        batch: int = 1,
        context: int = 2048,
        device_mem=None,
        host_mem=None,
        dtype: str = "bf16",
        prefill_tokens: int = 0,
        experts: str = "auto",
        adapter=None,
        base: str = "bf16",
        deterministic: bool = False,
        threads: int = 0,
        backend: str = "auto",
        gpu: int = 0,
        hardware: Hardware | None = None,
        progress=None,
    ):
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r}: one of {', '.join(DTYPES)}")
        if experts not in EXPERTS:
            raise ValueError(f"experts {experts!r}: one of {', '.join(EXPERTS)}")
        self.hardware = hardware or Hardware.cached(
            threads, backend, gpu, host_mem, device_mem=device_mem
        )
        cfg = struct(
            "ps_generate_config",
            dtype=DTYPES[dtype],
            device_mem_bytes=parse_bytes(device_mem, "device_mem"),
            host_mem_bytes=parse_bytes(host_mem, "host_mem"),
            n_sequences=batch,
            context=context,
            prefill_tokens=prefill_tokens,
            deterministic=int(deterministic),
            experts=EXPERTS[experts],
        )
        held = None
        if adapter is None and base != "bf16":
            raise ValueError(f"base {base!r} without an adapter: give the one that was trained so")
        if adapter is not None:
            replace(Lora.read(adapter), base=base).fill(cfg.lora)
            held = cfg.adapter_dir = ffi.new("char[]", encode_path(adapter))
        failures = []
        report = progress_callback(progress, failures)
        out = ffi.new("ps_generator **")
        status = lib.ps_generator_create(
            out, encode_path(model_dir), cfg, self.hardware._ptr, report, ffi.NULL
        )
        del held  # the library has read the adapter
        if failures:
            if status >= 0:
                lib.ps_generator_destroy(out[0])
            raise failures[0]
        check(status)
        self._handle = ActiveHandle("generator", out[0], _destroy)
        self.stats = {}

    @property
    def report(self) -> dict:
        """What the generator takes: the fields of ps_generate_report
        (include/penstock/generate.h)."""
        return as_dict(lib.ps_generator_report(self._handle.ptr))

    def run(self, prompts, *, max_new_tokens: int = 128, **options) -> list[list[int]]:
        """The token ids that follow each of `prompts`, lists of token ids. The options:

        temperature   0 (default) takes the most likely token
        top_k         draw from the k likeliest tokens; 0 (default): from all
        top_p         draw from the likeliest tokens whose probabilities add up to p (default 1)
        seed          one for all prompts (default 0), or a list with one each. A prompt's tokens
                      depend on its own seed and not on the other prompts
        stop_tokens   each ends its text and is left out
        on_token      on_token(prompt, token) is called for each token as it comes, prompt being its
                      number in the list; True ends that prompt's text. An exception of on_token
                      ends the call and is raised

        Afterwards `stats` has the fields of ps_generate_stats."""
        with self._handle.turn():
            out, self.stats = generate(
                lambda *args: lib.ps_generator_run(self._handle.ptr, *args),
                prompts,
                max_new_tokens=max_new_tokens,
                **options,
            )
        return out


def _destroy(ptr) -> int:
    lib.ps_generator_destroy(ptr)
    return lib.PS_OK
