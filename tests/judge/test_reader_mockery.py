"""Reading mock praise, and praise that looks like it; and the totals on labelled cases of mockery and tool results."""

from pathlib import Path

import pytest

from openclaw_rl.judge.rules import ReplyKind
from support.measure import NEGATIVE, POSITIVE, measure_signs, read_cases
from support.reading import read

TUNING = Path(__file__).with_name("next_states_mockery_and_tools.jsonl")
POSTER = ("Make the title a bit larger.", "The title is 400 points high now.")


@pytest.mark.parametrize(("score", "least_recall"), [(1, 0.7), (-1, 0.75)])
def test_reads_mockery_and_tool_results(score: int, least_recall: float) -> None:
    precision, recall = measure_signs(read_cases(TUNING))[score]
    assert precision >= 0.97
    assert recall >= least_recall


@pytest.mark.parametrize(
    "said",
    [
        "Wow, well spotted. Thanks, Sherlock.",
        "Lovely. You can read it from space now.",
        "Great. Nothing says elegance like that.",
        "Perfect, who needs the other lines anyway?",
        "Super, das liest man noch vom Weltall aus.",
        "Toll gemacht, wer braucht schon Ränder.",
        "Bravo, on la lit depuis l'espace.",
        "Merci, grâce à toi j'ai raté mon train.",
        "Estupendo, se lee desde el espacio.",
        "Gracias, por tu idea he llegado tarde.",
        "太好了，太空上都能看见。",
        "厉害啊，多亏你我迟到了。",
        "Thanks, very clear. I'm none the wiser.",
        "Vielen Dank, jetzt bin ich so klug wie zuvor.",
        "Merci, je comprends encore moins.",
        "Gracias, sigo en las mismas.",
        "谢谢你，我反而更懵了。",
    ],
)
def test_mock_praise_is_a_complaint(said: str) -> None:
    assert read(said, *POSTER).kind in NEGATIVE


@pytest.mark.parametrize(
    "said",
    [
        "Perfect, three neighbours came to look at it.",
        "Klasse, da staunt bestimmt die ganze Straße.",
        "Génial, toute la rue va venir voir.",
        "Genial, toda la calle va a alucinar.",
        "Great job! Larger, gigantic, it's all the same, right?",
    ],
)
def test_an_exclamation_before_words_of_unknown_meaning_is_no_praise(said: str) -> None:
    assert read(said, *POSTER).kind not in POSITIVE


@pytest.mark.parametrize(
    "said", ["Perfect, thank you!", "Klasse, danke dir!", "Génial, merci !", "Perfecto, gracias.", "太好了，谢谢！"]
)
def test_plain_praise_stays_praise(said: str) -> None:
    assert read(said, *POSTER).kind is ReplyKind.ACKNOWLEDGEMENT


@pytest.mark.parametrize(
    "said",
    [
        "How large does a city look from the moon?",
        "Wie sieht die Erde vom Mond aus?",
        "Thanks! Who was Einstein's teacher?",
        "well, that's certainly one way to do it",
    ],
)
def test_words_of_mockery_alone_are_no_complaint(said: str) -> None:
    assert read(said).kind not in NEGATIVE
