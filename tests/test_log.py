"""What of a run goes to TensorBoard and to wandb: penstock log."""

import sys

import pytest
from test_watch import (  # noqa: F401 (run, sampled and trained are fixtures)
    GPU,
    STEPS,
    command,
    program,
    put,
    refused,
    rows_of,
    run,
    sampled,
    trained,
)


def events(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(e.step, e.value, e.wall_time) for e in accumulator.Scalars(tag)] for tag in tags}


def test_tensorboard_gets_every_step_once(run):
    rows = rows_of(run)
    put(run, rows[:3])
    assert command("log", run, "--tensorboard").stdout.startswith("3 steps written")
    put(run, rows)
    assert command("log", run, "--tensorboard").stdout.startswith("3 steps written")
    assert command("log", run, "--tensorboard").stdout.startswith("0 steps written")
    seen = events(run)
    assert [(s, t) for s, _, t in seen["train/loss"]] == [
        (r["step"] + 1, r["time_s"]) for r in rows
    ]
    assert [v for _, v, _ in seen["train/loss"]] == pytest.approx([r["loss"] for r in rows])
    assert {"train/grad_norm", "train/learning_rate", "perf/tokens_per_s", "perf/mfu"} <= set(seen)
    assert {"perf/h2d_bytes_per_s", "perf/predicted_step_s"} <= set(
        seen
    ) and "gpu/power_w" not in seen
    later = [row | GPU | {"time_s": row["time_s"] + 1000, "n_gpus_read": 2} for row in rows]
    put(run, later)
    assert command("log", run, "--tensorboard").stdout.startswith("6 steps written")
    seen = events(run)
    assert [v for _, v, _ in seen["gpu/power_w"]] == [685.5] * STEPS
    assert [v for _, v, _ in seen["gpu/n_gpus_read"]] == [2] * STEPS


def test_tensorboard_shows_the_new_steps_of_a_resumed_run(run):
    rows = rows_of(run)
    assert command("log", run, "--tensorboard").returncode == 0
    again = [row | {"time_s": row["time_s"] + 1000, "loss": 1.0} for row in rows[4:]]
    put(run, rows[:4] + again[:1])
    assert command("log", run, "--tensorboard").stdout.startswith("1 steps written")
    seen = events(run)["train/loss"]
    assert [s for s, _, _ in seen] == [1, 2, 3, 4, 5] and seen[-1][1] == 1.0


class FakeWandb:
    """In place of the package wandb: keeps the calls."""

    Settings = dict

    def __init__(self):
        self.starts, self.logged, self.finished = [], [], 0

    def init(self, **settings):
        self.starts.append(settings)
        self.dir = f"{settings['dir']}/wandb/offline-run/files"
        return self

    def log(self, values, step, commit):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


def test_wandb_gets_every_step_once_in_one_offline_run(run, monkeypatch):
    rows, fake = rows_of(run), FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for part in (rows[:3], rows, rows):
        put(run, part)
        done = command("log", run, "--wandb", "--project", "mine")
        assert done.returncode == 0 and "wandb sync" in done.stdout, done
    first, second = fake.starts
    assert first["id"] == second["id"] and first["config"]["tokens_per_step"] == 512
    assert (first["mode"], first["project"], first["name"]) == ("offline", "mine", "run")
    assert [step for step, _ in fake.logged] == [1, 2, 3, 4, 5, 6] and fake.finished == 2
    assert [values["train/loss"] for _, values in fake.logged] == [r["loss"] for r in rows]


def test_wandb_itself_takes_what_log_writes(run):
    pytest.importorskip("wandb", reason="the package wandb is not installed")
    done = program("log", run, "--wandb")
    assert done.returncode == 0 and done.stdout.startswith(f"{STEPS} steps written"), done
    folder = run / "wandb" / done.stdout.split("wandb sync ")[1].strip().rpartition("/")[2]
    (file,) = folder.glob("run-*.wandb")
    assert file.read_bytes().count(b"train/loss") >= STEPS
    assert program("log", run, "--wandb").stdout.startswith("0 steps written")


def test_tensorboard_has_the_texts(sampled):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert command("log", sampled, "--tensorboard").returncode == 0
    seen = EventAccumulator(str(sampled / "tensorboard"))
    seen.Reload()
    texts = {
        tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in seen.Tensors(tag)]
        for tag in seen.PluginTagToContent("text")
    }
    assert [step for step, _ in texts["samples/0"]] == [2, 4] and len(texts["samples/1"]) == 1
    assert texts["samples/1"] == [(4, "    1 2 3 \n")]
    assert len(seen.Scalars("train/loss")) == len(rows_of(sampled))


def test_log_says_what_is_missing(run, monkeypatch):
    refused(command("log", run), "nothing to write: give --tensorboard, --wandb or both")
    for name in ("tensorboard", "wandb"):
        with monkeypatch.context() as patch:
            for module in [m for m in sys.modules if m.partition(".")[0] == name] + [name]:
                patch.setitem(sys.modules, module, None)  # its import is an ImportError
            done = command("log", run, f"--{name}")
        refused(done, f"--{name} needs the package {name}: pip install -r python/requirements-log")
    (run / "wandb").mkdir()
    (run / "wandb/penstock.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    refused(command("log", run, "--wandb"), "penstock.json cannot be read")
    put(run, [{k: v for k, v in row.items() if k != "time_s"} for row in rows_of(run)])
    refused(command("log", run, "--tensorboard"), "line 6 has no time_s")
