"""Atomic file writes."""

from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that exists either in full or not at all: a reader never finds a partial one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)
