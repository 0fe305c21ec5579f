"""Run by tests/test_save.py with build/tests/libdisk_shim.so preloaded: one way of saving, ended at
each of its disk calls.

    python tests/save_sweep.py FOLDER SCENARIO [STRIDE]

SCENARIO is WHO-BEFORE-AFTER-HOW: trainer or init; fresh, single or sharded; single or sharded;
beside, refused (no RENAME_EXCHANGE) or inside (the working directory). STRIDE: of the calls that
fail only every so manyth does. Each time a child process saves and is killed at the Nth call that
changes something, or has the Nth of all fail, or writes half; then the directory must be the old
model or the new one, byte for byte, to penstock and to safetensors, with the user's own files; and
a save that nothing disturbs must leave the new model and nothing else. Prints how many calls there
were."""

import ctypes
import errno
import json
import os
import pathlib
import shutil
import sys
import traceback

import numpy as np
from safetensors.numpy import load_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
import penstock  # noqa: E402
from penstock._lib import ffi  # noqa: E402

COUNT, KILL, FAIL, SHORT = range(4)
PENDING = ".penstock-new"
CONFIG = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": %d}"""
USER = {
    "README.md": b"mine",
    "data/x.bin": b"tokens",
    "data/deep/y": b"",
    "other.safetensors": b"mine too",
    "chat_template.jinja": b"mine",
    "additional_chat_templates/mine.jinja": b"mine",
}
SAVED = ("tokenizer.json", "vocab.json", "additional_chat_templates/old.jinja")

WORK = pathlib.Path(sys.argv[1])
shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
native = ctypes.CDLL(os.environ["PENSTOCK_BUILD"] + "/lib/libpenstock.so")
sys.path.insert(0, str(ROOT / "models"))
import init_model  # noqa: E402
import model_dir  # noqa: E402


def make(folder, seed, positions, shard, tokenizer=None):
    """A model by init_model, into @folder."""
    argv = [
        str(WORK / f"config-{positions}.json"),
        str(folder),
        "--seed",
        str(seed),
        "--dtype",
        "fp32",
        "--max-shard-size",
        shard,
        "--overwrite",
    ]
    return init_model.main(argv + (["--tokenizer", str(tokenizer)] if tokenizer else []))


class Saver:
    """Saves with the trainer: 64 positions, tokenizer "new"."""

    def __init__(self, work, shard):
        self.shard = {"1MB": 10**9, "4KB": 4096}[shard]
        model = work / "source"
        assert make(model, 2, 64, "1MB") == 0
        (model / "tokenizer.json").write_text('"new"')
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates/tool_use.jinja").write_text("new")
        plan = penstock.Plan(
            penstock.ModelConfig.read(model),
            seq_len=16,
            recipe="fp32",
            threads=1,
            chunk_tokens=16,
            chunks_per_round=1,
        )
        self.trainer = penstock.Trainer(
            model, plan, lambda step: (np.zeros(16, np.int32), np.zeros(16, np.int32))
        )
        self.pointer = ctypes.c_void_p(
            int(ffi.cast("uintptr_t", self.trainer._handle.ptr))
        )  # a child may not ask for it

    def __call__(self, folder):
        return native.ps__trainer_save(
            self.pointer, os.fsencode(folder), 0, ctypes.c_uint64(self.shard)
        )


class Maker:
    """Saves with init_model, a tokenizer too."""

    def __init__(self, work, shard):
        self.shard, self.tokenizer = shard, work / "tokenizer.json"
        self.tokenizer.write_text('{"model": {"vocab": {"a": 1}}}')
        assert (
            make(work / "first", 2, 64, shard, self.tokenizer) == 0
        )  # loads what is loaded on first use

    def __call__(self, folder):
        return make(pathlib.Path(folder), 2, 64, self.shard, self.tokenizer)


