"""The library's errors as exceptions. This module needs no native library."""


class PenstockError(Exception):
    """A call of the library failed. The text is the library's message; `code` is the ps_status."""

    code = 0


class InvalidError(PenstockError, ValueError):
    """PS_EINVAL: an argument or an option is wrong."""


class FormatError(PenstockError, ValueError):
    """PS_EFORMAT: a file's contents are wrong."""


class BudgetError(PenstockError):
    """PS_EBUDGET: a memory cap is too small. The text says what is needed and what fits."""


class OutOfMemoryError(PenstockError, MemoryError):
    """PS_ENOMEM: the machine refused memory."""


class InputOutputError(PenstockError, OSError):
    """PS_EIO: reading or writing failed."""


class BusyError(PenstockError):
    """PS_EBUSY: an object that was opened from this one still lives."""


class StateError(PenstockError):
    """PS_ESTATE: called in the wrong order."""


class CancelledError(PenstockError):
    """PS_ECANCELLED: stopped on request."""


class DeviceError(PenstockError):
    """PS_EDEVICE: the device or a thread failed."""


class NumericError(PenstockError, ArithmeticError):
    """PS_ENUMERIC: a loss or a gradient is not finite."""


class InternalError(PenstockError):
    """PS_EINTERNAL: a defect of the library."""


OF_STATUS = {
    -1: InvalidError,
    -2: FormatError,
    -3: BudgetError,
    -4: OutOfMemoryError,
    -5: InputOutputError,
    -6: BusyError,
    -7: StateError,
    -8: CancelledError,
    -9: DeviceError,
    -10: NumericError,
    -11: InternalError,
}
for _code, _exception in OF_STATUS.items():
    _exception.code = _code
