"""What the options of several dataclasses share: checks of their values, and how they are written as dicts."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self


def one_of(field: str, value: object, allowed: tuple[object, ...], owner: str) -> None:
    """ValueError unless the value is one of those allowed, and of the same type."""
    # check the type, too: True == 1 and 4.0 == 4 would pass a plain membership test
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise ValueError(f"{owner}.{field} must be one of {', '.join(map(repr, allowed))}; got {value!r}.")


def at_least(field: str, value: object, least: int, owner: str) -> None:
    """ValueError unless the value is a whole number (not a bool) of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{owner}.{field} must be a whole number of at least {least}; got {value!r}.")


def freeze_layers(config: object, field: str) -> None:
    """Replace a list by a tuple, in `__post_init__` of a frozen dataclass."""
    value = getattr(config, field)
    object.__setattr__(config, field, tuple(value) if isinstance(value, list) else value)


def layer_indices(field: str, value: object, also: str, owner: str) -> None:
    """ValueError unless the value is a tuple of layer indices. also: what else the field takes, for the message."""
    good = isinstance(value, tuple) and all(type(i) is int and i >= 0 for i in value)
    if not good:
        raise ValueError(f"{owner}.{field} must be a tuple of layer indices{also}; got {value!r}.")


class Options:
    """A dataclass of options, as a dict and back."""

    __slots__ = ()
    nested: ClassVar[dict[str, Any]] = {}
    """Fields that hold options of their own, and their classes."""

    def __new__(cls, **options: Any) -> Self:
        """Options of these names. ValueError: an unknown name."""
        # Python's own error would not say where an option belongs
        cls._known(options)
        return object.__new__(cls)

    def to_dict(self) -> dict[str, Any]:
        """Every option by name, for JSON or YAML: tuples become lists, nested options dicts."""
        return {name: _plain(getattr(self, name)) for name in self.names()}

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """A config with these options, the others at their defaults. ValueError: an unknown name, or a wrong value."""
        return cls(**cls._known(options))

    @classmethod
    def names(cls) -> list[str]:
        """The names of all options."""
        kind: Any = cls
        return [field.name for field in fields(kind)]

    @classmethod
    def _known(cls, options: object, also: tuple[str, ...] = ()) -> dict[str, Any]:
        """`options` as a dict. ValueError unless it is a mapping whose names are fields, or among `also`."""
        if not isinstance(options, Mapping):
            raise ValueError(f"{cls.__name__} is made from a dict of its options; got {options!r}.")
        names = (*also, *cls.names())
        unknown = [name for name in options if name not in names]
        if unknown:
            words = f"{cls.__name__} has no option {', '.join(map(str, unknown))}; options are {', '.join(names)}."
            belongs = [
                f" {name} belongs in {field}={kind.__name__}({name}=...)."
                for field, kind in cls.nested.items()
                for name in unknown
                if name in kind.names()
            ]
            raise ValueError(words + "".join(belongs))
        return dict(options)


def _plain(value: Any) -> Any:
    if isinstance(value, Options):
        return value.to_dict()
    return [_plain(x) for x in value] if isinstance(value, tuple) else value
