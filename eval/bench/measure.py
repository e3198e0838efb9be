"""`turbo-hf doctor --measure`: what an owner of another GPU runs once.

Decode and prompt kernels are checked and timed beside SDPA, decode with several tiles; the fastest tiles are kept for
`patch`, and all figures go into a file for an issue.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from turbo_hf.console import out, remark
from turbo_hf.eval.bench import checked, decode, prefill, runner
from turbo_hf.eval.bench.random_cache import draw
from turbo_hf.eval.bench.shapes import BLOCK, Case, PromptCase, find_shape, make_case
from turbo_hf.eval.bench.timing import Call, Conditions, Stopwatch, side_by_side
from turbo_hf.ops import gpu
from turbo_hf.ops.tuning import WIDE, DecodeTiles, decode_tiles, fits, keep_tiles, tile_kind, tiles_file, using

STEPS = (
    "llama3-8b 1x2k 4", "llama3-8b 1x32k 4", "qwen2.5-1.5b 1x8k 4", "qwen2.5-0.5b 1x32k 4", "llama3-8b 64x4k 4",
    "qwen2.5-0.5b 64x4k 4", "qwen3.5-24 1x4k 4", "qwen3.5-24 1x32k 4", "qwen3.5-24 64x4k 4", "llama3-8b 1x32k 8",
    "llama3-8b 64x4k 8", "qwen3.5-24 1x32k 8",
)  # fmt: skip
"""Shape, size and width of the steps that are timed: each kind of tiles has one or more."""

PROMPTS = (("llama3-8b", 4, 1024), ("llama3-8b", 1, 8192))
"""Shape, rows and tokens of the prompts."""

NARROW = tuple(DecodeTiles(*x) for x in ((4, 2, 3, 4), (4, 2, 2, 4), (4, 1, 2, 4), (2, 4, 3, 2), (2, 2, 2, 2)))
BROAD = tuple(DecodeTiles(*x) for x in ((1, 2, 3, 4), (1, 1, 3, 4), (1, 2, 2, 4), (1, 1, 2, 4), (1, 4, 3, 2)))
"""Tiles that are tried beside those of the table; the second for blocks of `tuning.WIDE` numbers."""

WORTH = 0.97
"""Of the table's time: tiles that take more than this are not worth a file."""

SECONDS = 0.3
"""Approximate timing duration of a case."""


def measured_case(case: Case, width: str, how: Conditions) -> tuple[str, list[checked.Row]]:
    """The kind of tiles, and rows of the rivals, of the table's tiles, and of each of the others that fits.

    A tile's row is named by its numbers.
    """
    from turbo_hf.ops.decode.launch import many_outputs, padded_dim  # noqa: PLC0415 - needs Triton

    generator = torch.Generator(how.device).manual_seed(how.seed)
    q = draw(generator, len(case.lengths), case.heads.query, 1, case.heads.dim)
    bits = (int(width), int(width))
    codes, room = padded_dim(q) * BLOCK, gpu.shared_memory(how.device)
    many = many_outputs(q, case.heads.kv, BLOCK)
    kind = tile_kind(codes, bits, many=many)
    own = decode_tiles(codes, bits, False, many=many, shared=room)
    tried = dict.fromkeys((own, *(BROAD if codes == WIDE else NARROW)))
    how.tell(f"{case}: FP16")
    found = decode.rivals_of(case, q, generator)
    for tiles in (tiles for tiles in tried if fits(tiles, codes, bits, q.element_size(), room)):
        how.tell(f"{case}: {width} bit, tiles {_named(tiles)}")
        with using(how.device, {kind: tiles}):
            row, rotation = decode.dense_step(case, width, q, how)
        found.append((replace(row, method=_named(tiles)), rotation))
    calls: dict[str, Call] = {row.method: rotation for row, rotation in found if rotation is not None}
    how.tell(f"{case}: timing")
    times = side_by_side(calls, how.stopwatch, how.seconds)
    launches = {row.method: rotation.launches for row, rotation in found if rotation is not None}
    us = {name: [1e3 * ms / launches[name] for ms in each] for name, each in times.items()}
    figures: dict[str, dict[str, float | None]] = {name: {"us": statistics.median(x)} for name, x in us.items()}
    return kind, [checked.timed(row, us, figures[row.method]) if row.method in us else row for row, _ in found]


