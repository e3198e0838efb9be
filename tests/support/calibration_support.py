"""The carried model calibrated with little text, for tests of all that calibrations are used for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from choices import flat_config
from models import lab_model

import turbo_hf
from turbo_hf import Calibration
from turbo_hf.calibration.run import calibrate
from turbo_hf.calibration.settings import Settings

PROSE_FILE = Path(turbo_hf.__file__).parent / "eval" / "haystack.txt"
PROSE = PROSE_FILE.read_text()
TEXTS = [PROSE] * 8
SMALL = Settings(window=256, windows=3, queries=48, hidden=32, clusters=16, steps=8, batch=16, local=31, far=16)
HEADS = replace(SMALL, index=False)
MIXED = flat_config(block_size=32, low_heads=0.5, low_bits=3)


def lab(**options: Any) -> Calibration:
    model, tokenizer = lab_model()
    return calibrate(model, tokenizer, TEXTS, **{"settings": HEADS, **options})


def reversed_heads(calibration: Calibration) -> Calibration:
    """The same with every head ranked the other way round."""
    layers = [replace(at, scores={name: -x for name, x in at.scores.items()}) for at in calibration.layers]
    return replace(calibration, layers=tuple(layers))


def same(a: Calibration, b: Calibration) -> bool:
    """Whether all that is stored is equal, bit by bit."""
    return a.digest() == b.digest()
