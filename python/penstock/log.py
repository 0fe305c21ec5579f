"""The command `penstock log`: a run's metrics for TensorBoard and for Weights & Biases.

penstock log RUN --tensorboard     event files in RUN/tensorboard
penstock log RUN --wandb           an offline run in RUN/wandb

RUN is a run directory of `penstock train` or of a RunLog. The command follows a run that goes on
until it ends. What an earlier call wrote is not written again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from . import command
from .files import DataError, open_input
from .runs import RUNNING, Metrics, RunDirectory

# The names that users of these tools look for; a field without a name here is not written.
NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
    "consumed_samples": "train/consumed_samples",
    "consumed_tokens": "train/consumed_tokens",
    "n_skipped": "train/skipped_steps",
    "val_loss": "eval/loss",
    "val_perplexity": "eval/perplexity",
    "step_s": "perf/step_s",
    "predicted_step_s": "perf/predicted_step_s",
    "expected_step_s": "perf/expected_step_s",
    "tokens_per_s": "perf/tokens_per_s",
    "gpus": "perf/gpus",
    "hosts": "perf/hosts",
    "tflops": "perf/tflops",
    "mfu": "perf/mfu",
    "h2d_bytes_per_s": "perf/h2d_bytes_per_s",
    "d2h_bytes_per_s": "perf/d2h_bytes_per_s",
    "update_bytes_per_s": "perf/update_bytes_per_s",
    "gpu_clock_mhz": "gpu/clock_mhz",
    "gpu_power_w": "gpu/power_w",
    "gpu_temperature_c": "gpu/temperature_c",
    "gpu_energy_j": "gpu/energy_j",
    "n_gpus_read": "gpu/n_gpus_read",
    "device_peak_bytes": "memory/device_peak_bytes",
    "host_peak_bytes": "memory/host_peak_bytes",
}


def scalars(row: dict) -> dict[str, float]:
    return {name: float(row[key]) for key, name in NAMES.items() if key in row}


def texts(samples: list[dict]) -> dict[int, dict[str, str]]:
    """The sampled texts by step: a name for each prompt of a step, in their order."""
    by_step = {}
    for sample in samples:
        of = by_step.setdefault(sample["step"], {})
        of[f"samples/{len(of)}"] = sample["prompt"] + sample["text"]
    return by_step


def identity(row: dict) -> tuple[int, float]:
    """What tells a step from the same step trained again after a resume."""
    return row["step"] + 1, float(row["time_s"])


class TensorBoard:
    """Event files. They hold what was written: a call reads them, and goes on after the steps that
    they share with metrics.jsonl. Steps that a resumed run trains again are marked as purged, so
    that TensorBoard shows the new ones alone."""

    def __init__(self, folder: Path):
        try:
            from tensorboard.backend.event_processing import event_file_loader
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
            from tensorboard.summary.writer import event_file_writer
        except ImportError as exc:
            raise DataError(
                "--tensorboard needs the package tensorboard: pip install -r "
                "python/requirements-log.txt"
            ) from exc
        self._event, self._summary = event_pb2, summary_pb2
        self._tensor, self._string = tensor_pb2.TensorProto, types_pb2.DT_STRING
        self._folder, self._new_writer = folder, event_file_writer.EventFileWriter
        self._writer, self.written = None, []
        for path in sorted(folder.glob("events.out.tfevents.*")):
            for event in event_file_loader.EventFileLoader(str(path)).Load():
                if event.HasField("session_log"):
                    self.written = [w for w in self.written if w[0] < event.step]
                elif event.HasField("summary"):
                    self.written.append((event.step, event.wall_time))

    def update(self, rows: list[dict], samples: dict[int, dict[str, str]]) -> int:
        """Write the steps that are not written yet, with texts(). Returns how many."""
        same = 0
        for written, row in zip(self.written, rows):
            if written != identity(row):
                break
            same += 1
        if same == len(rows) == len(self.written):
            return 0
        if self._writer is None:
            self._writer = self._new_writer(str(self._folder))
        if same < len(self.written):
            first = self.written[same][0]
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            wall = float(rows[same]["time_s"]) if same < len(rows) else time.time()
            self._add(wall_time=wall, step=first, session_log=start)
            del self.written[same:]
        for row in rows[same:]:
            values = [
                self._summary.Summary.Value(tag=tag, simple_value=value)
                for tag, value in scalars(row).items()
            ]
            step, wall = identity(row)
            values += [self._text(tag, text) for tag, text in samples.get(step, {}).items()]
            self._add(wall_time=wall, step=step, summary=self._summary.Summary(value=values))
            self.written.append((step, wall))
        self._writer.flush()
        return len(rows) - same

    def _text(self, tag: str, text: str):
        """As Markdown shows it as it is: indented by four blanks."""
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text")
        )
        shown = "".join(f"    {line}\n" for line in text.splitlines())
        tensor = self._tensor(dtype=self._string, string_val=[shown.encode()])
        return self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)

    def _add(self, **fields) -> None:
        self._writer.add_event(self._event.Event(**fields))

    def close(self) -> str:
        if self._writer:
            self._writer.close()
        return f"tensorboard --logdir {self._folder}"


class Wandb:
    """An offline run of Weights & Biases. RUN/wandb/penstock.json holds its id and the last step
    that was written. A call that has no step to write makes no run. wandb has no way to replace
    steps: those that a resumed run trains again keep their first values."""

    def __init__(self, run: RunDirectory, project: str):
        try:
            import wandb
        except ImportError as exc:
            raise DataError(
                "--wandb needs the package wandb: pip install -r python/requirements-log.txt"
            ) from exc
        self._wandb, self._directory, self._project = wandb, run, project
        self._state_path, self._run = run.path / "wandb" / "penstock.json", None
        self._state = self._read()

    def _read(self) -> dict:
        try:
            with open_input(self._state_path, "r", encoding="utf-8") as file:
                state = json.load(file)
            if isinstance(state["id"], str) and isinstance(state["step"], int):
                return state
            raise ValueError("id or step is of another type")
        except FileNotFoundError:
            return {"id": os.urandom(4).hex(), "step": 0}
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise DataError(f"{self._state_path} cannot be read: {exc!r}") from exc

    def _start(self) -> None:
        plan = self._directory.plan
        self._state_path.parent.mkdir(exist_ok=True)
        self._run = self._wandb.init(
            project=self._project,
            name=self._directory.path.resolve().name,
            id=self._state["id"],
            dir=str(self._directory.path),
            mode="offline",
            config={k: v for k, v in plan.items() if isinstance(v, (int, float, str, bool))},
            settings=self._wandb.Settings(
                silent=True, console="off", x_disable_stats=True, x_disable_meta=True
            ),
        )

    def update(self, rows: list[dict], samples: dict[int, dict[str, str]]) -> int:
        """Write the steps after the last that was written, with texts(). Returns how many."""
        new = [row for row in rows if row["step"] + 1 > self._state["step"]]
        if new and self._run is None:
            self._start()
        for row in new:
            step, wall = identity(row)
            values = scalars(row) | samples.get(step, {}) | {"_timestamp": wall}
            self._run.log(values, step=step, commit=True)
        if new:
            self._state["step"] = new[-1]["step"] + 1
            part = self._state_path.with_suffix(".part")
            part.write_text(json.dumps(self._state) + "\n", encoding="utf-8")
            os.replace(part, self._state_path)
        return len(new)

    def close(self) -> str:
        if self._run is None:
            return f"wandb sync {self._directory.path}/wandb/offline-run-*-{self._state['id']}"
        folder = Path(self._run.dir).parent
        self._run.finish()
        return f"wandb sync {folder}"


def follow(run: RunDirectory, sinks: list, every_s: float) -> list[int]:
    """Write until the run ends, or until Ctrl-C. Returns how many steps each sink wrote."""
    totals, going = [0] * len(sinks), True
    while going:
        going = run.state() == RUNNING  # asked first: the last rows are then read
        try:
            run.refresh()
            _check(run.metrics)
            rows, samples = run.metrics.rows, texts(run.samples())
            totals = [n + sink.update(rows, samples) for n, sink in zip(totals, sinks)]
            time.sleep(every_s if going else 0)
        except KeyboardInterrupt:
            break
    return totals


def _check(metrics: Metrics) -> None:
    for i, row in enumerate(metrics.rows[-1:], len(metrics.rows)):
        if "time_s" not in row:
            raise DataError(f"{metrics.path}: line {i} has no time_s: an older version wrote it")


def main(argv: list[str]) -> int:
    parser = command.Parser(
        prog="penstock log",
        description="Write a run's metrics for TensorBoard and Weights & Biases. Follows a run "
        "that goes on.",
    )
    parser.add_argument("run", metavar="RUN", help="the run directory (--run-dir, or --out)")
    parser.add_argument("--tensorboard", action="store_true", help="event files: RUN/tensorboard")
    parser.add_argument("--wandb", action="store_true", help="an offline run: RUN/wandb")
    parser.add_argument("--project", default="penstock", help="of --wandb (default: penstock)")
    args = parser.parse_args(argv)

    def work() -> int:
        if not args.tensorboard and not args.wandb:
            raise DataError("nothing to write: give --tensorboard, --wandb or both")
        run, sinks = RunDirectory(args.run), []
        run.refresh()
        _check(run.metrics)
        if args.tensorboard:
            sinks.append(TensorBoard(run.path / "tensorboard"))
        if args.wandb:
            sinks.append(Wandb(run, args.project))
        totals = [0] * len(sinks)
        try:
            totals = follow(run, sinks, 2.0)
        finally:
            shown = [sink.close() for sink in sinks]
        for n, line in zip(totals, shown):
            print(f"{n} steps written; to see them: {line}")
        return command.OK

    return command.run("penstock log", work)
