"""Files that hold a config: JSON or YAML, read as plain mappings."""

import json
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from turbo_hf.config.whole_files import read_file

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
