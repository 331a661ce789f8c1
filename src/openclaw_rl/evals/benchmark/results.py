"""The results of the benchmark: a table, a picture and a page of several systems, and two of them compared."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from openclaw_rl.dashboard.components.render import render
from openclaw_rl.errors import UserError
from openclaw_rl.evals.benchmark.run import FORMAT
from openclaw_rl.evals.benchmark.systems import BASELINES
from openclaw_rl.evals.benchmark.tracks import TRACKS
from openclaw_rl.lab.charts import Chart, bar_table, chart_file
from openclaw_rl.lab.commands import write_text
from openclaw_rl.lab.statistics import Difference, Interval, compare_passes, in_two_lines, proportion_of_trials
from openclaw_rl.lab.tasks import read_json_lines

TEMPLATE = "evals/benchmark/benchmark.html.j2"
HEADING = "Does it learn from being used?"
SUBHEADING = "Share of cases that passed; the thin line is the 95 % interval"
NO_SCORE = "no score"
#: What a high score in a track says.
IN_WORDS = {
    "wishes": "keeps a wish",
    "people": "pleases people",
    "sense": "stays sensible",
    "many": "keeps them all",
    "change-of-mind": "drops a wish",
    "two-people": "keeps two apart",
    "forget": "forgets if asked",
    "tools": "learns tools",
}


@dataclass(frozen=True, slots=True)
class SystemResults:
    """The lines of a system and a seed."""

    head: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]

    @property
    def system(self) -> str:
        return str(self.head["system"])


@dataclass(frozen=True, slots=True)
class TrackScore:
    """A track of a system, over all its items and seeds."""

    score: Interval | None
    before: float | None
    unaided: float | None
    held: tuple[int, int]
    """How many items held, and of how many that can."""
    sessions: float | None
    """Until it held, on average over those that did."""
    seconds: float | None
    tokens: int
    requests: int
    reason: str


def load_results(path: Path) -> list[SystemResults]:
    """The results in a file, or in all files of a folder. Raises UserError."""
    paths = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not paths or not paths[0].is_file():
        raise UserError(f"There are no results in {path}: give a file that openclaw-rl benchmark wrote, or its folder.")
    return [_load(one) for one in paths]


def _load(path: Path) -> SystemResults:
    lines = [line for _, line in read_json_lines(path, "benchmark")]
    if not lines or not isinstance(lines[0], dict) or lines[0].get("benchmark") != FORMAT:
        raise UserError(f"{path} is not a file that this version of openclaw-rl benchmark wrote.")
    return SystemResults(lines[0], [line for line in lines if "track" in line])


def by_system(results: Sequence[SystemResults]) -> dict[str, list[SystemResults]]:
    found = defaultdict(list)
    for one in results:
        found[one.system].append(one)
    return {name: found[name] for name in (*BASELINES, *found) if name in found}


def scores(results: Sequence[SystemResults]) -> dict[str, TrackScore]:
    """The tracks that one system was asked, in their order."""
    lines = [line for one in results for line in one.lines]
    return {track: _score(own) for track in TRACKS if (own := [line for line in lines if line["track"] == track])}


def _score(lines: Sequence[Mapping[str, Any]]) -> TrackScore:
    scored = [line for line in lines if line["score"]]
    trials = [[(name, bool(passed)) for name, passed in line["marks"]] for line in scored]
    held = [line["held"] for line in scored if line["held"]]
    costs = [line["cost"] for line in lines]
    return TrackScore(
        proportion_of_trials(trials) if trials else None,
        _mean_part(scored, "before"),
        _mean_part(scored, "unaided"),
        (len(held), len(scored)),
        fmean(one["sessions"] for one in held) if held else None,
        fmean(one["seconds"] for one in held) if held else None,
        sum(cost["prompt_tokens"] + cost["answer_tokens"] for cost in costs),
        sum(cost["requests"] for cost in costs),
        next((line["reason"] for line in lines if line["reason"]), ""),
    )


def _mean_part(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    means = [line["parts"][name]["mean"] for line in lines if line["parts"].get(name)]
    return fmean(means) if means else None


HEADS = ("system", "track", "score", "before", "unaided", "held", "sessions", "seconds", "tokens", "requests")


def rows(results: Sequence[SystemResults]) -> Iterator[tuple[str, ...]]:
    """The cells of the table, as `HEADS` names them."""
    for system, own in by_system(results).items():
        for track, score in scores(own).items():
            yield (
                system,
                track,
                str(score.score or NO_SCORE),
                _number(score.before, 2),
                _number(score.unaided, 2),
                f"{score.held[0]} of {score.held[1]}" if score.held[0] else "",
                _number(score.sessions, 1),
                _number(score.seconds, 0),
                str(score.tokens),
                str(score.requests),
            )


def reasons(results: Sequence[SystemResults]) -> list[str]:
    """Why something has no score, or a part of it has none."""
    return [
        f"{system}, {track}: {score.reason}"
        for system, own in by_system(results).items()
        for track, score in scores(own).items()
        if score.reason
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def results_table(results: Sequence[SystemResults]) -> Table:
    """Each row has two lines, so that the table fits a terminal of 80 columns. The page also has the requests."""
    table = Table(title="Share of cases passed (95 % interval)", title_justify="left")
    table.add_column("system,\ntrack", overflow="fold")
    for heading in ("score", "before,\nunaided", "held", "sessions,\nseconds", "tokens"):
        table.add_column(heading, no_wrap=True)
    for system, track, score, before, unaided, held, sessions, seconds, tokens, _ in rows(results):
        cells = (
            f"{system}\n{track}",
            in_two_lines(score),
            f"{before}\n{unaided}",
            held,
            f"{sessions}\n{seconds}",
            tokens,
        )
        table.add_row(*cells, end_section=True)
    table.caption, table.caption_justify = "\n".join(reasons(results)), "left"
    return table


def markdown(results: Sequence[SystemResults]) -> str:
    lines = [HEADS, ("---",) * len(HEADS), *rows(results)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table + "".join(f"\n{reason}\n" for reason in reasons(results))


def chart(results: Sequence[SystemResults]) -> Chart:
    """The score of each system in each track, with its interval."""
    asked = {line["track"] for one in results for line in one.lines}
    rows = {}
    for system, own in by_system(results).items():
        about = str(own[0].head.get("about") or own[0].head["url"])
        found = {track: one.score for track, one in scores(own).items() if one.score}
        rows[system, about] = {track: (score.mean, score.low, score.high) for track, score in found.items()}
    return bar_table(SUBHEADING, {track: IN_WORDS.get(track, "") for track in TRACKS if track in asked}, rows)


def write_results(results: Sequence[SystemResults], out: Path) -> None:
    """Write the table, the picture and the page. Raises UserError."""
    made = chart(results)
    write_text(out / "results.md", markdown(results))
    write_text(out / "scores.svg", chart_file(HEADING, [made]))
    heads = [one.head for one in results]
    write_text(
        out / "index.html",
        render(
            TEMPLATE,
            charts_made=[made],
            heads=HEADS,
            rows=list(rows(results)),
            reasons=reasons(results),
            runs=heads,
        ),
    )


# Two systems compared


def cases(results: Sequence[SystemResults]) -> dict[str, dict[tuple[Any, ...], bool]]:
    """By track, whether each case passed. A case that is asked several times is numbered."""
    found: dict[str, dict[tuple[Any, ...], bool]] = defaultdict(dict)
    for one in results:
        for line in one.lines:
            times = Counter[str]()
            for name, passed in line["marks"]:
                times[name] += 1
                found[line["track"]][one.head["seed"], one.head["quick"], line["item"], name, times[name]] = bool(
                    passed
                )
    return found


def compared(first: Sequence[SystemResults], second: Sequence[SystemResults]) -> dict[str, Difference]:
    """By track, how much more the second passes, on the cases that both were asked. Raises UserError: none."""
    one, other = cases(first), cases(second)
    both = {
        track: sorted(one[track].keys() & other[track].keys()) for track in TRACKS if track in one and track in other
    }
    found = {
        track: compare_passes([one[track][case] for case in same], [other[track][case] for case in same])
        for track, same in both.items()
        if same
    }
    if not found:
        raise UserError("The two have no case in common: run both with the same --seed, and both or none with --quick.")
    return found


def comparison_table(differences: Mapping[str, Difference]) -> Table:
    table = Table("track", "difference", "p", "cases")
    for track, one in differences.items():
        table.add_row(track, str(one), f"{one.p:.3f}", str(one.n))
    return table
