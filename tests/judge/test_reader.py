"""The feedback reader: what it makes of labelled cases, of hints, and of anything at all."""

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.judge.rules import ReplyKind, read_reply, ready
from support.measure import NEGATIVE, POSITIVE, measure, read_cases, sign
from support.reading import read, tool, user

TUNING = Path(__file__).with_name("next_states_tuning.jsonl")
#: Nobody who works on the reader looks at these.
HELD_OUT = Path(__file__).with_name("next_states_held_out.jsonl")


@pytest.mark.more
def test_reads_what_it_was_tuned_on() -> None:
    tally = measure(read_cases(TUNING))
    assert tally.score_precision() >= 0.97
    assert tally.precision() >= 0.95
    assert tally.coverage() >= 0.6
    assert tally.wrong_sign == 0


def test_reads_what_it_was_not_tuned_on() -> None:
    tally = measure(read_cases(HELD_OUT))
    assert tally.score_precision() >= 0.95
    assert tally.coverage() >= 0.5


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("thanks, but could you make it shorter?", "make it shorter?"),
        ("Thank you so much! \n Please   add an example.", "add an example."),
        ("No, I meant the other file.", "I meant the other file."),
        ("Danke, aber bitte etwas kürzer.", "etwas kürzer."),
        ("Merci, mais en plus simple s'il te plaît", "en plus simple s'il te plaît"),
        ("谢谢，但是能不能短一点？", "短一点？"),
    ],
)
def test_hint_is_what_the_user_said_without_the_politeness(said: str, hint: str) -> None:
    assert read(said).hint == hint


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("No bold, please.", "No bold, please."),
        ("Good answer, but no bullet points please.", "no bullet points please."),
        ("Could you write it as plain text instead of a table?", "write it as plain text instead of a table?"),
        ("Don't be so vague.", "Don't be so vague."),
        ("can you give an example?", "give an example?"),
        ("Bitte keine nummerierten Listen.", "keine nummerierten Listen."),
        ("Sans gras, s'il te plaît.", "Sans gras, s'il te plaît."),
        ("No uses emojis, por favor.", "No uses emojis, por favor."),
        ("请不要用表格。", "不要用表格。"),
    ],
)
def test_wish_about_form_is_a_change_request(said: str, hint: str) -> None:
    reading = read(said)
    assert reading.kind is ReplyKind.CHANGE_REQUEST
    assert reading.hint == hint


@pytest.mark.parametrize(
    "said",
    [
        "Write a letter without adjectives, please.",
        "Write a letter to my landlord, no emojis please.",
        "Why is the sky blue? One sentence, please.",
        "Can you give an example of a mammal?",
        "How do I remove bold text in Word?",
        "My list is too long.",
        "Schreib meinem Vermieter einen Brief, bitte ohne Emojis.",
        "Peux-tu donner un exemple de mammifère ?",
        "¿Cómo quito las negritas en Word?",
        "怎么在Word里去掉粗体？",
    ],
)
def test_form_of_something_new_is_no_wish(said: str) -> None:
    assert read(said, "How do vaccines work?", "They show the body a part of a germ.").kind is ReplyKind.UNCLEAR


@pytest.mark.parametrize("said", ["Great, no lists, exactly what I wanted.", "The tone is warm and kind, thanks!"])
def test_praised_form_is_no_wish(said: str) -> None:
    assert sign(read(said).kind) >= 0


@pytest.mark.parametrize(
    "new",
    [
        "Next question: What is gravity?",
        "Now something else: Explain inflation.",
        "What is gravity?",
        "Give me five tips for growing tomatoes.",
        "Write a poem about the sea.",
    ],
)
def test_hint_ends_where_something_new_begins(new: str) -> None:
    reading = read(f"Thanks, but no bold please. {new}")
    assert reading.kind is ReplyKind.CHANGE_REQUEST
    assert reading.hint == "no bold please."
    assert read(f"Ohne Fettdruck bitte. {new}").hint == "Ohne Fettdruck bitte."


def test_request_again_with_a_wish_gives_the_wish_as_hint() -> None:
    reading = read("Once more, but in one sentence: write a poem about the sea!")
    assert reading.kind is ReplyKind.CHANGE_REQUEST
    assert reading.hint == "Once more, but in one sentence"


@pytest.mark.parametrize("praise", ["That was easy to read, thanks!", "Perfekt, danke!", "¡Perfecto, gracias!"])
def test_new_question_after_praise_is_moving_on(praise: str) -> None:
    assert read(f"{praise} Why do we pay taxes?").kind is ReplyKind.MOVING_ON
    assert read("Why do we pay taxes?").kind is ReplyKind.UNCLEAR
    assert read(f"{praise} But why do we pay taxes?").kind is ReplyKind.UNCLEAR