def files(folder):
    """What is in @folder at any depth, but for what saves leave."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and ".penstock-" not in str(p.relative_to(folder))
    }


def leftovers(folder):
    return [
        p
        for p in [*folder.parent.iterdir(), *(folder.iterdir() if folder.exists() else [])]
        if ".penstock-" in p.name
    ]


def penstock_reads(folder):
    """Config and tensors as penstock sees them."""
    f = penstock.TensorFile(folder)
    return penstock.ModelConfig.read(folder).max_positions, {
        n: f.read(n).tobytes() for n in f.names
    }


def safetensors_reads(folder):
    return {
        n: t.tobytes() for p in folder.glob("model*.safetensors") for n, t in load_file(p).items()
    }


class Sweep:
    totals = {}

    def __init__(self, work, scenario):
        self.work = work
        for positions in (64, 128):
            (work / f"config-{positions}.json").write_text(CONFIG % positions)
        who, before, after, how = scenario.split("-")
        shards = {"single": "1MB", "sharded": "4KB"}
        self.save = {"trainer": Saver, "init": Maker}[who](work, shards[after])
        self.fresh, self.how = before == "fresh", how
        self.old, self.folder = work / "old", work / "place" / "m"
        if not self.fresh:
            assert make(self.old, 1, 128, shards[before]) == 0
            (self.old / "additional_chat_templates").mkdir()
            for name in SAVED:
                (self.old / name).write_text('"old"')
            record = {"files": [model_dir.file_entry(self.old, name) for name in SAVED]}
            (self.old / "penstock.json").write_text(json.dumps(record))
            for name, text in USER.items():
                (self.old / name).parent.mkdir(parents=True, exist_ok=True)
                (self.old / name).write_bytes(text)
            os.chmod(self.old, 0o750)
        if how == "refused":
            shim.disk_shim_refuse_exchange(errno.EINVAL)
        self.reset()
        assert self.run(COUNT, 0) == 0 and not leftovers(self.folder)
        self.states = [self.state()]
        if not self.fresh:
            self.reset()
            self.states.append(self.state())
            self.check_kept()
            assert self.states[0] != self.states[1]
            # the saved tokenizer is replaced as a whole
            assert set(SAVED) <= self.states[1][0].keys()
            assert self.states[0][0].keys() & set(SAVED) == {"tokenizer.json"}

    def reset(self):
        shutil.rmtree(self.work / "place", ignore_errors=True)
        self.folder.parent.mkdir()
        if not self.fresh:
            shutil.copytree(self.old, self.folder)

    def run(self, what, n):
        """The save's result in a child; 99 where it was killed."""
        child = os.fork()
        if not child:
            code = 98
            try:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1), os.dup2(null, 2)
                if self.how == "inside":
                    os.chdir(self.folder)
                shim.disk_shim_arm(what, ctypes.c_long(n))
                code = 0 if self.save(self.folder) == 0 else 1
                calls = shim.disk_shim_calls()
                shim.disk_shim_arm(COUNT, ctypes.c_long(0))
                (self.work / "calls").write_text(str(calls))
            except BaseException:
                shim.disk_shim_arm(COUNT, ctypes.c_long(0))
                (self.work / "traceback").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def state(self):
        return files(self.folder), penstock_reads(self.folder), safetensors_reads(self.folder)

    def check_kept(self):
        there = files(self.folder)
        assert self.fresh or all(there.get(n) == text for n, text in USER.items()), sorted(there)
        assert self.fresh or self.folder.stat().st_mode & 0o7777 == 0o750

    def check(self, where, code):
        new, old = self.states[0], self.states[1] if not self.fresh else None
        if self.fresh and not self.folder.exists():
            assert code != 0, where
            return
        self.check_kept()
        pending = self.folder / PENDING
        seen = penstock_reads(self.folder)
        assert seen == new[1] or (code != 0 and not self.fresh and seen == old[1]), where
        if pending.exists():  # who knows nothing of it finds a whole model or no config.json
            assert self.how != "beside" and seen == new[1], where
            found = files(self.folder)
            assert found in (old[0], new[0]) or "config.json" not in found, where
            # by hand: what is there counts first, and a file of a set that it has is none
            for p in pending.iterdir():
                if p.name.endswith(".safetensors"):
                    load_file(p)
        else:
            whole = new if seen == new[1] else old
            assert files(self.folder) == whole[0] and safetensors_reads(self.folder) == whole[2], (
                where
            )

    def each(self, what, stride):
        n, calls = 1, 0
        while True:
            self.reset()
            code = self.run(what, n)
            where = f"{what} at call {n}: {code}"
            assert code in (0, 1, 99), (where, (self.work / "traceback").read_text())
            try:
                self.check(where, code)
                if what == FAIL and code and code != 99:
                    left = [p for p in leftovers(self.folder) if p.name != PENDING]
                    assert len(left) <= 1, where
                again = self.run(COUNT, 0)
                assert again == 0 and not leftovers(self.folder), (
                    where,
                    again,
                    leftovers(self.folder),
                )
                self.check(where + ", saved again", 0)
            except BaseException:
                print(
                    where,
                    sorted(str(p.relative_to(self.work)) for p in (self.work / "place").rglob("*")),
                    file=sys.stderr,
                )
                raise
            calls += 1
            if n > self.total(what):
                return calls
            n += stride

    def total(self, what):
        if what not in self.totals:
            self.reset()
            assert self.run(what, 0) == 0
            self.totals[what] = int((self.work / "calls").read_text())
        return self.totals[what]


def main():
    sweep = Sweep(WORK, sys.argv[2])
    stride = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    print(
        {
            name: sweep.each(what, step)
            for name, what, step in (
                ("killed", KILL, 1),
                ("failed", FAIL, stride),
                ("short", SHORT, stride),
            )
        }
    )


if __name__ == "__main__":
    main()
