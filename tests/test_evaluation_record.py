"""Evaluation: what a run records of itself, so that runs of other models, items or versions are not merged."""

import json
from pathlib import Path

import pytest
import torch
from models import lab_model, tiny_llama

pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install -e ".[eval]"')
pytest.importorskip("datasets", reason='datasets is not installed: pip install -e ".[eval]"')

from turbo_hf.eval.evaluate import load_tasks
from turbo_hf.eval.run_identity import META, fingerprint, identity, open_run
from turbo_hf.eval.suites import Limits
from turbo_hf.eval.tasks import needle_task
from turbo_hf.eval.token_cache import Prompts

LIMITS = Limits(context=2048, longest=512)


def test_another_run_is_not_merged(tmp_path: Path) -> None:
    model, tokenizer = lab_model()
    tasks, _ = load_tasks([needle_task(tokenizer, [150], [0.5], [0])], Prompts(tokenizer), LIMITS)
    about = identity(model, tokenizer, tasks, {"suite": "smoke", "limit": None})
    open_run(tmp_path, about)
    meta = open_run(tmp_path, about)
    assert len(meta["commands"]) == 2
    assert json.loads((tmp_path / META).read_text())["identity"] == about
    older = {**about, "versions": {**about["versions"], "torch": "1.0"}, "limit": 3}
    with pytest.raises(
        ValueError, match=r"limit was None, now 3; versions.torch was .*, now 1.0. Results of different"
    ):
        open_run(tmp_path, older)


def test_fingerprints_tell_models_and_items_apart() -> None:
    model, tokenizer = lab_model()
    one, other = tiny_llama(), tiny_llama()
    assert fingerprint(one) == fingerprint(other)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.01)
    assert fingerprint(one) != fingerprint(other)
    digests = []
    for seed in (0, 1):
        tasks, _ = load_tasks([needle_task(tokenizer, [150], [0.5], [seed])], Prompts(tokenizer), LIMITS)
        digests.append(identity(model, tokenizer, tasks, {})["tasks"])
    assert digests[0] != digests[1]
