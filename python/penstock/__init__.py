"""Penstock trains transformers that do not fit in the device's memory, by streaming them through
it.

Two levels:
  training   ModelConfig, Hardware, Plan, Trainer, Generator     (python/examples/train_model.py)
  dataflow   Engine, Program, Schedule, Run                      (python/examples/dataflow.py)

The package is a thin shell over the C library: it takes declarations from the library's headers,
and results and errors from its functions. A name is imported on first use, so that penstock.data
works without a built library.
"""

from importlib import import_module

_MODULE_OF = {
    "Engine": "engine",
    "Link": "engine",
    "Place": "engine",
    "Program": "engine",
    "Region": "engine",
    "Run": "engine",
    "Schedule": "engine",
    "Space": "engine",
    "Stream": "engine",
    "ModelConfig": "model",
    "Parameter": "model",
    "TensorFile": "model",
    "Dataset": "dataset",
    "Lora": "lora",
    "Hardware": "plan",
    "Hosts": "hosts",
    "Plan": "plan",
    "Checkpoint": "checkpoint",
    "CheckpointReport": "checkpoint",
    "RunLog": "runs",
    "StepMetrics": "train",
    "Trainer": "train",
    "Validation": "train",
    "Generator": "generator",
    "PenstockError": "errors",
    "InvalidError": "errors",
    "FormatError": "errors",
    "BudgetError": "errors",
    "OutOfMemoryError": "errors",
    "InputOutputError": "errors",
    "BusyError": "errors",
    "StateError": "errors",
    "CancelledError": "errors",
    "DeviceError": "errors",
    "NumericError": "errors",
    "InternalError": "errors",
    "version": "_lib",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(f"penstock.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
