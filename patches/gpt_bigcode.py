"""GPT-BigCode: StarCoder, SantaCoder."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="GPT-BigCode (StarCoder, SantaCoder)",
    model_types=("gpt_bigcode",),
    notes=(
        "One KV head for all query heads (`multi_query`), from a fused projection with a bias; learned positions, and "
        "no rotary embedding. Its modules call the cache `layer_past`."
    ),
)