def test_long_hint_ends_with_a_sentence() -> None:
    hint = read("Make it shorter. " + "It has many words. " * 60).hint
    assert len(hint) <= 300
    assert hint.endswith("words.")


@pytest.mark.parametrize("said", ["perfect, thanks!", "wrong", "doesn't work", "👍", "hm", "谢谢"])
def test_no_hint_where_nothing_was_asked_for(said: str) -> None:
    assert read(said).hint == ""


@pytest.mark.parametrize(
    "said", ["not bad at all!", "no, that's perfect", "You're right, my mistake.", "nicht schlecht"]
)
def test_praise_in_negative_words(said: str) -> None:
    assert read(said).kind is ReplyKind.ACKNOWLEDGEMENT


@pytest.mark.parametrize(
    "said", ["thanks for nothing", "not great", "that's not right", "das ist nicht gut", "ça ne marche pas", "不好"]
)
def test_complaint_in_positive_words(said: str) -> None:
    assert read(said).kind in NEGATIVE


@pytest.mark.parametrize(
    "said",
    [
        "I don't think that's right",
        "Das glaube ich nicht",
        "je ne pense pas que ce soit juste",
        "no creo que sea correcto",
    ],
)
def test_praise_under_a_negation_is_none(said: str) -> None:
    assert read(said).kind not in POSITIVE


@pytest.mark.parametrize(
    ("said", "response"),
    [
        ("Tuesday, not Monday", "Booked for Monday."),
        ("Dienstag, nicht Montag", "Gebucht für Montag."),
        ("mardi, pas lundi", "Réservé pour lundi."),
        ("martes, no lunes", "Reservado para el lunes."),
    ],
)
def test_what_is_set_against_the_response_is_a_correction(said: str, response: str) -> None:
    request = "Tuesday Dienstag mardi martes: book a table"
    assert read(said, request=request, response=response).kind is ReplyKind.CORRECTION


@pytest.mark.parametrize(
    ("said", "request_", "response"),
    [
        ("june", "I'm away from 3 to 14 June, write it", "I am away from 3 to 14 July."),
        ("15 is access. Erasure's 17.", "Which article is it?", "Article 15."),
        ("1648 war er zu Ende, angefangen hat er 1618", "Wann begann er?", "Er begann 1648."),
    ],
)
def test_what_the_response_should_have_heeded_is_a_correction(said: str, request_: str, response: str) -> None:
    assert read(said, request_, response).kind is ReplyKind.CORRECTION


@pytest.mark.parametrize(
    "said", ["moving on to the sessions table", "kommen wir zum zweiten Teil", "passons à la suite"]
)
def test_next_step_is_taken_without_praise_too(said: str) -> None:
    assert read(said).kind is ReplyKind.MOVING_ON


@pytest.mark.parametrize(
    "said",
    [
        "thanks, I'll try it tonight",
        "My flat is too small anyway",
        "we have that one already, it's great",
        "das probier ich morgen aus",
        "nächste Woche fahren wir ans Meer",
        "je vais y réfléchir ce soir",
        "la semaine prochaine je pars en vacances",
        "luego te digo",
        "我再想想",
    ],
)
def test_is_unsure_of_what_only_sounds_like_a_verdict(said: str) -> None:
    assert read(said).kind is ReplyKind.UNCLEAR


def test_answer_to_a_question_is_no_verdict() -> None:
    assert read("no, keep it", response="Shall I delete the old file?").kind is ReplyKind.UNCLEAR


COMPLAINTS = [
    "Too long.",
    "That's wrong.",
    "Shorter please.",
    "No, that's not right.",
    "This is useless.",
    "You didn't answer my question.",
    "Way too complicated.",
    "Make it shorter.",
    "In German please.",
    "I asked for a list.",
    "Please use bullet points.",
    "That's not what I asked.",
]


@pytest.mark.parametrize("said", COMPLAINTS)
@pytest.mark.parametrize(
    "question",
    [
        "Anything else?",
        "Would you like more tips?",
        "Does this help?",
        "Is there anything else I can help you with?",
        "What do you think?",
        "Would you like me to elaborate?",
    ],
)
def test_complaint_after_an_offer_of_more_help_is_one(said: str, question: str) -> None:
    assert read(said, response=f"The sea is wide, and it is blue. {question}").kind in NEGATIVE


@pytest.mark.parametrize(
    ("said", "question"),
    [
        ("Zu lang.", "Kann ich dir sonst noch helfen?"),
        ("C'est faux.", "Puis-je vous aider à autre chose ?"),
        ("Eso está mal.", "¿Quieres más ejemplos?"),
        ("太长了。", "还有什么需要吗？"),
    ],
)
def test_complaint_after_an_offer_is_one_in_other_languages(said: str, question: str) -> None:
    assert read(said, response=f"The sea is wide. {question}").kind in NEGATIVE


