"""Long answers that can be judged: tables to write in another form, row by row, 2k tokens and more.

Each answer is begun for the model, so that models without a chat template know its form. Every row has to be looked up
in the prompt, so that an error of the cache shows in each of them.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

NAMES = ("Ada", "Boris", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Igor", "Jana", "Karim", "Lena", "Milo")
CITIES = ("Lisbon", "Oslo", "Quito", "Nairobi", "Hanoi", "Perth", "Turin", "Lyon", "Cairo", "Dakar", "Seoul", "Lima")
BEGUN = 2
"""Rows of the answer that the prompt has."""

ROWS = {"json": 70, "sql": 90, "tuples": 120}
"""Rows of each form whose answer takes 2k tokens and more."""

NEW_TOKENS = 3072


def long_answers(form: str, count: int) -> list[dict[str, Any]]:
    """`count` items of one form, the same each time: a prompt, which ends within its answer, and the answer's rows that
    are still to be written."""
    return [_item(form, random.Random(f"{form} 0 {number}")) for number in range(count)]


def _csv(record: Any) -> str:
    return ",".join(map(str, record))


def _item(form: str, rng: random.Random) -> dict[str, Any]:
    records = [
        (rng.randrange(1000, 10000), rng.choice(NAMES), rng.choice(CITIES), rng.randrange(10, 1000))
        for _ in range(ROWS[form])
    ]
    heading, of_table, of_answer = FORMS[form]
    table = "\n".join(map(of_table, records))
    answer = [of_answer(record) for record in records]
    begun, rows = "\n".join(answer[:BEGUN]), answer[BEGUN:]
    prompt = f"{heading}\n\n{table}\n\nAll {len(records)} rows:\n\n{begun}\n"
    return {"prompt": prompt, "answer": "\n".join(rows), "rows": rows}


FORMS: dict[str, tuple[str, Callable[[Any], str], Callable[[Any], str]]] = {
    "json": (
        "Write this table as JSON, one object per row, in the same order.",
        _csv,
        lambda r: f'{{"id": {r[0]}, "name": "{r[1]}", "city": "{r[2]}", "amount": {r[3]}}}',
    ),
    "sql": (
        "Write an SQL statement that inserts each row of this table, in the same order.",
        _csv,
        lambda r: f"INSERT INTO orders VALUES ({r[0]}, '{r[1]}', '{r[2]}', {r[3]});",
    ),
    "tuples": (
        "Write this table as Python tuples, one per row, in the same order.",
        _csv,
        lambda r: f'({r[0]}, "{r[1]}", "{r[2]}", {r[3]}),',
    ),
}
"""(question, row of the table, row of the answer) of each form."""


def right_rows(rows: Sequence[str], reply: str) -> list[bool]:
    """Whether a reply has each row, wherever: one that is left out makes no other wrong."""
    lines = [line.strip() for line in reply.splitlines()]
    return [any(line.startswith(row) for line in lines) for row in rows]
