"""The tasks that `openclaw-rl eval` asks a model, whole or in short."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from openclaw_rl.aio import Case
from openclaw_rl.evals import coding, tool_use
from openclaw_rl.evals.arguments import TASKS
from openclaw_rl.evals.chat import Chat, Reply
from openclaw_rl.evals.conversation import questions
from openclaw_rl.evals.examination import ExamAnswer, examine
from openclaw_rl.evals.personas.persona import BUILT_IN, load
from openclaw_rl.evals.scores import Asked, CaseScore, EvalPlan, OnCase, TaskScores, ask_all
from openclaw_rl.evals.tool_use import bfcl_cases

#: Longest answer in a conversation: detailed answers must fit.
MAX_ANSWER_TOKENS = 200

#: With --quick, at most this many cases of a task are asked.
QUICK_CASES = 16


def conversation(quick: bool) -> EvalPlan:
    """Every persona's held-out questions, checked by its rules and the quality guard."""
    most = QUICK_CASES // len(BUILT_IN) if quick else None

    async def ask(chat: Chat, seed: int, on_case: OnCase) -> TaskScores:
        cases: list[CaseScore] = []
        for persona in map(load, BUILT_IN):
            held_out = spread(questions(persona.name, "held-out", seed), most)
            score = partial(case_score, persona.name)

            def on_answer(answer: ExamAnswer, score: Callable[[ExamAnswer], CaseScore] = score) -> None:
                on_case(score(answer))

            length = MAX_ANSWER_TOKENS
            answers = await examine(chat, persona, held_out, max_tokens=length, seed=seed, on_answer=on_answer)
            cases += map(score, answers)
        return TaskScores("conversation", tuple(cases))

    size = sum(len(spread(questions(persona, "held-out"), most)) for persona in BUILT_IN)
    return EvalPlan("conversation", size, MAX_ANSWER_TOKENS, ask)


def case_score(persona: str, answer: ExamAnswer) -> CaseScore:
    parts = {"rules": float(answer.keeps_rules), "sensible": float(not answer.faults)}
    case = f"{persona}: {answer.question.text}"
    return CaseScore(case, answer.passed, parts, answer.answer, ", ".join(answer.faults))


def code(most: int | None) -> EvalPlan:
    return prompts(coding.TASK, coding.problems(), coding.score, coding.MAX_TOKENS, most)


def tools(task: str, cases: Sequence[tool_use.ToolCase], most: int | None) -> EvalPlan:
    async def score(case: tool_use.ToolCase, reply: Reply) -> CaseScore:
        return tool_use.grade(case, reply)

    return prompts(task, cases, score, tool_use.MAX_TOKENS, most)


def prompts(
    task: str,
    all_cases: Sequence[Asked],
    score: Callable[[Asked, Reply], Awaitable[CaseScore]],
    max_tokens: int,
    most: int | None,
) -> EvalPlan:
    """A task of at most so many cases, which are one question each."""
    cases = spread(all_cases, most)

    async def ask(chat: Chat, seed: int, on_case: OnCase) -> TaskScores:
        return await ask_all(task, chat, cases, score, max_tokens=max_tokens, seed=seed, on_case=on_case)

    return EvalPlan(task, len(cases), max_tokens, ask)


def spread(cases: Sequence[Case], most: int | None) -> Sequence[Case]:
    """At most so many cases, at equal distances: tasks are sorted by difficulty or kind."""
    if most is None or len(cases) <= most:
        return cases
    return [cases[place * len(cases) // most] for place in range(most)]


#: In the order of `TASKS`.
PLANS: dict[str, Callable[[bool], EvalPlan]] = dict(
    zip(
        TASKS,
        (
            conversation,
            lambda quick: code(QUICK_CASES if quick else None),
            lambda quick: tools(tool_use.TASK, tool_use.cases(), QUICK_CASES if quick else None),
            lambda quick: tools("bfcl", bfcl_cases(), QUICK_CASES if quick else None),
        ),
        strict=True,
    )
)
