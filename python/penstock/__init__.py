"""Penstock trains transformers that do not fit in the device's memory, by streaming them through
it.

Two levels:
  training   ModelConfig, Hardware, Plan, Trainer, generate      (python/examples/train_model.py)
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
    "Hardware": "plan",
    "Plan": "plan",
    "Checkpoint": "checkpoint",
    "StepMetrics": "train",
    "Trainer": "train",
    "Decoder": "decode",
    "generate": "decode",
    "PenstockError": "_lib",
    "InvalidError": "_lib",
    "FormatError": "_lib",
    "BudgetError": "_lib",
    "OutOfMemoryError": "_lib",
    "InputOutputError": "_lib",
    "BusyError": "_lib",
    "StateError": "_lib",
    "CancelledError": "_lib",
    "DeviceError": "_lib",
    "NumericError": "_lib",
    "InternalError": "_lib",
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
