"""`penstock compare`: a model in Penstock against the same model in transformers.

penstock compare DIR --hf [DIR]

Both get the same tokens. Compared are the logits of all tokens, the loss, the loss of each
sequence, and every parameter's weights and gradient. Logits are those of the training step whose
gradients are compared. The tolerance is that of penstock.tolerance. Needs torch and transformers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import hub
from ._lib import lib, printed_warnings
from .command import FAILED, OK, Parser, run
from .dataset import Dataset
from .errors import InputOutputError
from .files import DataError
from .model import ModelConfig, bf16_bits
from .plan import Hardware, Plan
from .tolerance import (
    A_LAYER,
    FAMILIES_WITH_POST_NORMS,
    FORWARD_A_LAYER,
    FORWARD_FUSED_ATTENTION,
    FORWARD_HEAD,
    FORWARD_POST_NORMS,
    FUSED_ATTENTION,
    POST_NORMS,
    UNIT,
    delta,
    largest_of,
    loss_noise,
    note_spread,
    relative_error,
)
from .train import Trainer


@dataclass
class Tensor:
    name: str
    same_weights: bool
    max_error: float  # of an element of the gradient
    relative_error: float  # of the gradient
    ok: bool


@dataclass
class Loss:
    what: str  # "all sequences", "sequence 0"
    penstock: float
    transformers: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return abs(self.penstock - self.transformers) < self.tolerance


@dataclass
class Figure:
    """Of all logits."""

    what: str
    found: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.found < self.tolerance


@dataclass
class Logits:
    n_tokens: int
    max_error: float
    same_likeliest: int  # tokens after which both sides have the same likeliest one
    figures: list[Figure]

    @property
    def ok(self) -> bool:
        return all(x.ok for x in self.figures)


@dataclass
class Tolerance:
    """Of a relative error: of a gradient, or of all logits."""

    value: float
    formula: str


@dataclass
class Reference:
    """What transformers computes: fp32, from weights that are rounded as Penstock's."""

    losses: list[float]  # of all sequences, then of each
    weights: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    spread: dict[str, float]
    logits: np.ndarray  # [tokens, vocabulary]


# ---- tokens --------------------------------------------------------------------------------------


def random_batch(vocab_size: int, n: int, seq_len: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets [n, seq_len]."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (n, seq_len + 1), dtype=np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def data_batch(path, vocab_size: int, n: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """The first sequences of token shards. Masks count; each sequence is one document."""
    dataset = Dataset(path, vocab_size)
    have = dataset.n_sequences(seq_len)
    if have < n:
        raise DataError(
            f"--data {path}: has {have} sequences of {seq_len} tokens, and {n} are asked for: lower "
            "--sequences or --seq-len"
        )
    tokens, targets = zip(*(dataset.read(seq_len, i) for i in range(n)))
    for i, row in enumerate(targets):
        if (row < 0).all():
            raise DataError(
                f"--data {path}: sequence {i} has no target: raise --seq-len, or give other data"
            )
    return np.stack(tokens), np.stack(targets)


# ---- the two sides -------------------------------------------------------------------------------


def _import_transformers():
    try:
        import torch
        import transformers
    except ImportError as e:
        raise DataError(
            f"compare needs torch and transformers, and {e.name} is not installed: pip install "
            "torch transformers"
        ) from e
    return torch, transformers


def open_transformers(folder: Path, tied: bool):
    """transformers' model of a directory, in fp32. tied: the head is the embedding."""
    torch, transformers = _import_transformers()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if not tied:  # transformers 4 ties the head whatever the file has
            config.tie_word_embeddings = False
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
        )
    except Exception as e:  # of many kinds
        text = " ".join(str(e).split())
        raise DataError(f"{folder}: transformers cannot open it: {text[:300]}") from e
    missing = sorted(info["missing_keys"])
    if missing:
        raise DataError(f"{folder}: transformers misses the tensor {missing[0]}")
    return model.eval()