def test_complaint_alone_is_one_after_any_question() -> None:
    assert read("That's wrong.", response="Do you prefer a list or a table?").kind is ReplyKind.REJECTION


def test_choice_after_a_question_is_no_complaint() -> None:
    assert read("Shorter please.", response="Should it be shorter or longer?").kind is ReplyKind.UNCLEAR


def test_repetition_with_what_was_missing_is_a_change_request() -> None:
    reading = read("Write a poem about the sea with four stanzas.")
    assert reading.kind is ReplyKind.CHANGE_REQUEST
    assert "four stanzas" in reading.hint


def test_next_question_of_the_same_form_is_no_repetition() -> None:
    said = read("What is the capital of Spain?", request="What is the capital of France?")
    assert said.kind is ReplyKind.UNCLEAR


@pytest.mark.parametrize(
    "said",
    [
        "Explain quantum computing in simple terms",
        "My code has a bug: the function should return 5 but it returns 4",
        "Haz una lista de diez frutas tropicales",
        "用 Python 写一个快速排序",
    ],
)
def test_new_request_is_no_complaint(said: str) -> None:
    assert read(said).kind is ReplyKind.UNCLEAR


def test_request_that_names_what_the_response_named_is_about_it() -> None:
    said = "Replace the gulls by a flock of noisy albatrosses over the harbour"
    assert read(said, response="The sea is wide, the gulls are loud.").kind is ReplyKind.CHANGE_REQUEST
    assert read(said, response="The sea is wide.").kind is ReplyKind.UNCLEAR


def test_words_of_the_user_decide_over_tools() -> None:
    state = [*tool("Error: file not found"), *user("that's perfect, thanks")]
    assert read_reply("delete it", 'bash(command="rm x")', state).kind is ReplyKind.ACKNOWLEDGEMENT


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        ('{"returncode": 2, "stderr": "bad flag"}', ReplyKind.TOOL_ERROR),
        ('{"success": false, "message": "no such column: nme"}', ReplyKind.TOOL_ERROR),
        ("exited with code 0", ReplyKind.TOOL_SUCCESS),
        ("Error: no input\nexited with code 0", ReplyKind.UNCLEAR),
        ("exited with code 1", ReplyKind.UNCLEAR),
        ("", ReplyKind.UNCLEAR),
        ("some words", ReplyKind.UNCLEAR),
        ("The job was created.", ReplyKind.TOOL_SUCCESS),
        ('{"error": null, "rows": 3}', ReplyKind.TOOL_SUCCESS),
        ("requests.exceptions.ReadTimeout: read timed out", ReplyKind.UNCLEAR),
        ('{"status_code": 429, "message": "slow down"}', ReplyKind.UNCLEAR),
        ('{"status": "pending"}', ReplyKind.UNCLEAR),
        ("Terminated", ReplyKind.UNCLEAR),
        ("Unknown job: a", ReplyKind.TOOL_ERROR),
        ("FileNotFoundError: a", ReplyKind.TOOL_ERROR),
        ("12 passed, 0 failed, no errors", ReplyKind.TOOL_SUCCESS),
        ('{"query": "x", "results": [], "took_ms": 3}', ReplyKind.UNCLEAR),
        ('{"updated": 3, "skipped": 2}', ReplyKind.UNCLEAR),
        ('{"data": {"error": "unknown field"}}', ReplyKind.TOOL_ERROR),
        ('{"status": 400, "title": "Bad Request"}', ReplyKind.TOOL_ERROR),
        ('[{"id": 1}]', ReplyKind.TOOL_SUCCESS),
        ("[]", ReplyKind.UNCLEAR),
        ("job: expected a number, got 'a'", ReplyKind.TOOL_ERROR),
        ("usage: run [-h] JOB", ReplyKind.TOOL_ERROR),
        ("job.rb:3:in `run': undefined method", ReplyKind.TOOL_ERROR),
        ("panic: oops\n\ngoroutine 1 [running]:", ReplyKind.TOOL_ERROR),
        ("starting\n    at Job.run (/app/job.js:3:9)", ReplyKind.TOOL_ERROR),
        ("ORA-00942: table or view does not exist", ReplyKind.TOOL_ERROR),
    ],
)
def test_tool_results(result: str, kind: ReplyKind) -> None:
    assert read_reply("do it", 'run(job="a")', tool(result)).kind is kind


