"""What can go wrong through no fault of the program, as one small tree.

    CairnError
    ├── UsageError             a flag or an argument is wrong
    ├── ConfigError            a TOML file, an environment variable or a combination of values is wrong
    ├── ModelError
    │   ├── ModelNotFound      no such path, nothing in the cache, no network
    │   ├── UnsupportedModel   an architecture or a field that would be computed wrongly
    │   ├── WeightsError       a damaged file, a wrong shape, a missing or an extra tensor
    │   └── TokenizerError     no tokenizer, no chat template, a template that fails
    ├── RequestError           a prompt or a parameter that this model cannot serve
    └── HardwareError          the machine lacks what was asked for

Each says what is wrong, with which values, and what to do next (`hint`). The command line prints the two
lines and leaves with `exit_status`; everything that is not a CairnError is a bug and keeps its traceback.
This module knows nothing about terminals.
"""


class CairnError(Exception):
    """A mistake in what was asked, or a machine that cannot do it: message, values, and a way out."""

    exit_status = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[type, tuple[str, str | None]]:
        return type(self), (self.message, self.hint)  # survives the way back from a worker process


class UsageError(CairnError):
    pass


class ConfigError(CairnError):
    pass


class ModelError(CairnError):
    pass


class ModelNotFound(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class WeightsError(ModelError):
    pass


class TokenizerError(ModelError):
    pass


class RequestError(CairnError):
    pass


class HardwareError(CairnError):
    pass
