"""`penstock generate` on text: the tokenizer is the model directory's own.

penstock generate --model DIR --prompt TEXT [OPTIONS]
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from . import command, hub
from ._lib import lib, printed_warnings
from .chat import ChatTemplate, read_config
from .conversation import FIELDS, Conversation, read_conversation
from .data import load_tokenizer
from .errors import DeviceError, InputOutputError, OutOfMemoryError
from .files import DataError, open_input
from .generator import EXPERTS, Generator
from .plan import Hardware

MAX_GPU = 1023  # as the binary has it


class Text:
    """A text that grows token by token. Characters of several tokens come when they are whole, and
    what may be the beginning of a stop string comes when it is none."""

    def __init__(self, tokenizer, stops=()):
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        self._stops = [s for s in stops if s]
        self._ids, self._from, self._read = [], 0, 0
        self.text, self._given, self.ended = "", 0, False

    def add(self, token: int) -> str:
        """What there is to print after one more token."""
        self._ids.append(token)
        # decoded with the tokens before, as some tokenizers put a blank between tokens
        before, now = (
            self._decode(self._ids[self._from : end]) for end in (self._read, len(self._ids))
        )
        if now.endswith("\ufffd"):
            return ""
        self.text += now[len(before) :]
        self._from, self._read = self._read, len(self._ids)
        return self._give(self._cut())

    def end(self) -> str:
        """What was held back."""
        if not self.ended:
            now = self._decode(self._ids[self._from :])
            self.text += now[len(self._decode(self._ids[self._from : self._read])) :]
            self._cut()
        return self._give(len(self.text))

    def _cut(self) -> int:
        """Up to where the text may be given; it ends before the first stop string."""
        found = [at for s in self._stops if (at := self.text.find(s)) >= 0]
        if found:
            self.text, self.ended = self.text[: min(found)], True
            return len(self.text)
        held = (
            n
            for s in self._stops
            for n in range(min(len(s) - 1, len(self.text)), 0, -1)
            if self.text.endswith(s[:n])
        )
        return len(self.text) - max(held, default=0)

    def _give(self, upto: int) -> str:
        new = self.text[self._given : upto]
        self._given = max(upto, self._given)
        return new


def stop_tokens(folder: Path) -> list[int]:
    """The ids that end a text: of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        config = read_config(folder, name)
        given = config.get("eos_token_id")
        if given is None:
            given = (config.get("text_config") or {}).get("eos_token_id")
        if given is None:
            continue
        ids = given if isinstance(given, list) else [given]
        if all(isinstance(i, int) and 0 <= i < 2**31 for i in ids):
            return ids
        raise DataError(f"{folder / name}: eos_token_id is {given!r}, which is no token id")
    return []


def read_prompts(path: Path) -> list:
    """Of a file with a JSON value a line: a string, {"prompt": TEXT} or {"messages": [...]}, which
    may have "tools" and "chat_template_kwargs" too. A text, or a Conversation, each."""
    try:
        with open_input(path, "r", encoding="utf-8-sig") as f:  # without a BOM at the begin
            lines = f.read().split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from e
    prompts = []
    for number, line in enumerate(lines, 1):
        what = f"{path}: line {number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as e:
            raise DataError(f"{what} is not JSON ({e})") from e
        if isinstance(value, dict) and any(name in value for name in FIELDS):
            prompts.append(read_conversation(value, what))
        elif isinstance(value, dict) and isinstance(value.get("prompt"), str):
            prompts.append(value["prompt"])
        elif isinstance(value, str):
            prompts.append(value)
        else:
            raise DataError(f"{what} is no string and has neither 'prompt' nor 'messages'")
    if not prompts:
        raise DataError(f"{path}: the file has no prompt: give a JSON value a line")
    return prompts


def encode_prompts(
    prompts: list, tokenizer, folder: Path, template: ChatTemplate | None = None
) -> list[list[int]]:
    """The token ids of each prompt; of a Conversation, by the `template`, else by the folder's."""
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        chat = isinstance(prompt, Conversation)
        if chat:
            template = template or ChatTemplate(folder)
            text = template.render(prompt.messages, prompt.tools, True, prompt.variables)
        else:
            text = prompt
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise DataError(f"prompt {number} is no text: a part of it is no UTF-8") from e
        ids = tokenizer.encode(text, add_special_tokens=not chat).ids
        if not ids:
            raise DataError(f"prompt {number} has no token: give some text")
        encoded.append(ids)
    return encoded