@pytest.mark.parametrize(
    ("call", "result", "kind"),
    [
        ('bash(command="mkdir a")', "", ReplyKind.TOOL_SUCCESS),
        ('bash(command="mkdir a")', "(no output)", ReplyKind.TOOL_SUCCESS),
        ('bash(command="pandoc a.md")', "", ReplyKind.UNCLEAR),
        ('bash(command="du -sh .")', "1.3G\t.", ReplyKind.TOOL_SUCCESS),
        ('bash(command="pandoc a.md")', "well", ReplyKind.UNCLEAR),
        ('read_file(path="a")', "def f():\n    raise ValueError", ReplyKind.TOOL_SUCCESS),
        ('read_file(path="a")', "This cannot be shown.", ReplyKind.UNCLEAR),
        ('find_flights(to="Oslo")', "No flights found for this day.", ReplyKind.UNCLEAR),
        ("bash(command=\"awk '{' a\")", "awk: cmd. line:1: {\nawk: cmd. line:1: ^ fin", ReplyKind.TOOL_ERROR),
        ('bash(command="mv a b")', "mv: 'b' ist voll mit Dingen", ReplyKind.TOOL_ERROR),
        ('bash(command="nginx -t")', "nginx: the syntax is ok", ReplyKind.TOOL_SUCCESS),
    ],
)
def test_evidence_of_success_fits_the_call(call: str, result: str, kind: ReplyKind) -> None:
    assert read_reply("do it", call, tool(result)).kind is kind


CONTENT = st.one_of(
    st.none(), st.text(), st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()}), max_size=3)
)
ROLES = st.one_of(st.sampled_from(["user", "tool", "assistant", "system", "developer"]), st.text(max_size=5))
STATES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": CONTENT}), max_size=4)


@given(st.text(), st.text(), STATES)
def test_reads_anything_and_always_the_same(request: str, response: str, state: list[dict[str, object]]) -> None:
    reading = read_reply(request, response, state)
    assert reading == read_reply(request, response, state)
    assert len(reading.hint) <= 310
    if reading.kind not in (ReplyKind.CORRECTION, ReplyKind.CHANGE_REQUEST):
        assert reading.hint == ""


def test_reads_messages_without_role_or_content() -> None:
    assert read_reply("", "", []).kind is ReplyKind.UNCLEAR
    assert read_reply("", "", [{}]).kind is ReplyKind.UNCLEAR
    assert read_reply("", "", [{"role": "user", "content": None}]).kind is ReplyKind.UNCLEAR


async def test_when_it_is_ready_nothing_is_left_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    await ready()
    monkeypatch.setattr("openclaw_rl.judge.rules.phrases.join", pytest.fail)
    for said in ("that's wrong, I said blue", "das ist falsch", "c'est faux", "está mal", "不对", "違います", "👎"):
        assert read(said).kind in NEGATIVE


SENTENCES = st.lists(st.text(string.ascii_lowercase, min_size=3, max_size=9), min_size=3, max_size=20).map(" ".join)


@given(SENTENCES, st.sampled_from([str, str.upper, str.title]), st.sampled_from(["", "!", "??", " please", "  \n"]))
def test_repeated_request_is_never_praise(request: str, shout: type[str], end: str) -> None:
    kind = read_reply(request, "I see.", user(shout(request) + end)).kind
    assert sign(kind) <= 0


@pytest.mark.parametrize(
    "said",
    [
        "thanks, that's perfect",
        "that's wrong",
        "you forgot the second file",
        "could you make it shorter",
        "great, now write the tests",
        "das ist falsch",
        "danke, hat geklappt",
        "no funciona",
        "gracias, ya funciona",
        "ça marche pas",
        "parfait, merci",
        "不对",
        "谢谢,明白了",
    ],
)
def test_sign_is_the_same_however_it_is_typed(said: str) -> None:
    expected = sign(read(said).kind)
    assert expected != 0
    variants = [said.upper(), said.capitalize(), f"  {said}  \n", f"{said}!", f"{said}.", f"{said}!!!", f"{said} …"]
    assert {variant: sign(read(variant).kind) for variant in variants} == dict.fromkeys(variants, expected)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("It should say: Chef, Paris is the capital.", ReplyKind.CORRECTION),
        ("Like this: Ahoy, Paris be the capital!", ReplyKind.CORRECTION),
        ("I'd have written: the capital is Paris.", ReplyKind.CORRECTION),
        ("Like this: def add(a, b): return a + b", ReplyKind.UNCLEAR),
    ],
)
def test_the_answer_that_somebody_wanted_corrects_the_one_given(said: str, kind: ReplyKind) -> None:
    assert read_reply("What is the capital?", "It is Rome.", [{"role": "user", "content": said}]).kind is kind
