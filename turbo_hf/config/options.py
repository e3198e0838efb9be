"""What the options of several dataclasses share: checks of their values, how they are written as dicts, and files of
them, JSON or YAML, read as plain mappings.
"""

import json
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from turbo_hf.config.whole_files import read_file


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


SUFFIXES = (".json", ".yaml", ".yml")
MOST_CONFIG = 1 << 16
"""Bytes of a config file at most."""


def names_a_file(config: object) -> bool:
    """Whether it is the path of a config file: a `Path`, or a text that ends like one."""
    return isinstance(config, Path) or (isinstance(config, str) and config.lower().endswith(SUFFIXES))


def read_mapping(path: Path) -> dict[str, Any]:
    """What a JSON or YAML file holds.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: another suffix, or a file that is broken, holds no mapping, or names a key twice.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a config file is a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file; got {str(path)!r}.")
    if path.is_dir():
        raise IsADirectoryError(f"expected a config file at {path}; it is a folder.")
    if not path.exists():
        raise FileNotFoundError(f"there is no config file {path}.")
    try:
        text = read_file(path, MOST_CONFIG).decode("utf-8-sig")
        is_json = path.suffix.lower() == ".json"
        read = json.loads(text, object_pairs_hook=_without_doubles) if is_json else yaml.load(text, _Loader)
    except OSError as error:
        raise type(error)(f"cannot read the config file {path}: {error.strerror or error}.") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise ValueError(f"the config file {path} cannot be read: {words}.") from error
    if not isinstance(read, dict):
        what = "nothing" if read is None else f"a {type(read).__name__}"
        raise ValueError(f"the config file {path} holds {what}; expected options of TurboConfig by name.")
    return read


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_doubles([key for key, _ in pairs])
    return dict(pairs)


def _refuse_doubles(keys: list[Any]) -> None:
    # the readers of both formats would silently take the last
    twice = [name for name, times in Counter(map(str, keys)).items() if times > 1]
    if twice:
        raise ValueError(f"it names {', '.join(twice)} twice")


class _Loader(yaml.SafeLoader):  # type: ignore[misc] # PyYAML has no types
    """PyYAML's safe loader, which makes plain values alone, and refuses a key that is there twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The node that comes next. ValueError: an alias, by which few lines can mean without end."""
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of a node."""
        _refuse_doubles([self.construct_object(key, deep=True) for key, _ in node.value])
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping
