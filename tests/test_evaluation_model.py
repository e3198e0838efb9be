"""Evaluation: the adapter that lm-evaluation-harness talks to, and the methods that it is patched with."""

from typing import Any

import pytest
import torch
from models import lab_model, prompts, tiny_llama

pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install -e ".[eval]"')
pytest.importorskip("datasets", reason='datasets is not installed: pip install -e ".[eval]"')

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from turbo_hf.eval.answers import Batch
from turbo_hf.eval.methods import BASELINE, EAGER, applied, method_named
from turbo_hf.eval.model import TurboLM
from turbo_hf.eval.reading import without_plans
from turbo_hf.eval.tasks import carried_prose
from turbo_hf.models.versions import CACHE


def questions(tokenizer: Any) -> list[tuple[Any, list[int], list[int]]]:
    """Contexts of different lengths, the longest past a sealed block; two choices of one token share a context."""
    long = " ".join(carried_prose(1, 12))
    pairs = [(long, " I went to the woods"), (long[:150], " because I wished"), ("A", " bee"), ("A", " fly")]
    encoded = [(tokenizer(c).input_ids, tokenizer(e, add_special_tokens=False).input_ids) for c, e in pairs]
    # and one continuation of several chunks behind a single token, as rolling perplexity brings
    encoded.append((encoded[0][0][:1], encoded[0][0][1:180]))
    return [(None, context, continuation) for context, continuation in encoded]


def scores(lm: Any, requests: Any) -> torch.Tensor:
    return torch.tensor([score for score, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)])


def test_it_is_registered_in_the_harness() -> None:
    assert get_model("turbo-hf") is TurboLM


def test_log_likelihoods_read_the_compressed_cache_and_are_stock_without_it() -> None:
    model, tokenizer = lab_model()
    requests = questions(tokenizer)
    stock = scores(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2), requests)
    lm = TurboLM(model, preset="int8", tokenizer=tokenizer, batch_size=2)
    assert lm.handle is not None
    ours = scores(lm, requests)
    assert lm.handle.memory().total > 0
    # each differs, by a rounding of keys and values and no more
    assert bool((ours != stock).all())
    torch.testing.assert_close(ours, stock, rtol=0.02, atol=0.1)
    lm.close()
    assert torch.equal(scores(lm, requests), stock)


def test_scores_are_those_of_a_pass_by_pass_reading() -> None:
    model, tokenizer = lab_model()
    (request,) = questions(tokenizer)[:1]
    _, context, continuation = request
    lm = TurboLM(model, preset="turbo4", tokenizer=tokenizer, batch_size=1)
    assert lm.handle is not None
    cache = lm.handle.new_cache()
    with torch.inference_mode():
        model(torch.tensor([context[:-1]]), **{CACHE: cache})
        logits = model(torch.tensor([[context[-1], *continuation[:-1]]]), **{CACHE: cache}).logits[0]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(continuation)[:, None]).sum()
    torch.testing.assert_close(scores(lm, [request])[0], expected)
    lm.close()


def test_scores_do_not_depend_on_the_batch() -> None:
    model, tokenizer = lab_model()
    requests = questions(tokenizer)
    found = []
    for size in (1, 8):
        lm = TurboLM(model, preset="turbo2", tokenizer=tokenizer, batch_size=size)
        found.append(scores(lm, requests))
        lm.close()
    torch.testing.assert_close(*found)


def test_a_smaller_chunk_reads_more_of_the_text_compressed() -> None:
    model, tokenizer = lab_model()
    rolling = questions(tokenizer)[-1:]
    stock = scores(HFLM(pretrained=model, tokenizer=tokenizer), rolling)
    off = []
    for chunk in (32, 4096):
        with_cache = TurboLM(model, preset="turbo2/native", chunk=chunk, tokenizer=tokenizer)
        off.append(float((scores(with_cache, rolling) - stock).abs()))
        with_cache.close()
    # one chunk of everything has no past to read: it would be a measurement of nothing
    assert off[1] < 1e-2 < off[0]


def test_batches_hold_so_many_tokens_and_replies_do_not_depend_on_them() -> None:
    model, tokenizer = lab_model()
    prompts_of = carried_prose(5, 3) + carried_prose(3, 6)
    ways = [{"until": [], "max_gen_toks": 3 + at % 2, "do_sample": False} for at in range(len(prompts_of))]
    requests = [Instance("generate_until", {}, pair, at) for at, pair in enumerate(zip(prompts_of, ways, strict=True))]
    found: dict[int | None, list[str]] = {}
    for budget in (None, 1, 900):
        taken: list[Batch] = []
        lm = TurboLM(
            model, preset="fp16", tokenizer=tokenizer, batch_size=3, batch_tokens=budget, on_batch=taken.append
        )
        found[budget] = lm.generate_until(requests, disable_tqdm=True)
        assert sum(batch.rows for batch in taken) == len(requests)
        assert lm.batch_size == 3
        if budget == 1:
            assert {batch.rows for batch in taken} == {1}
        elif budget:
            assert 1 < max(batch.rows for batch in taken) <= 3
            assert all(batch.rows == 1 or batch.kv_tokens <= 900 + 4 * batch.rows for batch in taken)
    assert found[None] == found[1] == found[900]


def test_too_long_a_context_loses_its_left_end_as_in_the_harness() -> None:
    model = tiny_llama()
    _, tokenizer = lab_model()
    ids = prompts(1, 90)[0].tolist()
    request = [(None, ids[:80], ids[80:])]
    plain = HFLM(pretrained=model, tokenizer=tokenizer, max_length=40)
    lm = TurboLM(model, preset="int8", tokenizer=tokenizer, max_length=40)
    ours = scores(lm, request)
    lm.close()
    torch.testing.assert_close(ours, scores(plain, request), rtol=0.05, atol=0)


def test_the_adapter_refuses() -> None:
    with pytest.raises(ValueError, match="chunk must be at least 1 token; got 0"):
        TurboLM("no/such-model", chunk=0)


def test_methods_have_one_name_each() -> None:
    model, _ = lab_model()
    assert method_named(BASELINE).config is None
    config: Any = method_named("turbo4/native").config
    assert (config.bits, config.attention) == (4, "native")
    before = model.config._attn_implementation
    for name in (EAGER, BASELINE, "int8"):
        with applied(model, method_named(name)) as handle:
            assert (handle is not None) == (name == "int8")
        assert model.config._attn_implementation == before


def test_sdpa_is_without_plans_inside_and_as_it_was_after() -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with without_plans():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
