"""GPT-NeoX, Pythia."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="GPT-NeoX, Pythia",
    model_types=("gpt_neox",),
    notes=(
        "q, k and v come from one fused projection with a bias, a quarter of the head is rotated (`rotary_pct`), and "
        "every query head has keys of its own. Its modules call the cache `layer_past`."
    ),
)
