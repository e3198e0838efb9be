"""`model.generate(..., custom_generate=REPOSITORY, trust_remote_code=True)`: one call on a compressed cache."""

from typing import Any

import turbo_hf


def generate(model: Any, preset: Any = None, calibration: Any = "auto", **options: Any) -> Any:
    """What `model.generate(**options)` returns on a patched model. The model is as before afterwards, also after an
    error.

    preset: as `config` of `turbo_hf.patch`: a preset, a dict of options, or a file of them; None: "turbo4".
    calibration: as in `turbo_hf.patch`.
    """
    with turbo_hf.patch(model, preset, calibration=calibration):
        return model.generate(**options)