def _named(tiles: DecodeTiles) -> str:
    return "/".join(map(str, tiles))


def fastest(of_kinds: Mapping[str, Sequence[Sequence[checked.Row]]]) -> dict[str, DecodeTiles]:
    """For each kind, by the rows of its cases, the tiles that are right in all of them and fastest on the mean of
    their logarithms; kinds whose first tiles, the table's, are within `WORTH` of that are left out."""
    found = {}
    for kind, cases in of_kinds.items():
        times: dict[str, list[float]] = {}
        for rows in cases:
            own = [row for row in rows if row.ours]
            first = own[0].figures.get("us")
            for row in own:
                if (us := row.figures.get("us")) is not None and first is not None:
                    times.setdefault(row.method, []).append(us / first)
        whole = {name: statistics.geometric_mean(each) for name, each in times.items() if len(each) == len(cases)}
        if whole and whole[best := min(whole, key=whole.__getitem__)] <= WORTH:
            found[kind] = DecodeTiles(*map(int, best.split("/")))
    return found


def measure(device: torch.device, folder: Path | None, steps: Sequence[str] = STEPS) -> None:
    """Measure, print, and keep the tiles and the figures. folder: for `measure.json`; None: the current one.

    Raises:
        ValueError: there is no GPU on which kernels run.
        typer.Exit: a kernel was wrong or failed.
    """
    if device.type != "cuda" or (reason := gpu.why_no_kernels_on(device)) is not None:
        raise ValueError(f"--measure times kernels: {'it needs a GPU' if device.type != 'cuda' else reason}.")
    bench = runner.BenchRun[checked.Row]("measure", device, folder or Path())
    how = Conditions(Stopwatch(device), "triton", 0, SECONDS)
    how.stopwatch.burst_ms = min(how.stopwatch.burst_ms, decode.BURST_MS)
    of_kinds: dict[str, list[list[checked.Row]]] = {}

    def step(text: str, tell: Any) -> list[checked.Row]:
        shape, size, width = text.split()
        kind, rows = measured_case(make_case(shape, size, False, 0), width, how._replace(tell=tell))
        of_kinds.setdefault(kind, []).append(rows)
        return rows

    def prompt(at: tuple[str, int, int], tell: Any) -> list[checked.Row]:
        case = PromptCase(at[0], find_shape(at[0]), *at[1:])
        return prefill.run_case(case, ["native", "turbo"], how._replace(tell=tell))

    bench.each(steps, step, lambda text, rows: checked.print_rows(f"step, {text} bit", "tiles", rows, {"us": ".1f"}))
    said = "prompt, {} {}x{}".format
    bench.each(PROMPTS, prompt, lambda at, rows: checked.print_rows(said(*at), "mode", rows, {"ms": ".3g"}))
    chosen, place = fastest(of_kinds), tiles_file(torch.cuda.get_device_name(device))
    bench.keep([], tiles=chosen)
    if chosen:
        keep_tiles(place, chosen)
        out.print(f"Faster tiles than the table's for {', '.join(chosen)}: patch takes them here, from {place}.")
    else:
        place.unlink(missing_ok=True)
        out.print("No tiles are faster than the table's by 3 % or more: nothing is kept.")
    remark(f"All figures: {(folder or Path()) / 'measure.json'}. Attach it to an issue.")
    # tiles that need more than the GPU has are refused
    bench.finish(False, checked.untimed([row for row in bench.rows if "refused" not in row.note]))
