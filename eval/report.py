"""The results of a run as one structure: paired verdicts, perplexities, bytes and speed; and their tables."""

from collections import defaultdict
from collections.abc import Mapping
from math import comb, sqrt
from statistics import stdev
from typing import Any

from turbo_hf.eval.answers import Batch
from turbo_hf.eval.evaluate import Outcome
from turbo_hf.eval.methods import AGAIN, BASELINE, SIMULATED
from turbo_hf.eval.output import LIMITED, Table, without_dashes
from turbo_hf.eval.scorers import needle_cells, reply_of, worst
from turbo_hf.eval.tasks import Spec

SURE = 0.8
"""Share of right answers below which a baseline says little about a method: such tasks stay out of the second mean."""

Verdicts = Mapping[str, list[bool]]
"""Right or wrong, item by item, of each method; the baseline is first."""


def report(specs: list[Spec], outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Figures of every method, ready for JSON.

    Args:
        specs: the tasks that ran.
        outcomes: by label; the baseline is first, and every other method is paired with it.

    Returns:
        accuracy: a row for each task and scorer: items; for each method right, accuracy, stderr and what `paired` says.
        means: of the headline scorers, over all tasks and over those whose baseline is at least 80 % right, with the
            pairs of all items.
        lengths: the same verdicts by length of the prompt, pooled over tasks that have several lengths.
        differences: points of accuracy against the baseline, with the standard error of the pairs.
        needles: cells (length, depth, share found), their mean and the worst.
        perplexity: one row per metric.
        replies: for each method the share of replies that are the baseline's, letter by letter, and their mean length.
        serving: bytes of the KV cache per token, against the baseline's, and generated tokens per second.
        reading: for sparse methods, the share of the keys that decode steps read in sparse layers, and the same without
            the always-read tokens.
    """
    rows = []
    headline: dict[str, Verdicts] = {}
    classes: dict[str, list[int]] = {}
    for spec in specs:
        for scorer in spec.scorers:
            found = {label: scorer.verdicts(outcome.samples[spec.name]) for label, outcome in outcomes.items()}
            order = sorted(found[BASELINE])
            verdicts = {label: [own[item] for item in order] for label, own in found.items()}
            about = {"task": spec.name, "scorer": scorer.name, "stock": scorer.stock, "headline": scorer.headline}
            rows.append({**about, "items": len(order), "methods": _compared(verdicts)})
            if scorer.headline:
                headline[spec.name] = verdicts
                # a headline counts items, so that a verdict has a document
                docs = {sample["doc_id"]: sample["doc"] for sample in outcomes[BASELINE].samples[spec.name]}
                classes[spec.name] = [length_class(docs[item]) for item in order]
    sure = {task: own for task, own in headline.items() if sum(own[BASELINE]) >= SURE * len(own[BASELINE])}
    over = {"all tasks": headline, f"baseline >= {SURE:.0%}": sure}
    return {
        "accuracy": rows,
        "means": [{"over": name, "tasks": len(tasks), **_mean(tasks)} for name, tasks in over.items() if tasks],
        "lengths": _by_length(headline, classes),
        "differences": _differences(headline, [label for label in outcomes if label != BASELINE]),
        "needles": _needles(outcomes),
        "perplexity": _perplexities(outcomes),
        "replies": _replies(outcomes),
        "serving": _serving(outcomes),
        "reading": _reading(outcomes),
    }


def paired(baseline: list[bool], other: list[bool]) -> dict[str, Any]:
    """Items of two methods: right with both (kept), with the baseline alone (lost), with the other alone (gained), with
    none; and p, the exact two-sided McNemar probability that lost and gained differ this much by chance."""
    both = list(zip(baseline, other, strict=True))
    lost, gained = both.count((True, False)), both.count((False, True))
    tail = sum(comb(lost + gained, i) for i in range(min(lost, gained) + 1)) / 2 ** (lost + gained)
    kept, neither = both.count((True, True)), both.count((False, False))
    return {"kept": kept, "lost": lost, "gained": gained, "neither": neither, "p": min(1.0, 2 * tail)}


def _compared(verdicts: Verdicts) -> dict[str, dict[str, Any]]:
    compared: dict[str, dict[str, Any]] = {}
    for label, own in verdicts.items():
        share, count = sum(own) / len(own), len(own)
        error = sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
        compared[label] = {"right": sum(own), "accuracy": share, "stderr": error}
        if label != BASELINE:
            compared[label] |= paired(verdicts[BASELINE], own)
    return compared


def _mean(tasks: Mapping[str, Verdicts]) -> dict[str, Any]:
    """The mean of the tasks' accuracies, each task counting once, and the pairs of all their items."""
    each = [_compared(own) for own in tasks.values()]
    pooled = _compared({label: [v for own in tasks.values() for v in own[label]] for label in each[0]})
    for label, own in pooled.items():
        own["accuracy"] = sum(task[label]["accuracy"] for task in each) / len(each)
        # the error of a mean of tasks, each with its own
        own["stderr"] = _mean_error([task[label]["stderr"] for task in each])
    return {"items": sum(len(own[BASELINE]) for own in tasks.values()), "methods": pooled}


def _differences(headline: Mapping[str, Verdicts], others: list[str]) -> list[dict[str, Any]]:
    """Points of accuracy between methods and the baseline: their mean over tasks, and the task that loses most."""
    found = []
    for label in others if headline else ():
        points = {t: 100 * (sum(v[label]) - sum(v[BASELINE])) / len(v[label]) for t, v in headline.items()}
        least = min(points, key=lambda task: points[task])
        error = _mean_error([_paired_error(own[BASELINE], own[label]) for own in headline.values()])
        means = {"mean": sum(points.values()) / len(points), "stderr": None if error is None else 100 * error}
        lost = {"worst_task": least if points[least] < 0 else None, "worst": points[least]}
        found.append({"method": label, **means, **lost})
    return found


def _paired_error(base: list[bool], own: list[bool]) -> float | None:
    """The standard error of the mean difference of pairs; None for a single pair."""
    changes = [now - before for before, now in zip(base, own, strict=True)]
    return stdev(changes) / sqrt(len(changes)) if len(changes) > 1 else None


def _mean_error(errors: list[float | None]) -> float | None:
    """The standard error of a mean of tasks, from the error of each; None if one is unknown."""
    known = [error for error in errors if error is not None]
    return sqrt(sum(error**2 for error in known)) / len(errors) if len(known) == len(errors) else None


def _needles(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    found = {}
    for label, outcome in outcomes.items():
        cells = needle_cells(outcome.samples.get("needle", []))
        if cells:
            rows = [{"length": length, "depth": depth, "share": own} for (length, depth), own in cells.items()]
            (length, depth), share = worst(cells)
            least = {"length": length, "depth": depth, "share": share}
            found[label] = {"mean": sum(cells.values()) / len(cells), "worst": least, "cells": rows}
    return found


def _replies(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, float]]:
    """Texts beside the baseline's; {} where nothing was generated."""
    found = {
        label: {
            (task, row["doc_id"]): reply_of(row)
            for task, rows in outcome.samples.items()
            for row in rows
            if row.get("resps") and isinstance(row["resps"][0][0], str)
        }
        for label, outcome in outcomes.items()
    }
    base = found[BASELINE]
    return {
        label: {
            "same": sum(text == base[item] for item, text in own.items()) / len(own),
            "characters": sum(map(len, own.values())) / len(own),
        }
        for label, own in found.items()
        if own
    }


def length_class(doc: Mapping[str, Any]) -> int:
    """The power of two that a document's "length" in tokens does not exceed; 0 where it says none."""
    length = doc.get("length")
    return 1 << (length - 1).bit_length() if isinstance(length, int) and length > 0 else 0


def _by_length(headline: Mapping[str, Verdicts], classes: Mapping[str, list[int]]) -> list[dict[str, Any]]:
    """One row per length: tasks with one length say nothing about it, and are left out."""
    pooled: dict[int, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for task, verdicts in headline.items():
        if len(set(classes[task])) > 1:
            for label, own in verdicts.items():
                for length, verdict in zip(classes[task], own, strict=True):
                    pooled[length][label].append(verdict)
    return [
        {"up_to": length, "items": len(own[BASELINE]), "methods": _compared(own)}
        for length, own in sorted(pooled.items())
    ]


def _perplexities(outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    each = {label: outcome.results["results"] for label, outcome in outcomes.items()}
    return [
        {"task": task, "metric": metric, "methods": {label: own[task][f"{metric},none"] for label, own in each.items()}}
        for task, figures in each[BASELINE].items()
        for metric in ("word_perplexity", "byte_perplexity")
        if f"{metric},none" in figures
    ]


def _serving(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, float | int | None]]:
    base = _bytes(outcomes[BASELINE].batches)
    serving: dict[str, dict[str, float | int | None]] = {}
    for label, outcome in outcomes.items():
        own, seconds = _bytes(outcome.batches), sum(b.seconds for b in outcome.batches)
        # a simulation's speed is that of rounding in plain torch: it says nothing about the method
        timed = seconds and label not in SIMULATED
        serving[label] = {
            "simulated": label in SIMULATED,
            "prompts": sum(b.rows for b in outcome.batches),
            "kv_bytes_per_token": own,
            "compression": base / own if base and own else None,
            "tokens_per_s": sum(b.new_tokens for b in outcome.batches) / seconds if timed else None,
        }
    return serving


def _reading(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, float]]:
    found = {}
    for label, outcome in outcomes.items():
        keys = [batch.keys for batch in outcome.batches if batch.keys is not None]
        if keys:
            there, dense, read = (sum(part) for part in zip(*keys, strict=True))
            found[label] = {"share": read / max(1, there), "share_beyond": (read - dense) / max(1, there - dense)}
    return found


def _bytes(batches: list[Batch]) -> float | None:
    tokens = sum(b.kv_tokens for b in batches)
    return sum(b.kv_bytes for b in batches) / tokens if tokens else None


def tables(found: dict[str, Any]) -> list[Table]:
    """Tables for the terminal, Markdown and HTML alike; those without rows are left out."""
    labels = list(found["serving"])
    named = [label + (" (simulated)" if own["simulated"] else "") for label, own in found["serving"].items()]
    shown = []

    def add(title: str, headings: list[str], rows: list[list[str]]) -> None:
        if rows:
            shown.append(without_dashes(Table(title, headings, rows)))

    def cells(row: dict[str, Any], *first: object) -> list[str]:
        return [*map(str, first), str(row["items"]), *(_cell(row["methods"][label]) for label in labels)]

    title = "right: % ± standard error; - lost, + gained against fp16; exact McNemar p; * enters the means"
    rows = [cells(row, row["task"], row["scorer"] + " *" * row["headline"]) for row in found["accuracy"]]
    add(title, ["task", "scorer", "items", *named], rows)
    rows = [cells(row, f"{row['over']} ({row['tasks']})") for row in found["means"]]
    add("mean of tasks", ["over", "items", *named], rows)
    title, headings = "points of accuracy against fp16 ± standard error of the pairs", ["mean of tasks"]
    headings += ["largest loss in", "there"]
    add(title, ["method", *headings], [_points(own) for own in found["differences"]])
    rows = [[label, f"{own['same']:.1%}", f"{own['characters']:.0f}"] for label, own in found["replies"].items()]
    add("replies", ["method", "the same text as fp16", "mean length, characters"], rows)
    rows = [
        [label, f"{own['mean']:.3f}", f"{least['share']:.2f}", f"{least['length']:,}", f"{least['depth']:.0%}"]
        for label, own in found["needles"].items()
        for least in (own["worst"],)
    ]
    add("needles: share found", ["method", "mean of cells", "worst cell", "its tokens", "its depth"], rows)
    rows = [cells(row, f"{row['up_to']:,}") for row in found["lengths"]]
    add("tasks of several lengths, by tokens of the prompt", ["up to", "items", *named], rows)
    rows = [[r["task"], r["metric"], *(f"{r['methods'][x]:.4f}" for x in labels)] for r in found["perplexity"]]
    add("perplexity, lower is better", ["task", "metric", *named], rows)
    rows = [
        [name, str(own["prompts"]), *_figures(own), "computed" if own["simulated"] else "measured"]
        for name, own in zip(named, found["serving"].values(), strict=True)
        if own["prompts"]
    ]
    headings = ["method", "prompts", "KV bytes/token", "ratio", "tokens/s", "bytes are"]
    add("memory and speed of generation", headings, rows)
    rows = [[label, f"{own['share']:.1%}", f"{own['share_beyond']:.1%}"] for label, own in found["reading"].items()]
    add("keys that decode steps of sparse layers read", ["method", "of all", "of those not always read"], rows)
    return shown


def _figures(own: dict[str, Any]) -> list[str]:
    forms = {"kv_bytes_per_token": "{:.0f}", "compression": "{:.2f} x", "tokens_per_s": "{:.1f}"}
    return ["-" if own[name] is None else form.format(own[name]) for name, form in forms.items()]


def _points(own: dict[str, Any]) -> list[str]:
    error = "" if own["stderr"] is None else f" ± {own['stderr']:.2f}"
    return [own["method"], f"{own['mean']:+.2f}{error}", own["worst_task"] or "-", f"{own['worst']:+.2f}"]


def _cell(own: dict[str, Any]) -> str:
    error = "" if own["stderr"] is None else f" ± {100 * own['stderr']:.1f}"
    pairs = f"; -{own['lost']} +{own['gained']}; p {own['p']:.2g}" if "p" in own else ""
    return f"{100 * own['accuracy']:.1f}{error}{pairs}"


def stamps(identity: dict[str, Any]) -> list[str]:
    """Lines that must be read with the tables."""
    limit, versions = identity["limit"], identity["versions"]
    first = [
        f"{identity['model']} ({identity['model_fingerprint']}), {identity['dtype']} on {identity['device']}; suite "
        f"{identity['suite']}, batch {identity['batch']}, greedy, seed {identity['seed']}; lm-eval "
        f"{versions['lm_eval']}, transformers {versions['transformers']}, torch {versions['torch']}."
    ]
    return first if limit is None else [*first, f"{LIMITED} to {limit} items a task: a smoke test, not a result."]


def noise(found: dict[str, Any]) -> str:
    """What the second run of the baseline shows."""
    mean = next((m for m in found["means"] if m["over"] == "all tasks"), None)
    if mean is None:
        return f"{AGAIN}: no item is judged right or wrong in this suite."
    again = mean["methods"][AGAIN]
    differ = again["lost"] + again["gained"]
    return f"Noise floor: {differ} of {mean['items']} items differ between two baseline runs in different batches."
