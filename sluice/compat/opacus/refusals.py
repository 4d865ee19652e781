"""Names of Opacus that are not offered: using them says what to write instead."""

from __future__ import annotations

from typing import Any, NoReturn

from sluice._base.errors import InputError


class Refused:
    """A class that cannot be made; ``instead`` says what to do."""

    instead: str

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        refuse(type(self).__name__, self.instead)

    @classmethod
    def from_data_loader(cls, *arguments: Any, **keywords: Any) -> NoReturn:
        refuse(cls.__name__, cls.instead)


def refuse(name: str, instead: str) -> NoReturn:
    raise InputError(f"{name} is not offered: {instead}")