def reference(
    folder: Path,
    tied: bool,
    tokens: np.ndarray,
    targets: np.ndarray,
    rounded: bool,
    pad_token_id: int | None = None,
) -> Reference:
    """rounded: to bf16 first. pad_token_id: in place of the one in the directory's config.json."""
    torch, _ = _import_transformers()
    model, spread = open_transformers(folder, tied), {}
    if pad_token_id is not None:
        model.get_input_embeddings().padding_idx = pad_token_id if pad_token_id >= 0 else None
    if rounded:
        model = model.bfloat16().float()
    hooks = note_spread(model, spread)
    ids, wanted = (torch.as_tensor(a).long() for a in (tokens, targets))
    logits = model(ids, use_cache=False).logits.float()
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), ignore_index=-1, reduction="none"
    ).view_as(wanted)
    valid = wanted >= 0
    (each.sum() / valid.sum()).backward()
    for hook in hooks:
        hook.remove()
    sums, counts = each.detach().double().sum(1), valid.sum(1)
    parameters = dict(model.named_parameters())
    saved = model.state_dict().keys() - parameters.keys()  # constants among them have no gradient
    constants = {n: b.numpy() for n, b in model.named_buffers() if n in saved}
    weights = {n: p.detach().numpy() for n, p in parameters.items()}
    gradients = {n: p.grad.numpy() for n, p in parameters.items()}
    return Reference(
        [(sums.sum() / counts.sum()).item(), *(sums / counts).tolist()],
        weights | constants,
        gradients | {n: np.zeros_like(b) for n, b in constants.items()},
        dict.fromkeys(constants, 0.0) | {n: math.sqrt(x) for n, x in spread.items()},
        logits.detach().flatten(0, 1).numpy(),
    )


class LogitErrors:
    """A Plan's on_logits, which compares each token's logits with those of transformers. So
    Penstock's side never has the logits of all tokens."""

    def __init__(self, expected: np.ndarray):
        n = len(expected)
        self.expected = expected
        self.size, self.error, self.largest, self.kl = np.full((4, n), np.nan)  # of each token
        self.same = np.zeros(n, bool)

    @np.errstate(invalid="ignore", over="ignore")  # logits that are not finite differ
    def __call__(self, _step: int, token: int, found: np.ndarray) -> None:
        expected, found = self.expected[token].astype(np.float64), found.astype(np.float64)
        error = np.abs(found - expected)
        self.size[token] = np.sqrt(np.square(expected).mean())
        self.error[token] = np.sqrt(np.square(error).mean())
        self.largest[token] = error.max()
        p, q = (x - x.max() - np.log(np.exp(x - x.max()).sum()) for x in (expected, found))
        self.kl[token] = (np.exp(p) * (p - q)).sum()
        self.same[token] = found.argmax() == expected.argmax()

    def result(self, tolerance: float) -> Logits:
        n, vocab_size = self.expected.shape
        size = math.sqrt(np.square(self.size).mean())
        relative = math.sqrt(np.square(self.error).mean()) / size
        largest = float((self.largest / self.size).max())
        figures = [
            Figure("relative error", relative, tolerance),
            Figure("largest error / token's size", largest, largest_of(n * vocab_size) * tolerance),
            Figure("KL divergence, mean", float(self.kl.mean()), (tolerance * size) ** 2 / 2),
        ]
        return Logits(n, float(self.largest.max()), int(self.same.sum()), figures)


def logit_size(logits: np.ndarray) -> float:
    """The root mean square."""
    return math.sqrt(sum(np.square(row, dtype=np.float64).mean() for row in logits) / len(logits))


def _losses_of_sequences(folder: Path, plan: Plan, tokens, targets) -> list[float]:
    with Trainer(folder, plan, lambda i: (tokens[i], targets[i])) as trainer:
        return [m.loss for m in trainer.steps(len(tokens))]


@dataclass
class Comparison:
    logits: Logits
    losses: list[Loss]
    tensors: list[Tensor]
    logit_tolerance: Tolerance
    tolerance: Tolerance  # of gradients


def compare(
    folder: Path,
    other: Path,
    tokens: np.ndarray,
    targets: np.ndarray,
    *,
    recipe: str = "fp32",
    backend: str = "cpu",
    device_mem=None,
    host_mem=None,
) -> Comparison:
    """The model of `folder` in Penstock against that of `other` in transformers."""
    n, seq_len = tokens.shape
    model, hardware = ModelConfig.read(folder), Hardware.estimate(backend=backend)
    if model.n_labels:
        raise DataError(f"{folder}: has a score, and language models are compared")
    if model.n_experts:
        raise DataError(f"{folder}: has experts, whose tensors are not compared yet")
    options = {
        "seq_len": seq_len,
        "recipe": recipe,
        "clip_norm": 0.0,
        "device_mem": device_mem,
        "host_mem": host_mem,
        "hardware": hardware,
    }
    single = Plan(model, tokens_per_step=seq_len, forward_only=True, **options)
    # what another directory calls its pad token is no difference between the models
    pad = None if other == folder else model.pad_token_id
    tied = bool(model.tied_embeddings)
    expected = reference(other, tied, tokens, targets, recipe != "fp32", pad)
    names = {p.name for p in model.params()}
    for name in sorted(names ^ set(expected.weights)):
        where = other if name in names else folder
        raise DataError(
            f"{where}: has no tensor {name}, unlike {folder if where == other else other}"
        )
    losses = _losses_of_sequences(folder, single, tokens, targets)
    tensors, errors = [], LogitErrors(expected.logits)
    whole = Plan(model, tokens_per_step=n * seq_len, on_logits=errors, **options)
    tolerance = derive_tolerance(model, whole, recipe, n * seq_len)
    with Trainer(folder, whole, lambda _: (tokens, targets), lr=0.0) as trainer:
        weights = {p: trainer.read(p) for p in trainer.params}
        (metrics,) = trainer.steps(1)
        for name in trainer.params:
            found, wanted = trainer.grad(name), expected.gradients[name]
            error = relative_error(found, wanted, expected.spread[name])
            same = _same_bits(_rounded(weights[name], recipe), expected.weights[name])
            ok = same and error < tolerance.value
            max_error = float(np.abs(found - wanted).max())
            tensors.append(Tensor(name, same, max_error, error, ok))
    found_losses = [metrics.loss, *losses]
    counts = [int((targets >= 0).sum()), *((targets >= 0).sum(1).tolist())]
    whats = ["all sequences", *(f"sequence {i}" for i in range(n))]
    scale = tolerance.value * max(1.0, logit_size(expected.logits))
    losses = [
        Loss(what, a, b, loss_noise(scale, c))
        for what, a, b, c in zip(whats, found_losses, expected.losses, counts, strict=True)
    ]
    of_logits = derive_logit_tolerance(model, whole, recipe)
    return Comparison(errors.result(of_logits.value), losses, tensors, of_logits, tolerance)


