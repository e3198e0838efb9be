"""What the options of several dataclasses share: checks of their values, and how they are written as dicts."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

LEFT = "left the package: no real checkpoint gained (eval/results/sparse-log.md)"
"""Said of options that an older config names."""


def one_of(field: str, value: object, allowed: tuple[object, ...], owner: str) -> None:
    """ValueError unless the value is one of those allowed, and of the same type."""
    # check the type, too: True == 1 and 4.0 == 4 would pass a plain membership test
    if not any(value == a and type(value) is type(a) for a in allowed):
        raise ValueError(f"{owner}.{field} must be one of {', '.join(map(repr, allowed))}; got {value!r}.")


def at_least(field: str, value: object, least: int, owner: str) -> None:
    """ValueError unless the value is a whole number (not a bool) of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{owner}.{field} must be a whole number of at least {least}; got {value!r}.")


def freeze(value: Any) -> Any:
    """A list as a tuple; anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def freeze_layers(config: object, field: str) -> None:
    """Replace a list by a tuple, in `__post_init__` of a frozen dataclass."""
    object.__setattr__(config, field, freeze(getattr(config, field)))


def layer_indices(field: str, value: object, also: str, owner: str) -> None:
    """ValueError unless the value is a tuple of layer indices. also: what else the field takes, for the message."""
    good = isinstance(value, tuple) and all(type(i) is int and i >= 0 for i in value)
    if not good:
        raise ValueError(f"{owner}.{field} must be a tuple of layer indices{also}; got {value!r}.")


class Options:
    """A dataclass of options, as a dict and back."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Every option by name, for JSON or YAML: tuples become lists, nested options dicts."""
        config: Any = self
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        return {name: _plain(value) for name, value in values.items()}

    @classmethod
    def _known(cls, options: object, also: tuple[str, ...] = (), gone: tuple[str, ...] = ()) -> dict[str, Any]:
        """`options` as a dict. ValueError unless it is a mapping whose names are fields, or among `also`.

        gone: names of options that left the package, which an older `to_dict` wrote: None asked for nothing.
        """
        if not isinstance(options, Mapping):
            raise ValueError(f"{cls.__name__} is made from a dict of its options; got {options!r}.")
        kind: Any = cls
        left = next((name for name in gone if options.get(name) is not None), None)
        if left is not None:
            raise ValueError(f"{cls.__name__}.{left} {LEFT}. Leave it out.")
        options = {name: value for name, value in options.items() if name not in gone}
        names = (*also, *(field.name for field in fields(kind)))
        unknown = [name for name in options if name not in names]
        if unknown:
            words = f"{cls.__name__} has no option {', '.join(map(str, unknown))}"
            raise ValueError(f"{words}; options are {', '.join(names)}.")
        return options


def _plain(value: Any) -> Any:
    if isinstance(value, Options):
        return value.to_dict()
    return [_plain(x) for x in value] if isinstance(value, tuple) else value
