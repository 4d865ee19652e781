"""Which data sets hand out several records at once."""

from __future__ import annotations

import inspect


def reads_by_index(dataset: object) -> bool:
    """Whether the data set has a method ``batch(indices)``.

    The argument's name counts: other libraries have methods of the same name that do something else (``batch_size`` is what
    a Hugging Face ``Dataset.batch`` takes).
    """
    method = getattr(dataset, "batch", None)
    if not callable(method):
        return False
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # written in C, say
        return False
    return (
        bool(parameters)
        and parameters[0].name == "indices"
        and all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters[1:])
    )


__all__ = ["reads_by_index"]