def _conversation(prompt: str | Conversation, args) -> str | Conversation:
    """The prompt with what --chat and --system make of it."""
    if args.chat and isinstance(prompt, str):
        prompt = Conversation([{"role": "user", "content": prompt}])
    if isinstance(prompt, Conversation) and args.system is not None:
        system = {"role": "system", "content": args.system}
        prompt = replace(prompt, messages=[system, *prompt.messages])
    return prompt


def _parser() -> command.Parser:
    rows, large = lib.PS_MAX_ROWS, 2**53  # as the binary has them
    p = command.Parser(
        prog="penstock generate",
        description="Prints the text that follows each prompt. Blocks that do not fit under "
        "--device-mem are streamed. The text of a prompt does not depend on the other prompts.",
    )
    p.add_argument(
        "--model", required=True, metavar="DIR", help=f"model directory with a tokenizer, {hub.OR}"
    )
    p.add_argument("--adapter", metavar="DIR", help="a LoRA adapter of the model, in PEFT's layout")
    p.add_argument(
        "--base-dtype",
        choices=("bf16", "fp8", "nf4", "mxfp4"),
        default="bf16",
        help="how the frozen matrices beside the adapter are kept and streamed (default bf16)",
    )
    p.add_argument("--prompt", metavar="TEXT", help="a prompt; its text is printed as it comes")
    p.add_argument(
        "--prompts",
        metavar="FILE",
        help='a JSON value a line: "TEXT", {"prompt": TEXT} or {"messages": [...]}, with "tools" and '
        '"chat_template_kwargs" if there are; a line of JSON is printed for each',
    )
    p.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message: apply the chat template",
    )
    p.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    p.template()
    p.count(
        "--max-new-tokens", 1, rows, "the most tokens to generate for a prompt (default 128)", 128
    )
    p.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0: always the most likely token (default); 1: the model's own distribution",
    )
    p.count("--top-k", 0, large, "draw from the N likeliest tokens (default 0: from all)")
    p.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens whose probabilities add up to P (default 1)",
    )
    p.count("--seed", 0, large, "seed of the draws (default 0)")
    p.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="the text ends before TEXT; may be given several times",
    )
    p.count("--batch", 1, lib.PS_MAX_SEQUENCES, "prompts that are computed at once (default 8)", 8)
    p.count(
        "--context",
        1,
        rows,
        "the most tokens of a prompt and its text together (default: what the longest needs)",
    )
    p.count(
        "--prefill-tokens",
        1,
        rows,
        "tokens of prompts that a step computes at once (default 128, on a GPU 1024)",
    )
    p.caps()
    p.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="bf16",
        help="dtype of weights, activations and KV cache (default bf16)",
    )
    p.add_argument(
        "--experts",
        choices=tuple(EXPERTS),
        default="auto",
        help="how experts come to the device where not all fit: whole blocks in each step, "
        "on-demand, or auto, the faster (default)",
    )
    p.backend("auto")
    p.count("--gpu", 0, MAX_GPU, "which of the visible GPUs (default 0)", None)
    p.count("--threads", 1, lib.PS_MAX_THREADS, "host threads (default: all CPUs)")
    p.add_argument(
        "--deterministic",
        action="store_true",
        help="every run gives the same text, on a GPU too; some kernels are slower",
    )
    p.add_argument("--quiet", action="store_true", help="print text alone")
    return p


def _hardware(args) -> Hardware:
    hardware = Hardware.cached(
        args.threads, args.backend, args.gpu or 0, args.host_mem, device_mem=args.device_mem
    )
    if args.gpu is not None and hardware.backend == lib.PS_BACKEND_CPU:
        reason = "there is no GPU that can be used here"
        if args.backend == "cpu":
            reason = "--backend cpu uses none"
        raise DataError(f"--gpu {args.gpu}: {reason}: leave --gpu out to run on the CPU")
    return hardware


