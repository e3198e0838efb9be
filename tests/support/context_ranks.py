"""One rank of a context group of two: what `test_context_group.py` asks of it, as JSON.

    python context_ranks.py RANK FOLDER cpu|cuda

What the rank has seen goes to FOLDER/RANK.json. Without a group, the same calls give what one process sees.
"""

import copy
import pickle
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from choices import flat_config
from models import LAB_MODEL, prompts, tiny_llama, tiny_mistral
from patching_support import tiny
from ranks_support import error_of, run_rank, stand_ins
from tiny_families import build
from transformers import AutoModelForCausalLM, AutoTokenizer

import turbo_hf
from turbo_hf import SparseConfig, TurboConfig
from turbo_hf.graphs import replayable_steps
from turbo_hf.models.versions import CACHE

NEW = 16
KEYS = [f"{one}-{other}" for one in ("wild", "calm", "icy") for other in ("fox", "lake", "moss")]
SMALL = flat_config(block_size=32)
CONFIGS = {
    "turbo4": SMALL,
    "int8": flat_config(bits=8, block_size=32),
    "16 bit": flat_config(bits=16, block_size=32),
    "turbo-mixed": flat_config(low_bits=2, low_heads=0.5, block_size=32, sas=True),
}
CHUNKED = ("int8", "turbo-mixed")
"""Configs whose prompts come in chunks, too; `logits` are of chunks at 4 and 16 bit."""


def question(count: int, asked: int) -> str:
    """Numbers by name, and the question for one of them, which the lab model answers."""
    said = [f"One of the special magic numbers for {key} is: {1234567 + 765431 * n}." for n, key in enumerate(KEYS)]
    about = f"special magic number for {KEYS[asked]} mentioned in the text"
    return "\n".join([*said[:count], f"What is the {about}? The {about} is"])


class Asked:
    """What one process is asked. Every method that is public is a case; both ranks run them in the same order."""

    def __init__(self, rank: int | None, folder: Path | None, device: str):
        self.rank, self.device = rank, device
        self.group = None if rank is None else dist.group.WORLD
        self.dtype = torch.float64 if device == "cpu" else torch.float32
        lab = AutoModelForCausalLM.from_pretrained(LAB_MODEL, dtype=self.dtype, attn_implementation="eager")
        self.lab, self.tokenizer = lab.eval().to(device), AutoTokenizer.from_pretrained(LAB_MODEL)

    def patch(self, model: Any, config: TurboConfig = SMALL, **options: Any) -> Any:
        return turbo_hf.patch(model, config, context_group=self.group, **options)

    def rows(self, *texts: str) -> dict[str, Any]:
        given = self.tokenizer([*texts], return_tensors="pt", padding=True).to(self.device)
        return {"input_ids": given.input_ids, "attention_mask": given.attention_mask}

    def presets(self) -> Any:
        """A ragged batch, its prompt whole and in chunks."""
        found = {}
        # on a GPU each config costs the compilation of its kernels
        for name, config in [*CONFIGS.items()][: 4 if self.device == "cpu" else 1]:
            given = self.rows(question(8, 2), question(4, 1), question(1, 0))
            width, options = (
                given["input_ids"].shape[1],
                {"min_new_tokens": NEW, "max_new_tokens": NEW, "do_sample": False},
            )
            with self.patch(self.lab, config) as handle:
                ways: list[dict[str, Any]] = [{}]
                if name in CHUNKED or self.device != "cpu":
                    ways.append({"prefill_chunk_size": 64})
                whole, *chunked = (self.lab.generate(**given, **options, **more)[:, width:] for more in ways)
                answers = self.tokenizer.batch_decode(whole[:, :8])
                found[name] = [whole.tolist(), *(tokens.tolist() for tokens in chunked), answers]
        return [found, handle.report().ranks]

    def memory(self) -> Any:
        """Bytes of one long row."""
        with self.patch(self.lab) as handle:
            self.lab.generate(prompts(1, 32 * 40).to(self.device), max_new_tokens=2, do_sample=False)
            memory = handle.memory()
            return [memory.by_kind, memory.ranks, memory.compression]

    def logits(self) -> Any:
        """Those of a turn that goes on, after crops into open and sealed tokens, over reordered rows."""
        found: list[Any] = []
        for name in ("turbo4", "16 bit")[: 2 if self.device == "cpu" else 1]:
            self._turns(CONFIGS[name], found)
        return found

    def _turns(self, config: TurboConfig, found: list[Any]) -> None:
        given = self.rows(question(7, 2), question(4, 1))
        ids, mask = given["input_ids"], given["attention_mask"]
        with self.patch(self.lab, config) as handle, torch.no_grad():
            cache = handle.new_cache()

            def go_on(cache: Any, tokens: int) -> None:
                seen = cache.get_seq_length()
                part = ids[:, seen : seen + tokens]
                out = self.lab(part, attention_mask=mask[:, : seen + tokens], **{CACHE: cache})
                found.append(out.logits[:, -1].double().tolist())

            # a prompt that leaves a row in padding, a chunk over a past, a few tokens, a step
            for tokens in (70, 60, 7, 1):
                go_on(cache, tokens)
            for tokens in (-3, -50, -40):
                cache.crop(tokens)
                go_on(cache, 20)
            copied = copy.deepcopy(cache)
            ids, mask = ids[[0, 0]], mask[[0, 0]]
            copied.reorder_cache(torch.tensor([0, 0]))
            go_on(copied, 20)

    def beams_and_drafts(self) -> Any:
        given = self.rows(question(3, 1))
        with self.patch(self.lab):
            beams = self.lab.generate(**given, max_new_tokens=NEW, num_beams=3, do_sample=False).tolist()
            lookup = {"prompt_lookup_num_tokens": 8, "max_new_tokens": NEW, "do_sample": False}
            return [beams, self.lab.generate(**given, **lookup).tolist()]

    def windows(self) -> Any:
        """A model whose every other layer has a window, sinks or softcap: those layers stay whole."""
        kinds = ["sliding_attention", "full_attention"]
        made: Any = tiny("gemma3_text", layer_types=kinds, sliding_window=40, attn_logit_softcapping=20.0)
        model = made.to(self.device, self.dtype)
        with self.patch(model) as handle:
            ids = prompts(2, 100).to(self.device)
            tokens = model.generate(ids, max_new_tokens=NEW, do_sample=False)[:, 100:].tolist()
            return [tokens, handle.memory().layers]


