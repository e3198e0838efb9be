"""lm-evaluation-harness's own command line, with the model `turbo-hf` added.

    python -m turbo_hf.eval.lm_eval run --model turbo-hf --model_args pretrained=MODEL,preset=turbo4 --tasks gsm8k_cot

`preset` is a method of `turbo-hf eval` (fp16, turbo4, kivi4, ...); every other argument is the harness's own. Releases
after 0.4.13 find the model by its entry point: there `lm_eval` does the same.
"""

from lm_eval.__main__ import cli_evaluate

import turbo_hf.eval.model  # noqa: F401  registers the model

if __name__ == "__main__":
    cli_evaluate()
