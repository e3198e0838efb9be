"""One rank of four: two share the heads of a model (tensor parallel), and two of these pairs share a context.

    python grid_ranks.py RANK FOLDER cpu

FOLDER holds the checkpoint "llama"; what the rank has seen goes to FOLDER/RANK.json.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_support import error_of, run_rank
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from two_ranks import CONFIGS, answer

import turbo_hf


class Grid:
    """What one rank is asked."""

    def __init__(self, rank: int, folder: Path, device: str):
        self.rank = rank
        config = DistributedConfig(tp_size=2, dp_replicate_size=2)
        loaded = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float64, distributed_config=config)
        self.llama = loaded.eval()
        self.group, self.brief = (
            [dist.new_group([n, n + 2], timeout=timedelta(seconds=wait)) for n in (0, 1)][rank % 2] for wait in (30, 3)
        )
        self.sharing = [dist.new_group([n, n + 1]) for n in (0, 2)][rank // 2]

    def answers(self) -> Any:
        found = {}
        for name in ("turbo-mixed",):
            tokens, report, memory = answer(self.llama, CONFIGS[name], context_group=self.group)
            found[name] = [tokens, report.ranks, report.steps, memory.by_kind, memory.ranks]
        return found

    def refused(self) -> Any:
        """Sentences, which must be the same on all ranks."""
        found = [error_of(lambda: turbo_hf.patch(self.llama, context_group=self.sharing))]
        group = self.brief if self.rank < 2 else None
        found.append(error_of(lambda: turbo_hf.patch(self.llama, context_group=group).remove()))
        dist.barrier()
        with torch.no_grad():
            self.llama.model.layers[0].self_attn.q_proj.weight.to_local()[0, 0] += self.rank == 3
        found.append(error_of(lambda: turbo_hf.patch(self.llama, context_group=self.group)))
        return found


def main() -> None:
    run_rank(Grid, lambda device: ("answers", "refused"))


if __name__ == "__main__":
    main()
