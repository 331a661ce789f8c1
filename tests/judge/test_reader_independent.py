"""Reading cases by an author who did not know the reader: confirmations, corrections, complaints, emphasis, mockery."""

from pathlib import Path

import pytest

from openclaw_rl.judge.rules import ReplyKind
from support.measure import NEGATIVE, POSITIVE, measure_signs, read_cases
from support.reading import read

TUNING = Path(__file__).with_name("next_states_independent.jsonl")
#: Nobody who works on the reader looks at these.
HELD_OUT = Path(__file__).with_name("next_states_independent_held_out.jsonl")
THIRD = Path(__file__).with_name("next_states_third_held_out.jsonl")
BUILD = ("My build fails with a linker error.", "Add -lm to the linker flags.")
CLEANUP = ("Clean up my downloads folder.", "Done, I removed everything older than a week.")


@pytest.mark.parametrize(
    ("cases", "score", "least_precision", "least_recall"),
    [
        (TUNING, 1, 0.97, 0.8),
        (TUNING, -1, 0.97, 0.8),
        # Two cases labelled -1 are read as praise.
        (HELD_OUT, 1, 0.9, 0.8),
        # The reader abstains where the network failed.
        (HELD_OUT, -1, 0.97, 0.75),
        # Much praise without a usual word of praise is unclear to the reader.
        (THIRD, 1, 0.9, 0.6),
        (THIRD, -1, 0.95, 0.7),
    ],
)
def test_reads_cases_of_an_independent_author(
    cases: Path, score: int, least_precision: float, least_recall: float
) -> None:
    precision, recall = measure_signs(read_cases(cases))[score]
    assert precision >= least_precision
    assert recall >= least_recall


@pytest.mark.parametrize(
    "said",
    [
        "Yep, that was it. It links again.",
        "Did that and it prints again, thanks!",
        "I can log in again, thank you.",
        "Geht wieder, keine Fehlermeldung mehr.",
        "Das Problem hat sich damit erledigt, danke.",
        "Nickel, ça tourne sans souci.",
        "Vuelve a funcionar, mil gracias.",
        "加上之后就正常了，谢谢。",
    ],
)
def test_a_success_that_the_user_confirms_is_praise(said: str) -> None:
    assert read(said, *BUILD).kind in POSITIVE


@pytest.mark.parametrize(
    "said",
    [
        "It should run without errors.",
        "Tell Bob the server works again.",
        "Frag sie, ob es jetzt klappt.",
        "Vérifie que ça compile sans erreur.",
        "Dile a Bob que el servidor ya funciona.",
        "告诉小明服务器又能用了。",
    ],
)
def test_a_success_that_is_wanted_or_told_to_others_is_no_praise(said: str) -> None:
    assert read(said, *BUILD).kind not in POSITIVE


@pytest.mark.parametrize(
    "said",
    [
        "What a thoughtful text!",
        "Besser hätte man es nicht sagen können.",
        "Quelle belle idée !",
        "¡Qué maravilla de texto!",
        "写得真好，很感人。",
    ],
)
def test_an_exclamation_that_begins_like_a_question_is_praise(said: str) -> None:
    assert read(said).kind is ReplyKind.ACKNOWLEDGEMENT


@pytest.mark.parametrize(
    ("request_", "response", "said"),
    [
        ("Book a table for six at 7pm.", "I booked a table for four at 7pm.", "We're six."),
        ("Reserviere für sechs um 19 Uhr.", "Reserviert: vier Personen, 19 Uhr.", "Ich sagte sechs."),
        ("Réserve pour six à 19 h.", "C'est réservé pour quatre à 19 h.", "Pour six, pas quatre."),
        ("When did the Titanic sink?", "It sank in 1913.", "You mean 1912."),
        ("Who wrote Faust?", "Faust was written by Friedrich Schiller.", "It was Goethe."),
        ("Wer schrieb den Faust?", "Friedrich Schiller schrieb den Faust.", "Das war Goethe."),
        ("What's the capital of Australia?", "The capital of Australia is Sydney.", "its canberra..."),
        ("Show only the unread mails.", "Here are all mails: …", "only the UNREAD mails"),
        ("Give the list without prices.", "Apples 2 €, pears 3 €", "no prices!"),
        ("把这封信翻译成西班牙语。", "Here is the letter.", "这是英语，我要西班牙语。"),
    ],
)
def test_another_fact_or_the_request_with_emphasis_is_a_correction(request_: str, response: str, said: str) -> None:
    assert read(said, request_, response).kind in NEGATIVE


