"""Measures what the temperature does to the embedded model: right answers to plain questions, and speed of learning.

    python benchmarks/temperature.py [--temperatures 0.2,0.5,0.7,1.0] [--samples 2] [--sessions 100] [--seeds 1]

Questions are asked through a real server. A right answer names what the question is about; the quality guard of the
demo looks at each answer too. Learning is the demo with persona `brief`, for a number of sessions instead of a time, so
that a busy machine changes nothing. `--samples 0` and `--sessions 0` leave out a part. The tables are for
docs/results/demo.md.
"""

import argparse
import asyncio
import json
import re
import tempfile
from pathlib import Path

from common import machine, model_folder, sized, table

from openclaw_rl.evals import trial
from openclaw_rl.evals.chat import Chat, HttpChat
from openclaw_rl.evals.demo import SERVER_FLAGS
from openclaw_rl.evals.personas.persona import load
from openclaw_rl.evals.quality import check
from openclaw_rl.evals.scores import run_concurrently
from openclaw_rl.evals.screen import Screen
from openclaw_rl.evals.server_process import run_server
from openclaw_rl.evals.statistics import proportion, sessions_until_adherence
from openclaw_rl.evals.trial import Exam, TrialOutcome, TrialPlan
from openclaw_rl.terminal import console

#: A question, and what a right answer has in it: one of these words.
QUESTIONS = """\
What is the capital of France?|Paris
What is the capital of Germany?|Berlin
What is the capital of Italy?|Rome
What is the capital of Spain?|Madrid
What is the capital of Japan?|Tokyo
What is the capital of England?|London
What is the capital of Russia?|Moscow
What is the capital of China?|Beijing
What is the capital of Egypt?|Cairo
What is the capital of the United States?|Washington
Which planet is closest to the Sun?|Mercury
Which planet do we live on?|Earth
Which planet is the largest in the solar system?|Jupiter
Which star is at the centre of the solar system?|Sun
How many days are in a week?|seven|7
How many months are in a year?|twelve|12
How many hours are in a day?|24|twenty-four
How many minutes are in an hour?|60|sixty
How many legs does a spider have?|eight|8
How many legs does a dog have?|four|4
How many wheels does a bicycle have?|two|2
What is 2 + 2?|4|four
What is 5 + 3?|8|eight
What is 10 - 4?|6|six
What is 3 times 3?|9|nine
What colour is the sky on a clear day?|blue
What colour is grass?|green
What colour is snow?|white
What colour is a ripe banana?|yellow
What colour do you get if you mix blue and yellow?|green
What is frozen water called?|ice
At how many degrees Celsius does water boil?|100|hundred
What do bees make?|honey
What do cows eat?|grass|hay
Which animal barks?|dog|dogs
Which animal says meow?|cat|cats
What is the opposite of hot?|cold|cool
What is the opposite of up?|down
What is the opposite of big?|small|little|tiny
What is the second letter of the alphabet?|B
Which month comes after January?|February
Which day comes after Monday?|Tuesday
Which season comes after winter?|spring
Who wrote Romeo and Juliet?|Shakespeare
Who painted the Mona Lisa?|Leonardo|Vinci
Which ocean lies between Europe and America?|Atlantic
Which is the largest ocean?|Pacific
Which gas do we breathe in to live?|oxygen
Which organ pumps blood through the body?|heart
In which country is the Great Wall?|China
"""
TEMPERATURES = sized("0.2,0.5,0.7,1.0", "0.5")
MAX_TOKENS, AT_ONCE = sized(64, 4), 8
#: Steps after which the table shows adherence: an examination every four.
SHOWN_STEPS = (4, 8, 12, 16, 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", default=TEMPERATURES)
    parser.add_argument("--samples", type=int, default=sized(2, 1), help="answers to each question")
    parser.add_argument("--sessions", type=int, default=sized(100, 0))
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    temperatures = [float(part) for part in options.temperatures.split(",")]
    print(machine())
    if options.samples:
        asyncio.run(ask_questions(temperatures, options.samples))
    if options.sessions:
        rows = [
            learn(temperature, seed, options.sessions) for temperature in temperatures for seed in range(options.seeds)
        ]
        head = ("temperature", "before", *(f"step {step}" for step in SHOWN_STEPS), "at the end", "sensible", "steps")
        table("Adherence while it learns, at the temperature itself", (*head, "sessions until 3 in a row"), rows)


async def ask_questions(temperatures: list[float], samples: int) -> None:
    """The share of plain questions that are answered rightly and sensibly at each temperature."""
    asked = [line.split("|") for line in QUESTIONS.splitlines()][: sized(50, 3)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--no-capture", "--max-steps", "0", "--model-name", str(model_folder()))
        async with run_server(Path(folder), *flags) as server, HttpChat(server.url, local=True) as chat:
            for temperature in temperatures:
                marks = await answers(chat, asked * samples, temperature)
                right, sensible, words = zip(*marks, strict=True)
                rows.append((temperature, share(right), share(sensible), f"{sum(words) / len(words):.0f}"))
    table(
        f"{len(asked)} plain questions, {samples} answers each (95 % interval)",
        ("temperature", "right", "sensible", "words"),
        rows,
    )


async def answers(chat: Chat, asked: list[list[str]], temperature: float) -> list[tuple[bool, bool, int]]:
    """Of each answer: whether it is right, whether it is sensible, and its number of words."""

    async def one(numbered: tuple[int, list[str]]) -> tuple[bool, bool, int]:
        seed, (question, *names) = numbered
        message = {"role": "user", "content": question}
        reply = await chat.ask([message], max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, keep=False)
        right = re.search(rf"\b({'|'.join(map(re.escape, names))})\b", reply.text, re.IGNORECASE)
        sensible = not check(reply.text, question, f"{question} {names[0]}").reasons
        return bool(right), sensible, len(reply.text.split())

    return list(await run_concurrently(list(enumerate(asked)), one, AT_ONCE))


def share(marks: tuple[bool, ...]) -> str:
    interval = proportion(marks)
    return f"{interval.mean:.2f} ({interval.low:.2f} – {interval.high:.2f})"


def learn(temperature: float, seed: int, sessions: int) -> tuple[object, ...]:
    """A row of the table: the demo, whose server samples at this temperature wherever a request names none."""
    with tempfile.TemporaryDirectory() as folder, Screen(console(), 1) as screen:
        model = with_temperature(Path(folder) / "model", temperature)
        flags = (*SERVER_FLAGS, "--model-name", str(model))
        plan = TrialPlan("combine", load("brief"), seed, Path(folder) / "run", sessions, 10_000.0, flags)
        outcome = TrialOutcome(plan)
        asyncio.run(trial.run(outcome, screen))
    by_step = {exam.version: f"{exam.adherence:.2f}" for exam in outcome.exams}
    last = outcome.exams[-1]
    until = sessions_until_adherence(outcome.first_replies) or f"not within {sessions}"
    ends = (f"{last.adherence:.2f}", f"{sensible_share(last):.2f}", last.version, until)
    return (temperature, by_step[0], *(by_step.get(step, "–") for step in SHOWN_STEPS), *ends)


def sensible_share(exam: Exam) -> float:
    return sum(not answer.faults for answer in exam.answers) / len(exam.answers)


def with_temperature(folder: Path, temperature: float) -> Path:
    """A folder with the same model whose default temperature is another one."""
    folder.mkdir()
    for path in model_folder().iterdir():
        (folder / path.name).symlink_to(path.resolve())
    config = folder / "generation_config.json"
    given = json.loads(config.read_text()) if config.exists() else {}
    config.unlink(missing_ok=True)
    config.write_text(json.dumps({**given, "temperature": temperature, "do_sample": True}))
    return folder


if __name__ == "__main__":
    main()
