"""Tasks with CSV and JSON."""

import json
from random import Random
from typing import Any

from openclaw_rl.envs.terminal.families.draft import CITIES, PEOPLE, Generator, TerminalDraft, joined, names, others

COLUMNS = ("name", "city", "age")


def people(random: Random, number: int = 6) -> list[tuple[str, str, int]]:
    return [(name, random.choice(CITIES), random.randint(20, 69)) for name in random.sample(PEOPLE, number)]


def csv(rows: list[tuple[str, str, int]]) -> str:
    return joined([",".join(map(str, row)) for row in (COLUMNS, *rows)])


def one_column(random: Random) -> TerminalDraft:
    source, target = names(random, 2)
    rows = people(random)
    number = random.randint(1, 3)
    files = {f"{source}.csv": csv(rows), **others(random, source, target)}
    changes = {f"{target}.txt": joined([row[number - 1] for row in (COLUMNS, *rows)])}
    question = f"Write column {number} of {source}.csv to {target}.txt."
    return TerminalDraft(question, f"cut -d, -f{number} {source}.csv > {target}.txt", files, changes)


def rows_of_city(random: Random) -> TerminalDraft:
    source, target = names(random, 2)
    rows = people(random)
    city = random.choice(rows)[1]
    files = {f"{source}.csv": csv(rows), **others(random, source, target)}
    changes = {f"{target}.csv": joined([",".join(map(str, row)) for row in rows if row[1] == city])}
    question = f"Write the rows of {source}.csv with {city} to {target}.csv."
    return TerminalDraft(question, f"grep {city} {source}.csv > {target}.csv", files, changes)


def older_than(random: Random) -> TerminalDraft:
    source, target = names(random, 2)
    rows = people(random, 8)
    age = random.randint(30, 55)
    files = {f"{source}.csv": csv(rows), **others(random, source, target)}
    changes = {f"{target}.txt": joined([name for name, _, years in rows if years > age]) or "\n"}
    question = (
        f"{source}.csv has the columns name,city,age. Write the names of all with an age above {age} to {target}.txt."
    )
    solution = f"awk -F, 'NR > 1 && $3 > {age} {{print $1}}' {source}.csv > {target}.txt"
    return TerminalDraft(question, solution, files, changes)


def change_setting(random: Random) -> TerminalDraft:
    (stem,) = names(random, 1)
    keys = names(random, 4)
    settings: dict[str, Any] = {key: random.randint(10, 999) for key in keys}
    key = random.choice(keys)
    value = random.randint(1000, 9999)
    files = {f"{stem}.json": json.dumps(settings, indent=2) + "\n", **others(random, stem)}
    changes = {f"{stem}.json": {"json": {**settings, key: value}}}
    question = f"In {stem}.json, set {key} to {value}."
    solution = f'sed -i \'s/"{key}": [0-9]*/"{key}": {value}/\' {stem}.json'
    return TerminalDraft(question, solution, files, changes)


def sum_by_city(random: Random) -> TerminalDraft:
    source, target = names(random, 2)
    rows = people(random, 10)
    sums: dict[str, int] = {}
    for _, city, age in rows:
        sums[city] = sums.get(city, 0) + age
    files = {f"{source}.csv": csv(rows), **others(random, source, target)}
    changes = {f"{target}.csv": joined([f"{city},{sums[city]}" for city in sorted(sums)])}
    question = (
        f"{source}.csv has the columns name,city,age. Write a line city,sum of the ages for each city to {target}.csv, "
        "sorted by city, without a header."
    )
    solution = (
        f"awk -F, 'NR > 1 {{s[$2] += $3}} END {{for (c in s) print c \",\" s[c]}}' {source}.csv | sort > {target}.csv"
    )
    return TerminalDraft(question, solution, files, changes)


def csv_to_json(random: Random) -> TerminalDraft:
    source, target = names(random, 2)
    rows = people(random, 5)
    files = {f"{source}.csv": csv(rows), **others(random, source, target)}
    content = [{"name": name, "age": age} for name, _, age in rows]
    question = (
        f"{source}.csv has the columns name,city,age. Write its rows to {target}.json as a JSON list of objects like "
        '{"name": "Zoe", "age": 30}, in the same order.'
    )
    solution = (
        'awk -F, \'NR > 1 {printf "%s{\\"name\\": \\"%s\\", \\"age\\": %s}", (NR > 2 ? ", " : "["), $1, $3} '
        f'END {{print "]"}}\' {source}.csv > {target}.json'
    )
    return TerminalDraft(question, solution, files, {f"{target}.json": {"json": content}})


LEVELS: dict[int, tuple[Generator, ...]] = {
    1: (one_column, rows_of_city),
    2: (older_than, change_setting),
    3: (sum_by_city, csv_to_json),
}