@pytest.mark.parametrize(
    ("request_", "response", "said"),
    [
        ("Which laptop is good?", "The Aspire 5, for 600 euros.", "My friend paid 550."),
        ("Welcher Laptop ist gut?", "Das Aspire 5 für 600 Euro.", "Der Laden hat zu."),
        ("Plan a party for ten kids.", "Start at three with cake.", "We have no table and only ten chairs."),
        ("Question 1: What is the atomic number of carbon?", "Six.", "question 2: what is that of iron?"),
    ],
)
def test_another_number_or_name_in_passing_is_no_correction(request_: str, response: str, said: str) -> None:
    assert read(said, request_, response).kind not in NEGATIVE


@pytest.mark.parametrize(
    "said",
    [
        "The error is still there.",
        "You did it again.",
        "How many times do I have to tell you?",
        "Did you even look at the error?",
        "Hat sich nichts geändert.",
        "Du drehst dich im Kreis.",
        "Ce n'est pas du tout ce que je t'ai demandé.",
        "Sigue fallando.",
        "跟没改一样。",
    ],
)
def test_a_complaint_is_negative(said: str) -> None:
    assert read(said, *BUILD).kind in NEGATIVE


@pytest.mark.parametrize(
    "said", ["How often should I do that?", "Did you read the news today?", "Wie oft soll ich das machen?"]
)
def test_a_question_that_resembles_a_complaint_is_none(said: str) -> None:
    assert read(said, *BUILD).kind is ReplyKind.UNCLEAR


@pytest.mark.parametrize(
    "said",
    [
        "Great, my tax documents are gone. Thanks a lot.",
        "Fantastic, now I can start all over again.",
        "Na toll, meine Hochzeitsfotos sind weg.",
        "Génial, maintenant je dois tout recommencer.",
        "Enhorabuena, lo has borrado todo.",
        "恭喜你，全删了。",
    ],
)
def test_praise_of_a_loss_is_a_complaint(said: str) -> None:
    assert read(said, *CLEANUP).kind in NEGATIVE


def test_a_loss_that_was_asked_for_or_asked_about_is_no_complaint() -> None:
    assert read("Great, the downloads are gone.", *CLEANUP).kind not in NEGATIVE
    assert read("Thanks, the heating is back on. My shower is broken, who do I call?").kind not in NEGATIVE


@pytest.mark.parametrize(
    "said",
    [
        "That works. Please put it in a file called card.txt.",
        "Klingt lecker, danke! Setz die Zutaten bitte gleich auf die Einkaufsliste.",
        "Merci, ça m'aide beaucoup. Et dans Excel, je fais comment ?",
        "完美，请把它翻译成英文。",
    ],
)
def test_praise_with_a_use_for_the_response_moves_on(said: str) -> None:
    assert read(said).kind is ReplyKind.MOVING_ON


@pytest.mark.parametrize(
    "said",
    [
        "add a task: thank Maria for the great job",
        "Antworte ihm: Danke, läuft super!",
        "Ajoute une tâche : remercier Marie.",
        "Respóndele: ¡gracias, perfecto!",
        'The other buttons read "Perfect, thanks!" and "Wrong". Which comes first?',
    ],
)
def test_words_that_the_user_dictates_or_quotes_are_not_an_opinion(said: str) -> None:
    assert read(said).kind is ReplyKind.UNCLEAR
