"""Errors a person is meant to read. None of them is caught and hidden."""


class AFDConfigError(ValueError):
    """The settings cannot be served; the text names the field, what was seen, and the fix."""


class WrapperError(RuntimeError):
    """No wrapper fits the installed vLLM; the text names the command to run."""


class HandshakeError(RuntimeError):
    """The two roles do not fit together; the text names each field and both values."""


class WireError(RuntimeError):
    """The other role cannot be reached, is gone, or sent what was not expected."""
