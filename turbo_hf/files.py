"""Files that are written whole."""

from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is either there in full or not at all: a reader never finds half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)