def _generate(args) -> int:
    if (args.prompt is None) == (args.prompts is None):
        raise DataError("give either --prompt TEXT or --prompts FILE")
    if args.prompt is not None and not args.chat:
        for name in ("system", "chat_template_kwargs", "date"):
            if getattr(args, name):
                option = "--" + name.replace("_", "-")
                raise DataError(f"{option} belongs to a conversation: give --chat too")
    prompts = [args.prompt]
    if args.prompts is not None:
        prompts = command.given("--prompts", read_prompts, Path(args.prompts))
    folder = Path(hub.find("--model", args.model, hub.ALL, args.quiet))
    if not folder.exists():
        raise DataError(
            f"--model {folder}: there is no such directory (as a path it is {folder.resolve()}): "
            "give a model directory with a tokenizer"
        )
    tokenizer = command.given("--model", load_tokenizer, folder)
    asked = [_conversation(p, args) for p in prompts]
    chats = [isinstance(p, Conversation) for p in asked]
    template = None
    if any(chats):
        template = ChatTemplate(folder, args.chat_template_kwargs, args.date)
    ids = encode_prompts(asked, tokenizer, folder, template)
    end_of_turn = None
    if template:
        added = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items()}
        end_of_turn = template.end_of_turn(added)
    texts = [Text(tokenizer, args.stop) for _ in ids]
    alone, said, ended = args.prompts is None, [], set()  # ended: by the template's end of turn
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")

    def take(prompt: int, token: int) -> bool:
        if not (args.quiet or said):  # by then no input is refused any more
            said.append(_plan_line(generator.report))
            print(f"penstock: {said[0]}", file=sys.stderr)
        if chats[prompt] and token == end_of_turn:
            ended.add(prompt)
            return True
        new = texts[prompt].add(token)
        if alone and new:
            command.put(new, end="")
        return texts[prompt].ended

    ends = stop_tokens(folder)
    try:
        with printed_warnings("penstock generate"):  # with --quiet too: of an adapter
            generator = Generator(
                folder,
                batch=min(args.batch, len(ids)),
                context=args.context or max(len(i) for i in ids) + args.max_new_tokens,
                device_mem=args.device_mem,
                host_mem=args.host_mem,
                dtype=args.dtype,
                prefill_tokens=args.prefill_tokens,
                adapter=args.adapter,
                base=args.base_dtype,
                deterministic=args.deterministic,
                experts=args.experts,
                hardware=_hardware(args),
            )
    except (DeviceError, InputOutputError, OutOfMemoryError, ValueError) as e:  # nothing is printed
        raise DataError(str(e)) from e
    with generator:
        tokens = generator.run(
            ids,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            stop_tokens=ends,
            on_token=take,
        )
        for i, (text, prompt, new) in enumerate(zip(texts, prompts, tokens, strict=True)):
            rest = text.end()
            line = {"prompt": prompt}
            if isinstance(prompt, Conversation):
                line = {"messages": prompt.messages}
            line |= {"text": text.text, "new_tokens": len(new) - (i in ended)}
            command.put(rest if alone else json.dumps(line, ensure_ascii=not unicode))
        if not args.quiet:
            print(f"penstock: {_rate_line(generator.stats)}", file=sys.stderr)
    return command.OK


def _plan_line(r: dict) -> str:
    mib = 1 << 20
    line = (
        f"{r['n_resident']} of {r['n_blocks']} blocks on the device, which holds "
        f"{r['device_used_bytes'] / mib:,.0f} MiB ({r['cache_bytes'] / mib:,.0f} MiB of it KV cache)"
    )
    return line + (
        f"; {r['streamed_bytes'] / mib:,.0f} MiB are streamed a step" if r["streamed_bytes"] else ""
    )


def _rate_line(s: dict) -> str:
    rates = (
        f"{name} {n} tokens, {n / seconds if seconds else 0:,.1f} tokens/s"
        for name, n, seconds in (
            ("prefill", s["prompt_tokens"], s["prefill_s"]),
            ("decode", s["decoded_tokens"], s["decode_s"]),
        )
    )
    return "; ".join(rates)


def main(argv=None) -> int:
    args = _parser().parse_args(argv)
    with printed_warnings("penstock generate", args.quiet):
        return command.run("penstock generate", lambda: _generate(args), "stopped")


if __name__ == "__main__":
    sys.exit(main())