class Ranks(Asked):
    """And what only ranks are asked."""

    def graphs(self) -> Any:
        """Captured steps beside those that are launched: over ragged rows, of beams and of drafts."""
        # no kernel serves float64
        model, graphs = copy.deepcopy(self.lab).float(), replace(SMALL, cuda_graphs=True)
        given = self.rows(question(3, 1), question(1, 0))
        kinds = {"greedy": {"max_new_tokens": 60, "min_new_tokens": 60}}
        if self.device == "cpu":
            # two layers show as much as six
            model.model.layers = model.model.layers[:2]
            model.config.num_hidden_layers = 2
            most = {"max_new_tokens": 36, "min_new_tokens": 36}
            kinds |= {"beams": {"num_beams": 3, **most}, "lookup": {"prompt_lookup_num_tokens": 8, **most}}

        def tokens(kind: str, config: TurboConfig, **more: Any) -> Any:
            rows = given if kind != "lookup" else {name: x[:1] for name, x in given.items()}
            with self.patch(model, config) as handle:
                found = model.generate(**rows, **{"do_sample": False, **kinds[kind], **more})
                return found[:, rows["input_ids"].shape[1] :].tolist(), handle.report().steps

        found: dict[str, Any] = {}
        for kind in kinds:
            found[kind] = [tokens(kind, replace(SMALL, cuda_graphs=False))[0]]
            with stand_ins(self.device) as made:
                # pages are reserved, and steps captured, several times
                replayable_steps.AHEAD, before = 1, replayable_steps.AHEAD
                found[kind] += [*tokens(kind, graphs), [x.captures for x in made]]
                replayable_steps.AHEAD = before
        with stand_ins(self.device, "out of something" if self.rank == 1 else ""):
            found["failed"] = tokens("greedy", SMALL, max_new_tokens=8, min_new_tokens=8)[0]
        with stand_ins(self.device):
            torch.manual_seed(5 + (self.rank or 0))
            found["sampled"] = error_of(lambda: tokens("greedy", graphs, do_sample=True))
        return found

    def refused(self) -> Any:
        """Sentences, which must be the same on both ranks."""
        one, model = self.rank == 1, tiny_llama()
        other = tiny_llama()
        with torch.no_grad():
            other.lm_head.weight[5, 5] += int(one)
        sparse = replace(SMALL, sparse=SparseConfig(sink_tokens=4, window_tokens=16, probes=2))
        return {
            "checked": error_of(lambda: self.patch(model, CONFIGS["int8"], check=True).remove()),
            "configs": error_of(lambda: self.patch(model, CONFIGS["int8" if one else "turbo4"])),
            "weights": error_of(lambda: self.patch(other)),
            "group": error_of(lambda: turbo_hf.patch(model, SMALL, context_group="world")),
            "sparse": error_of(lambda: self.patch(model, sparse)),
            "compile": error_of(lambda: self.patch(model, replace(SMALL, compile=True))),
            "latent": error_of(lambda: self.patch(build("deepseek_v3"))),
            "windows": error_of(lambda: self.patch(tiny_mistral(40))),
        }

    def groups(self) -> Any:
        """Groups that differ, a rank that does not patch, and one that does not run the model."""
        one, model, wait = self.rank == 1, tiny_llama(), timedelta(seconds=3)
        groups = [dist.new_group([0, 1], timeout=wait) for _ in range(3)]
        found = {"other": error_of(lambda: turbo_hf.patch(model, SMALL, context_group=groups[one]))}
        if not one:
            found["absent"] = error_of(lambda: turbo_hf.patch(model, SMALL, context_group=groups[0]))
        dist.barrier()
        with turbo_hf.patch(model, SMALL, context_group=groups[2]) as handle:
            if not one:
                found["alone"] = error_of(lambda: model(prompts(1, 40), **{CACHE: handle.new_cache()}))
            dist.barrier()
        return found

    def outside(self) -> Any:
        """A group that one rank is not in."""
        group = dist.new_group([0])
        return error_of(lambda: turbo_hf.patch(tiny_llama(), SMALL, context_group=group).remove())

    def differing(self) -> Any:
        """Passes and calls that are not the same on both ranks."""
        one, model = self.rank == 1, tiny_llama()
        ids = prompts(2, 40)
        found = {}
        warnings.simplefilter("ignore")
        with self.patch(model, strict="warn") as handle, torch.no_grad():
            generated = {"max_new_tokens": NEW, "do_sample": True}
            torch.manual_seed(5 + one)
            found["sampled"] = error_of(lambda: model.generate(ids, **generated))
            torch.manual_seed(5)
            found["alike"] = model.generate(ids, **generated).tolist()
            found["tokens"] = error_of(lambda: model(ids + one, **{CACHE: handle.new_cache()}))
            found["shape"] = error_of(lambda: model(ids[:, one:], **{CACHE: handle.new_cache()}))
            cache = handle.new_cache()
            model(ids, **{CACHE: cache})
            found["crop"] = error_of(lambda: cache.crop(-1 - one))
            if one:
                cache.reorder_cache(torch.tensor([1, 0]))
            found["rows"] = error_of(lambda: model(ids, **{CACHE: cache}))
            cache.reset()
            model(ids, **{CACHE: cache})
            found["whole"] = error_of(lambda: model(ids, **{CACHE: turbo_hf.TurboCache(model.config, SMALL)}))
            if one:
                # as if a pass had broken off here
                cache.mark.begin("crop()")
            found["broken"] = error_of(lambda: model(ids, **{CACHE: cache}))
            cache.reset()
            model(ids, **{CACHE: cache})
            found["keys"] = error_of(lambda: cache.layers[0].keys)
            found["save"] = error_of(lambda: cache.save_pretrained("nowhere"))
            found["pickle"] = error_of(lambda: pickle.dumps(cache))
            found["serving"] = error_of(lambda: model.generate_batch(ids.tolist()))
            mask = torch.zeros(2, 1, 1, 41)
            found["mask"] = error_of(lambda: model(ids[:, :1], **{CACHE: cache}, attention_mask=mask))
            kept = handle.new_cache()
            model(ids, **{CACHE: kept})
        with turbo_hf.patch(model, SMALL):
            found["other patch"] = error_of(lambda: model(ids, **{CACHE: kept}))
        found["no patch"] = error_of(lambda: model(ids, **{CACHE: kept}))
        return found

    def broken_off(self) -> Any:
        """NaN in a pass of both ranks, after which they begin again; then as if one had broken off on one of them."""
        ids, model = prompts(1, 140), tiny_llama()
        weight = model.model.layers[-1].self_attn.k_proj.weight
        found: list[Any] = []
        with self.patch(model) as handle, torch.no_grad():
            cache, other = handle.new_cache(), handle.new_cache()
            for each in (cache, other):
                model(ids[:, :64], **{CACHE: each})
            before = weight.clone()
            weight[0] = torch.nan
            found.append(error_of(lambda: model(ids[:, 64:], **{CACHE: cache})))
            weight.copy_(before)
            found.append(error_of(lambda: model(ids[:, 64:], **{CACHE: cache})))
            cache.reset()
            model(ids[:, :64], **{CACHE: cache})
            found.append([model(ids[:, 64:], **{CACHE: x}).logits[0, -1].tolist() for x in (cache, other)])
            if self.rank == 1:
                cache.mark.begin("crop()")
            found.append(error_of(lambda: cache.crop(-1)))
        return found


def cases(of: type) -> list[str]:
    """Names of the methods that ask something, those of `Asked` first."""
    own = [name for name, value in vars(of).items() if callable(value) and not name.startswith("_")]
    inherited = cases(of.__mro__[1]) if of is not Asked else []
    return [*inherited, *(name for name in own if name not in ("patch", "rows"))]


def main() -> None:
    # on GPUs each case costs the compilation of its kernels
    on_gpu = ("presets", "memory", "logits", "graphs")
    run_rank(Ranks, lambda device: cases(Ranks) if device == "cpu" else on_gpu)


if __name__ == "__main__":
    main()