def _rounded(weights: np.ndarray, recipe: str) -> np.ndarray:
    """As the device has them: a master copy is rounded to bf16, to nearest even."""
    if recipe != "fp32-master":
        return weights
    return (bf16_bits(weights).astype(np.uint32) << 16).view(np.float32)


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Also of NaN, which equals nothing."""
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def derive_tolerance(model: ModelConfig, plan: Plan, recipe: str, n_tokens: int) -> Tolerance:
    a_layer = A_LAYER + POST_NORMS * (model.architecture in FAMILIES_WITH_POST_NORMS)
    a_layer += FUSED_ATTENTION * (plan.hardware.backend == lib.PS_BACKEND_CUDA)
    n_chunks = plan.report["n_chunks"]
    longest = max(model.vocab_size, model.ffn_dim, model.n_heads * model.head_dim, n_tokens)
    return _tolerance(recipe, model.n_layers, a_layer, n_chunks, "chunks", longest)


def derive_logit_tolerance(model: ModelConfig, plan: Plan, recipe: str) -> Tolerance:
    a_layer = FORWARD_A_LAYER
    a_layer += FORWARD_POST_NORMS * (model.architecture in FAMILIES_WITH_POST_NORMS)
    a_layer += FORWARD_FUSED_ATTENTION * (plan.hardware.backend == lib.PS_BACKEND_CUDA)
    longest = max(model.dim, model.ffn_dim, model.n_heads * model.head_dim, plan.config.seq_len)
    return _tolerance(recipe, model.n_layers, a_layer, FORWARD_HEAD, "of the head", longest)


def _tolerance(recipe, n_layers, a_layer, n_more, more, longest) -> Tolerance:
    value = delta(recipe, n_layers, n_more, longest, a_layer)
    formula = f"u sqrt({a_layer} * {n_layers} layers + {n_more} {more})"
    if recipe == "fp32":  # transformers rounds as often
        value *= math.sqrt(2)
        return Tolerance(value, f"{formula} sqrt(2 * {longest} terms), u = 2^-24")
    return Tolerance(value, f"{formula}, u = 2^-8")


# ---- command line --------------------------------------------------------------------------------


def _parser() -> Parser:
    p = Parser(
        prog="penstock compare",
        description="Compare logits, loss and gradients of a model with transformers'.",
        epilog="example: penstock compare my_model --hf --device-mem 64MiB",
    )
    p.add_argument("model", metavar="DIR", help="model directory, which Penstock loads")
    p.add_argument(
        "--hf",
        nargs="?",
        const="",
        required=True,
        metavar="DIR",
        help="compare with transformers, which loads this directory (default: the same)",
    )
    p.add_argument("--recipe", choices=UNIT, default="fp32", help="default: fp32")
    p.backend("cpu")
    p.count("--seq-len", 1, 2**30, "tokens a sequence (default: 64)", 64)
    p.count("--sequences", 1, 2**30, "how many sequences (default: 2)", 2)
    p.count("--seed", 0, 2**53, "of the random tokens (default: 0)")
    p.add_argument(
        "--data", metavar="DIR", help="token shards, whose first sequences are the tokens"
    )
    p.caps()
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def _print_table(args, result: Comparison) -> None:
    verdicts = {True: "ok", False: "DIFFERS"}
    logits, tolerance = result.logits, result.logit_tolerance
    print(f"{args.recipe}, {args.sequences} sequences of {args.seq_len} tokens")
    print(f"tolerance of logits: {tolerance.value:.2e} = {tolerance.formula}")
    tolerance = result.tolerance
    print(f"tolerance of gradients: {tolerance.value:.2e} = {tolerance.formula}\n")
    print(f"{'logits':<38}{'error':>11}{'tolerance':>11}")
    for x in logits.figures:
        print(f"{x.what:<38}{x.found:>11.1e}{x.tolerance:>11.1e}  {verdicts[x.ok]}")
    print(f"{'largest error':<38}{logits.max_error:>11.1e}")
    likeliest = f"{logits.same_likeliest} of {logits.n_tokens}"
    print(f"{'same likeliest token':<32}{likeliest:>17}")
    print(f"\n{'loss':<24}{'Penstock':>12}{'transformers':>14}{'error':>11}{'tolerance':>11}")
    for x in result.losses:
        error = abs(x.penstock - x.transformers)
        figures = f"{x.penstock:>12.6f}{x.transformers:>14.6f}{error:>11.1e}{x.tolerance:>11.1e}"
        print(f"{x.what:<24}{figures}  {verdicts[x.ok]}")
    width = max(len(t.name) for t in result.tensors) + 2
    print(f"\n{'tensor':<{width}}{'weights':>8}{'max error':>11}{'relative':>10}")
    for t in result.tensors:
        weights = "same" if t.same_weights else "differ"
        print(
            f"{t.name:<{width}}{weights:>8}{t.max_error:>11.1e}{t.relative_error:>10.1e}  "
            f"{verdicts[t.ok]}"
        )


def _finite(value, otherwise=None):
    """The value; `otherwise` in place of a number that is not finite."""
    return otherwise if isinstance(value, float) and not math.isfinite(value) else value


def _fields(result) -> dict:
    """Of a dataclass, as JSON has them: null stands for a number that is not finite."""
    return {name: _finite(value) for name, value in dataclasses.asdict(result).items()}


def _checked(result) -> dict:
    return _fields(result) | {"ok": result.ok}


def _verdict(result: Comparison) -> str | None:
    """What differs; None: nothing."""
    altered = [t.name for t in result.tensors if not t.same_weights]
    if altered:
        rest = f" (and {len(altered) - 1} more)" if len(altered) > 1 else ""
        return f"the weights of {altered[0]}{rest} are not the same"
    figure = next((x for x in result.logits.figures if not x.ok), None)
    if figure:
        return (
            f"the logits differ: {figure.what} {figure.found:.2e}, tolerance {figure.tolerance:.2e}"
        )
    wrong = [t for t in result.tensors if not t.ok]
    if wrong:
        worst = max(wrong, key=lambda t: _finite(t.relative_error, math.inf))
        return (
            f"the gradient of {worst.name} is wrong by {worst.relative_error:.2e}, and "
            f"{result.tolerance.value:.2e} is the tolerance"
        )
    other = next((x for x in result.losses if not x.ok), None)
    return other and (
        f"the loss of {other.what} is {other.penstock:.6f}, and {other.transformers:.6f} in "
        "transformers"
    )


def _compare(args) -> int:
    needs = hub.CONFIG, hub.WEIGHTS
    folder = Path(hub.find("", args.model, needs))
    other = Path(hub.find("--hf", args.hf, needs)) if args.hf else folder
    try:
        for option, path in (("", folder), ("--hf ", other)):
            if not path.is_dir():
                raise DataError(f"{option}{path}: there is no such directory")
        vocab_size = ModelConfig.read(folder).vocab_size
        if args.data:
            batch = data_batch(args.data, vocab_size, args.sequences, args.seq_len)
        else:
            batch = random_batch(vocab_size, args.sequences, args.seq_len, args.seed)
        result = compare(
            folder,
            other,
            *batch,
            recipe=args.recipe,
            backend=args.backend,
            device_mem=args.device_mem,
            host_mem=args.host_mem,
        )
    except (InputOutputError, ValueError) as e:  # compare writes nothing
        raise DataError(str(e)) from e
    difference = _verdict(result)
    if args.json:
        content = {
            "model": os.fspath(folder),
            "hf": os.fspath(other),
            "recipe": args.recipe,
            "ok": difference is None,
            "difference": difference,
            "tolerance": _fields(result.tolerance),
            "logit_tolerance": _fields(result.logit_tolerance),
            "logits": _fields(result.logits)
            | {"figures": [_checked(x) for x in result.logits.figures]},
            "losses": [_checked(x) for x in result.losses],
            "tensors": [_fields(t) for t in result.tensors],
        }
        print(json.dumps(content, indent=1))
    else:
        _print_table(args, result)
        print("\n" + (f"differs: {difference}" if difference else "the same within tolerance"))
    return FAILED if difference else OK


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    with printed_warnings("penstock compare"):
        return run("penstock compare", lambda: _compare(args))
