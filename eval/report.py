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
from turbo_hf.eval.report_plots import needle_cells, worst
from turbo_hf.eval.scorers import reply_of
from turbo_hf.eval.tasks import Spec

SURE = 0.8
"""Share of right answers below which a baseline says little about a method: such tasks stay out of the second mean."""

SAME_BYTES = 0.01
"""Methods are paired with each other if their bytes per token differ by at most this share."""

PERPLEXITIES = ("word_perplexity", "byte_perplexity")


def report(specs: list[Spec], outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Figures of every method, ready for JSON.

    Args:
        specs: the tasks that ran.
        outcomes: by label; the baseline is first, and every other method is paired with it.

    Returns:
        accuracy: a row for each task and scorer: items; for each method right, accuracy, stderr and (but for the
            baseline) kept, lost, gained, neither and the exact McNemar p.
        means: of the headline scorers, over all tasks and over those whose baseline is at least 80 % right, with the
            pairs of all items.
        lengths: the same verdicts by length of the prompt, pooled over tasks that have several lengths.
        differences: points of accuracy against the baseline, with the standard error of the pairs.
        pairs: the same between methods of equal bytes and the first of them.
        needles: cells (length, depth, share found), their mean and the worst.
        perplexity: one row per metric.
        replies: for each method the share of replies that are the baseline's, letter by letter, and their mean length.
        serving: bytes of the KV cache per token, against the baseline's, and generated tokens per second.
        reading: for sparse methods, the share of the keys that decode steps read in sparse layers, and the same without
            the always-read tokens.
    """
    rows = []
    headline: dict[str, dict[str, list[bool]]] = {}
    classes: dict[str, list[int]] = {}
    for spec in specs:
        for scorer in spec.scorers:
            found = {label: scorer.verdicts(outcome.samples[spec.name]) for label, outcome in outcomes.items()}
            order = sorted(found[BASELINE])
            verdicts = {label: [own[item] for item in order] for label, own in found.items()}
            rows.append(
                {
                    "task": spec.name,
                    "scorer": scorer.name,
                    "stock": scorer.stock,
                    "headline": scorer.headline,
                    "items": len(order),
                    "methods": _compared(verdicts),
                }
            )
            if scorer.headline:
                headline[spec.name] = verdicts
                # a headline counts items, so that a verdict has a document
                docs = {sample["doc_id"]: sample["doc"] for sample in outcomes[BASELINE].samples[spec.name]}
                classes[spec.name] = [length_class(docs[item]) for item in order]
    sure = {task: own for task, own in headline.items() if sum(own[BASELINE]) >= SURE * len(own[BASELINE])}
    means = [
        {"over": over, "tasks": len(tasks), **_mean(tasks)}
        for over, tasks in (("all tasks", headline), (f"baseline >= {SURE:.0%}", sure))
        if tasks
    ]
    return {
        "accuracy": rows,
        "means": means,
        "lengths": _by_length(headline, classes),
        "differences": _differences(headline, BASELINE, [label for label in outcomes if label != BASELINE]),
        "pairs": [
            {"base": base, **own}
            for base, *others in _of_equal_bytes(outcomes)
            for own in _differences(headline, base, others)
        ],
        "needles": _needles(outcomes),
        "perplexity": _perplexities(outcomes),
        "replies": _replies(outcomes),
        "serving": _serving(outcomes),
        "reading": _reading(outcomes),
    }


def paired(baseline: list[bool], other: list[bool]) -> dict[str, Any]:
    """Items of two methods: right with both, with the baseline alone, with the other alone, with none; and the exact
    two-sided McNemar probability that lost and gained differ this much by chance."""
    both = list(zip(baseline, other, strict=True))
    lost, gained = both.count((True, False)), both.count((False, True))
    tail = sum(comb(lost + gained, i) for i in range(min(lost, gained) + 1)) / 2 ** (lost + gained)
    kept, neither = both.count((True, True)), both.count((False, False))
    return {"kept": kept, "lost": lost, "gained": gained, "neither": neither, "p": min(1.0, 2 * tail)}


def _compared(verdicts: Mapping[str, list[bool]]) -> dict[str, dict[str, Any]]:
    base = verdicts[BASELINE]
    compared: dict[str, dict[str, Any]] = {}
    for label, own in verdicts.items():
        share, count = sum(own) / len(own), len(own)
        compared[label] = {
            "right": sum(own),
            "accuracy": share,
            "stderr": sqrt(share * (1 - share) / (count - 1)) if count > 1 else None,
            **(paired(base, own) if label != BASELINE else {}),
        }
    return compared


def _mean(tasks: Mapping[str, Mapping[str, list[bool]]]) -> dict[str, Any]:
    """The mean of the tasks' accuracies, each task counting once, and the pairs of all their items."""
    labels = list(next(iter(tasks.values())))
    pooled = _compared({label: [v for own in tasks.values() for v in own[label]] for label in labels})
    for label in labels:
        pooled[label]["accuracy"] = sum(sum(own[label]) / len(own[label]) for own in tasks.values()) / len(tasks)
        # the error of a mean of tasks, each with its own
        pooled[label]["stderr"] = _mean_error([_compared(own)[label]["stderr"] for own in tasks.values()])
    return {"items": sum(len(own[labels[0]]) for own in tasks.values()), "methods": pooled}


def _differences(
    headline: Mapping[str, Mapping[str, list[bool]]], base: str, others: list[str]
) -> list[dict[str, Any]]:
    """Points of accuracy between methods and a base: their mean over tasks, and the task that loses most."""
    if not headline:
        return []
    found = []
    for label in others:
        points = {t: 100 * (sum(v[label]) - sum(v[base])) / len(v[label]) for t, v in headline.items()}
        least = min(points, key=lambda task: points[task])
        error = _mean_error([_paired_error(own[base], own[label]) for own in headline.values()])
        found.append(
            {
                "method": label,
                "mean": sum(points.values()) / len(points),
                "stderr": None if error is None else 100 * error,
                "worst_task": least if points[least] < 0 else None,
                "worst": points[least],
            }
        )
    return found


def _of_equal_bytes(outcomes: Mapping[str, Outcome]) -> list[list[str]]:
    """Groups of methods, without the baseline, whose caches take the same bytes per token, to within one percent."""
    groups: list[list[str]] = []
    for label, outcome in outcomes.items():
        own = _bytes(outcome.batches)
        if own is None or label in (BASELINE, AGAIN):
            continue
        for group in groups:
            if abs(own / (_bytes(outcomes[group[0]].batches) or 1) - 1) < SAME_BYTES:
                group.append(label)
                break
        else:
            groups.append([label])
    return groups


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
            (length, depth), share = worst(cells)
            found[label] = {
                "mean": sum(cells.values()) / len(cells),
                "worst": {"length": length, "depth": depth, "share": share},
                "cells": [{"length": at, "depth": deep, "share": own} for (at, deep), own in cells.items()],
            }
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


def _by_length(
    headline: Mapping[str, Mapping[str, list[bool]]], classes: Mapping[str, list[int]]
) -> list[dict[str, Any]]:
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
    rows = []
    for task, figures in outcomes[BASELINE].results["results"].items():
        for metric in PERPLEXITIES:
            key = f"{metric},none"
            if key in figures:
                found = {label: outcome.results["results"][task][key] for label, outcome in outcomes.items()}
                rows.append({"task": task, "metric": metric, "methods": found})
    return rows


def _serving(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, float | int | None]]:
    base = _bytes(outcomes[BASELINE].batches)
    serving: dict[str, dict[str, float | int | None]] = {}
    for label, outcome in outcomes.items():
        own, seconds = _bytes(outcome.batches), sum(b.seconds for b in outcome.batches)
        serving[label] = {
            "simulated": label in SIMULATED,
            "prompts": sum(b.rows for b in outcome.batches),
            "kv_bytes_per_token": own,
            "compression": base / own if base and own else None,
            # a simulation's speed is that of rounding in plain torch: it says nothing about the method
            "tokens_per_s": (
                sum(b.new_tokens for b in outcome.batches) / seconds if seconds and label not in SIMULATED else None
            ),
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

    def cells(row: dict[str, Any]) -> list[str]:
        return [_cell(row["methods"][label]) for label in labels]

    shown = [
        Table(
            "right: % ± standard error; - lost, + gained against fp16; exact McNemar p; * enters the means",
            ["task", "scorer", "items", *named],
            [
                [row["task"], row["scorer"] + (" *" if row["headline"] else ""), str(row["items"]), *cells(row)]
                for row in found["accuracy"]
            ],
        ),
        Table(
            "mean of tasks",
            ["over", "items", *named],
            [[f"{mean['over']} ({mean['tasks']})", str(mean["items"]), *cells(mean)] for mean in found["means"]],
        ),
        Table(
            "points of accuracy against fp16 ± standard error of the pairs",
            ["method", "mean of tasks", "largest loss in", "there"],
            [_points(own) for own in found["differences"]],
        ),
        Table(
            "points of accuracy of the second against the first, as above",
            ["method", "method of equal bytes", "mean of tasks", "largest loss in", "there"],
            [[own["base"], *_points(own)] for own in found["pairs"]],
        ),
        Table(
            "replies",
            ["method", "the same text as fp16", "mean length, characters"],
            [[label, f"{own['same']:.1%}", f"{own['characters']:.0f}"] for label, own in found["replies"].items()],
        ),
        Table(
            "needles: share found",
            ["method", "mean of cells", "worst cell", "its tokens", "its depth"],
            [
                [label, f"{own['mean']:.3f}", f"{least['share']:.2f}", f"{least['length']:,}", f"{least['depth']:.0%}"]
                for label, own in found["needles"].items()
                for least in (own["worst"],)
            ],
        ),
        Table(
            "tasks of several lengths, by tokens of the prompt",
            ["up to", "items", *named],
            [[f"{row['up_to']:,}", str(row["items"]), *cells(row)] for row in found["lengths"]],
        ),
        Table(
            "perplexity, lower is better",
            ["task", "metric", *named],
            [
                [row["task"], row["metric"], *(f"{row['methods'][label]:.4f}" for label in labels)]
                for row in found["perplexity"]
            ],
        ),
        Table(
            "memory and speed of generation",
            ["method", "prompts", "KV bytes/token", "ratio", "tokens/s", "bytes are"],
            [
                [name, str(own["prompts"]), *_figures(own), "computed" if own["simulated"] else "measured"]
                for name, own in zip(named, found["serving"].values(), strict=True)
                if own["prompts"]
            ],
        ),
        Table(
            "keys that decode steps of sparse layers read",
            ["method", "of all", "of those not always read"],
            [[label, f"{own['share']:.1%}", f"{own['share_beyond']:.1%}"] for label, own in found["reading"].items()],
        ),
    ]
    return [without_dashes(table) for table in shown if table.rows]


def _figures(own: dict[str, Any]) -> list[str]:
    forms = {"kv_bytes_per_token": "{:.0f}", "compression": "{:.2f} x", "tokens_per_s": "{:.1f}"}
    return ["-" if own[name] is None else form.format(own[name]) for name, form in forms.items()]


def _points(own: dict[str, Any]) -> list[str]:
    mean = f"{own['mean']:+.2f}{_error(own['stderr'])}"
    return [own["method"], mean, own["worst_task"] or "-", f"{own['worst']:+.2f}"]


def _error(points: float | None) -> str:
    return "" if points is None else f" ± {points:.2f}"


def _cell(own: dict[str, Any]) -> str:
    error = "" if own["stderr"] is None else f" ± {100 * own['stderr']:.1f}"
    pairs = f"; -{own['lost']} +{own['gained']}; p {own['p']:.2g}" if "p" in own else ""
    return f"{100 * own['accuracy']:.1f}{error}{pairs}"


def stamps(identity: dict[str, Any]) -> list[str]:
    """Lines that must be read with the tables."""
    limit = identity["limit"]
    versions = identity["versions"]
    first = [
        f"{identity['model']} ({identity['model_fingerprint']}), {identity['dtype']} on {identity['device']}; suite "
        f"{identity['suite']}, batch {identity['batch']}, greedy, seed {identity['seed']}; lm-eval "
        f"{versions['lm_eval']}, transformers {versions['transformers']}, torch {versions['torch']}."
    ]
    if limit is not None:
        first.append(f"{LIMITED} to {limit} items a task: a smoke test, not a result.")
    return first


def noise(found: dict[str, Any]) -> str:
    """What the second run of the baseline shows."""
    mean = next((m for m in found["means"] if m["over"] == "all tasks"), None)
    if mean is None:
        return f"{AGAIN}: no item is judged right or wrong in this suite."
    again = mean["methods"][AGAIN]
    differ = again["lost"] + again["gained"]
    return f"Noise floor: {differ} of {mean['items']} items differ between two baseline runs in different batches."
