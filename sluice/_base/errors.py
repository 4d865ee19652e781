"""Errors that a user can act on.

Every message names the argument or file, its value, what is allowed and what to do. The command line
prints it in one or two lines and exits with code 2; nothing here is ever shown as a traceback there.
"""


class SluiceError(Exception):
    """Base of all errors that Sluice raises on purpose."""


class InputError(SluiceError, ValueError):
    """An argument, option or configuration value is not allowed."""


class DataError(SluiceError):
    """A data file is missing, damaged or not what it should be."""


class UnsupportedModuleError(SluiceError):
    """A module cannot be trained privately as it is; the message names the replacement.

    Attributes:
        module: the name of the module that could not be recorded, where that is known.
    """

    module: str | None = None
