"""What a run keeps in its output folder before it is done, and how another goes on with it."""

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

from turbo_hf.calibration.artifacts import FACTS, Calibration, LayerCalibration
from turbo_hf.config.whole_files import InUse, one_writer
from turbo_hf.errors import warn

PART = "turbo_calibration.part"
"""Folder of an unfinished run, inside its output folder."""
LOCK = f"{PART}.lock"


def finished_groups(out: str | Path) -> int:
    """Groups of layers that an unfinished run has left in `out`."""
    return len(list((Path(out) / PART).glob(f"group-*/{FACTS}")))


class Unfinished:
    """The output folder of one run; without one (None) nothing is kept.

    Args:
        writes: if False, another process of the same run writes, and this one reads what is there.

    Raises:
        ValueError: `out` is a file; `resume` without `out`; an unfinished run in `out` without `resume`; a calibration
            in `out` without `overwrite`.
        OSError: another run goes on in `out`.
    """

    def __init__(self, out: str | Path | None, resume: bool, overwrite: bool, writes: bool = True):
        self.out, self.resume, self.overwrite = None if out is None else Path(out), resume, overwrite
        self.writes = writes
        if self.out is None and resume:
            raise ValueError("resume needs out, the folder of the run that was interrupted.")
        if self.out is not None and writes and (self.out / LOCK).exists():
            # of a run that goes on, or of one that was killed
            with one_writer(self.out, LOCK):
                pass
        self._check()

    def _check(self) -> None:
        if self.out is None:
            return
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"out must be a folder, or the name of a new one; {str(self.out)!r} is a file.")
        done = finished_groups(self.out)
        if done and not self.resume:
            raise ValueError(
                f"out: {str(self.out)!r} holds an interrupted run (groups of layers done: {done}). Pass resume=True "
                f"(--resume) to go on with it, or delete {str(self.out / PART)!r} to begin anew."
            )
        if (self.out / FACTS).exists() and not self.overwrite:
            raise ValueError(
                f"out: {str(self.out)!r} holds a calibration already. Name another folder, or pass overwrite=True "
                "(--overwrite) to replace it once the new one is done."
            )

    def open(self) -> contextlib.ExitStack:
        """Make the folder, and tell where there is nothing to resume. Other runs are kept out until the result's exit.

        Raises:
            OSError: the folder cannot be made, or not be written, or another run has it.
            ValueError: as at the beginning: another run may have ended here since.
        """
        with contextlib.ExitStack() as stack:
            if self.out is None or not self.writes:
                return stack
            try:
                stack.enter_context(one_writer(self.out, LOCK))
                (self.out / PART).mkdir(exist_ok=True)
                done = finished_groups(self.out)
                if not done:
                    # only tried: an end before any group is done leaves nothing
                    shutil.rmtree(self.out / PART)
            except InUse:
                raise
            except OSError as error:
                raise OSError(f"out: {str(self.out)!r} cannot be made, or not be written: {error}") from error
            self._check()
            if self.resume and not done:
                # behind `calibrate` and its decorator
                warn(f"{str(self.out)!r} holds no interrupted run: this one begins anew.")
            return stack.pop_all()

    def find(self, number: int, like: Calibration) -> tuple[LayerCalibration, ...] | None:
        """The layers of a group that is done; None: it is not. ValueError: of another run than `like`."""
        kept = self._group(number)
        if kept is None or not (kept / FACTS).exists():
            return None
        try:
            found = Calibration.from_pretrained(kept)
        except ValueError as error:
            raise ValueError(f"{error} Or delete {str(kept)!r}: the run then goes on without it.") from error
        if (found.settings, found.fingerprint) != (like.settings, like.fingerprint):
            raise ValueError(
                f"the interrupted run in {str(kept.parent)!r} had other settings, texts or another model. Run it with "
                "those, or delete that folder to begin anew."
            )
        return found.layers

    def keep(self, number: int, like: Calibration, layers: tuple[LayerCalibration, ...]) -> None:
        """Write the layers of a group that is done."""
        kept = self._group(number)
        if kept is not None and self.writes:
            replace(like, layers=layers).save_pretrained(kept)

    def close(self, found: Calibration) -> None:
        """Write the result, and give up its parts."""
        if self.out is not None and self.writes:
            found.save_pretrained(self.out)
            shutil.rmtree(self.out / PART, ignore_errors=True)

    def _group(self, number: int) -> Path | None:
        return None if self.out is None else self.out / PART / f"group-{number}"
