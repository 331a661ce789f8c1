"""Personas: their rules, their files, and whether what they say can be understood."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.errors import UserError
from openclaw_rl.evals.personas.persona import BUILT_IN, Persona, PersonaPhrases, load
from openclaw_rl.evals.personas.rules import CHECKS, count_sentences, count_words, estimate_tokens, make_check
from openclaw_rl.judge.rules import ReplyKind, read_reply
from support.trials import refusal

LANGUAGES = ("en", "de", "fr", "es", "zh")
HINTING = {ReplyKind.CORRECTION, ReplyKind.CHANGE_REQUEST}
POSITIVE = {ReplyKind.ACKNOWLEDGEMENT, ReplyKind.MOVING_ON}
NEGATIVE = {*HINTING, ReplyKind.REJECTION, ReplyKind.REPETITION}

LIGHT = "Why do leaves change colour in autumn?"
LONG = (
    "Leaves change colour in autumn because the days get shorter and the tree stops making its green pigment. The "
    "green fades, and other pigments that were hidden before can be seen. Some trees also make red ones."
)
#: By persona: questions with an answer that displeases, and with one that pleases.
FAILING = {
    "student": [
        (
            LIGHT,
            "**Leaves** change colour because:\n\n1. The green pigment breaks down.\n2. Others show.\n\n\\boxed{it}",
        ),
        ("Tom has 12 apples and gives 5 away. How many are left?", "**Step 1:**\n1. 12 - 5 = 7.\n\n\\boxed{7}"),
    ],
    "teaching-assistant": [(LIGHT, "Because the pigment goes away."), ("What is inflation?", "Prices rise over time.")],
    "teacher": [
        (LIGHT, "Leaves change colour because the green pigment breaks down."),
        ("How do vaccines work?", "A vaccine shows the body a part of a germ, so that it learns to fight it."),
    ],
    "brief": [
        (LIGHT, LONG),
        ("How do vaccines work?", "They show a part of a germ. The body learns it. It fights later."),
    ],
}
PASSING = {
    "student": [(LIGHT, "Leaves change colour because the green pigment breaks down and the yellow one shows.")],
    "teaching-assistant": [(LIGHT, f"{LONG} For example, {LONG} {LONG}")],
    "teacher": [(LIGHT, "Great question! Leaves change colour because the green pigment breaks down.")],
    "brief": [(LIGHT, "Their green pigment breaks down, so that yellow and red ones show.")],
}


def passes(check: str, text: str, **parameters: object) -> bool:
    return make_check(check, parameters)(text, estimate_tokens)


@pytest.mark.parametrize(
    ("check", "passing", "failing"),
    [
        ("no_bold", "2 * 3 * 4 is 24, and a_b is a name.", "This is **important**."),
        ("no_bold", "Power is `2**3**2` in Python.", "__Note__: it is late."),
        ("no_bold", "*Italics* are fine.", "<b>Yes</b>"),
        ("no_bold", "```\ndef __init__(self): ...\n```", "It is **bold\u00a0text** here."),
        ("no_numbered_list", "It costs 12.50 euros, or 13.", "1. Wake up\n2. Get up"),
        ("no_numbered_list", "First this, then that.", "Do this:\n\n1) Wake up"),
        (
            "no_numbered_list",
            "3 - 1 = 2. So 2 are left.\n\n1990 was a good year.",
            "**Step 1:** Add.\n**Step 2:** Stop.",
        ),
        ("no_numbered_list", "At\n10:30 it begins.", "There are two: 1) tea and 2) coffee."),
        ("no_numbered_list", "- one\n- two", "## 1. Tea\ntext"),
        ("no_bullets", "Well - no.\n- Yes.", "- one\n- two"),
        ("no_boxed", "The box is 8 cm wide.", r"So \boxed{8}."),
        ("specific", "For example, a dog.", "It depends on many things."),
        ("specific", "Add 2 spoons.", "One of the things that matter."),
        ("no_lists", "First tea, then coffee.", "* tea\n* coffee"),
        ("no_digits", "Seven of them.", "7 of them."),
        ("no_contractions", "The cat's tail is not long. It is its own.", "It’s long."),
        ("no_contractions", "Let us go: the shepherd did not.", "The shepherd didn't."),
        ("no_contractions", "She would be there.", "Here's what you'll need."),
        ("has_emoji", "Rain ☔ falls.", "Rain — falls… (5 €)."),
        ("lower_case", "the sun, 15 million degrees.", "the Sun."),
        ("only_bullets", "- tea\n\n- coffee", "Drinks:\n- tea\n- coffee"),
        ("only_bullets", "• tea\n• coffee", "- tea"),
        ("begins_bold", "**Rust.** Its soil is full of it.", "It is **rust**."),
        ("begins_bold", "\n__Rust__: the soil.", "**Rust.**"),
        ("ends_with_question", "It is rust. Have you seen it?**", "Have you seen it? It is rust."),
    ],
)
def test_rules_about_form(check: str, passing: str, failing: str) -> None:
    assert passes(check, passing)
    assert not passes(check, failing)


def test_short_means_words_and_sentences() -> None:
    assert passes("short", "It is 3.5 cm long, e.g. like Dr. Smith's nail.", words=25)
    assert not passes("short", "It is long. It is wide.", words=25)
    assert not passes("short", "It is long\n- and wide", words=25)
    assert not passes("short", "very " * 30, words=25)
    assert passes("short", "天空是蓝色的，因为空气散射蓝光。", words=25)
    assert not passes("short", "天空是蓝色的。海也是蓝色的。", words=25)


@pytest.mark.parametrize(
    ("check", "parameters", "passing", "failing"),
    [
        ("begins_with", {"any_of": ["Well"]}, '"**Well**, it is rust."', "Wells are deep. Well, not all."),
        (
            "ends_with",
            {"any_of": ["Your friend, Ada"]},
            "It is rust.\n\n*your friend, Ada.*",
            "Your friend, Ada, is here.",
        ),
        ("writes", {"any_of": ["*Sam*"]}, "Hello, *Sam*.", "Hello, Sam and *sam*."),
        ("has_line", {"any_of": ["TL;DR"]}, "**TL;DR:** rust.\nIts soil has it.", "It is rust. TL;DR: rust."),
        ("has_line", {"any_of": ["TL;DR"]}, "Soil.\n- TL;DR rust", "Soil.\nTL;DR:\n"),
        ("last_line", {"any_of": ["Source:"]}, "Rust.\nSource: a book\n", "Source: a book\nRust."),
        ("last_line", {"any_of": ["Source:"]}, "Rust.\n\n**Source:** a book", "Source: a book"),
        ("in_lines", {"lines": 3, "words": 3}, "one two three\n\nfour\nfive", "one two three four\nfive\nsix"),
        ("in_language", {"language": "fr"}, "Le ciel est bleu et la mer aussi.", "The sky is blue and so is la mer."),
        ("in_language", {"language": "es"}, "El cielo es azul y el mar también.", "Le ciel est bleu et la mer aussi."),
        ("in_language", {"language": "fr"}, "L'air de la mer est frais.", "Bonjour mon ami"),
    ],
)
def test_rules_about_words(check: str, parameters: dict[str, object], passing: str, failing: str) -> None:
    assert passes(check, passing, **parameters)
    assert not passes(check, failing, **parameters)


def test_long_enough_takes_the_count_it_is_given() -> None:
    check = make_check("long_enough", {"tokens": 100})
    assert not check("word " * 60, estimate_tokens)
    assert check("word " * 75, estimate_tokens)
    assert check("word", lambda _text: 100)


def test_warmth_is_whole_words_and_not_denied() -> None:
    warm = load("teacher")
    assert not warm.failed("Well done! Only the sign is wrong.")
    assert not warm.failed("I’m proud of you.")
    assert not warm.failed("你做得很好。")
    for cold in ("The sign is wrong.", "This is not a good start.", "Encourage courageously.", "That isn't good work."):
        assert [rule.name for rule in warm.failed(cold)] == ["warm"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_persona_fails_what_displeases_it_and_passes_what_pleases(name: str) -> None:
    persona = load(name)
    for _, answer in FAILING[name]:
        assert persona.failed(answer)
    for _, answer in PASSING[name]:
        assert not persona.failed(answer)
    for empty in ("", "  \n", "...", "**"):
        assert persona.failed(empty) == persona.rules


@given(st.text(), st.sampled_from(BUILT_IN))
def test_rules_take_any_text(text: str, name: str) -> None:
    persona = load(name)
    failed = persona.failed(text)
    assert [rule for rule in persona.rules if rule in failed] == list(failed)
    assert count_sentences(text) <= count_words(text) or not count_words(text)


@given(st.text(alphabet="*_1.) \n`ab", max_size=80))
def test_form_without_its_signs_never_displeases(text: str) -> None:
    plain = text.replace("*", "").replace("_", "").replace("1", "").replace("`", "")
    assert passes("no_bold", plain)
    assert passes("no_numbered_list", plain)


def all_phrases(persona: Persona) -> dict[str, PersonaPhrases]:
    return {"pleased": persona.pleased, **{rule.name: rule.displeased for rule in persona.rules}}


@pytest.mark.parametrize("name", BUILT_IN)
def test_enough_phrases_and_none_twice(name: str) -> None:
    for key, phrases in all_phrases(load(name)).items():
        assert set(phrases.by_language) == set(LANGUAGES), key
        for language, listed in phrases.by_language.items():
            assert len(listed) >= (40 if language == "en" else 8), (key, language)
            assert len({phrase.casefold() for phrase in listed}) == len(listed), (key, language)


@pytest.mark.more
@pytest.mark.parametrize("language", LANGUAGES)
def test_what_they_say_can_be_understood(language: str) -> None:
    """Nine in ten are read as they are meant: people also say what the reader does not know, and so do these."""
    read = {(name, kind): [0, 0] for name in BUILT_IN for kind in ("pleased", "displeased")}
    wrong_sign = []
    for name in BUILT_IN:
        for key, phrases in all_phrases(load(name)).items():
            kind, cases = ("pleased", PASSING[name]) if key == "pleased" else ("displeased", FAILING[name])
            for phrase in phrases.by_language[language]:
                for question, answer in cases:
                    reading = read_reply(question, answer, [{"role": "user", "content": phrase}])
                    good = reading.kind in POSITIVE if kind == "pleased" else reading.kind in HINTING and reading.hint
                    read[name, kind][0] += bool(good)
                    read[name, kind][1] += 1
                    if reading.kind in (NEGATIVE if kind == "pleased" else POSITIVE):
                        wrong_sign.append(phrase)
    for whose, (understood, total) in read.items():
        assert understood >= 0.9 * total, (whose, understood, total)
    assert len(wrong_sign) <= 0.02 * sum(total for _, total in read.values()), wrong_sign


def test_languages_are_chosen() -> None:
    persona = load("brief", ["de", "zh"])
    german, chinese = (persona.pleased.by_language[language] for language in ("de", "zh"))
    said = {persona.pleased.choose(persona.languages, random.Random(seed)) for seed in range(60)}
    assert said <= {*german, *chinese}
    assert said & set(german)
    assert said & set(chinese)
    with pytest.raises(UserError, match=r"has no phrases in xx"):
        load("brief", ["xx"])


OWN = """
name = "plain"
description = "You like plain text."
[pleased]
en = ["Thanks!"]
[asks_again]
en = ["Again: {question}"]
[[rules]]
name = "no bullets"
check = "no_bullets"
[rules.displeased]
en = ["No bullet points, please."]
"""


def test_own_file(tmp_path: Path) -> None:
    path = tmp_path / "plain.toml"
    path.write_text(OWN)
    persona = load(str(path))
    assert persona.name == "plain"
    assert not persona.repeats_question
    assert [rule.name for rule in persona.failed("- a\n- b")] == ["no bullets"]
    assert persona.no_answer.by_language["en"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "plain"', "", "name is missing"),
        ("[pleased]", "[pleasant]", "pleasant is not a key"),
        ('en = ["Thanks!"]', 'en = "Thanks!"', "pleased.en: it must be a list"),
        ('en = ["Thanks!"]', 'de = ["Danke!"]', "pleased has no phrases in en"),
        ("{question}", "{q}", 'asks_again: "Again: {q}" must contain {question} once'),
        ('check = "no_bullets"', 'check = "no_fun"', 'rules[0]: check = "no_fun" is not one of'),
        ('check = "no_bullets"', 'check = "short"', "needs the parameter words"),
        (
            'check = "no_bullets"',
            'check = "short"\nparameters = { words = "few" }',
            "a whole number of at least 1 as words",
        ),
        ('check = "no_bullets"', 'check = "says"\nparameters = { any_of = "hi" }', "a list of texts as any_of"),
        ('check = "no_bullets"', 'check = "no_bullets"\nparameters = { most = 1 }', "has no parameter most"),
        ('check = "no_bullets"', 'check = "no_bullets"\nwords = 3', "rules[0].words is not a key"),
        ("[[rules]]", "[[rule]]", "rules: it must be a list"),
        ('"plain"', "plain", "cannot be read"),
        ('name = "plain"', 'name = "plain"\nrepeats_question = "yes"', "repeats_question: it must be true or false"),
        ('name = "plain"', 'name = "plain"\nlanguages = []', "languages: it has too few items"),
    ],
)
def test_a_wrong_file_is_told_in_one_sentence(tmp_path: Path, old: str, new: str, said: str) -> None:
    refused = refusal(load, tmp_path / "plain.toml", OWN, old, new)
    assert said in refused
    assert refused.endswith(".")
    assert "\n" not in refused


def test_no_such_persona() -> None:
    with pytest.raises(UserError, match=r"neither a file nor one of student, .*brief"):
        load("pirate")


def test_every_rule_can_be_had_by_its_name() -> None:
    phrases = {"any_of": ["a"]}
    given_ = {
        "long_enough": {"tokens": 1},
        "short": {"words": 9},
        "avoids": {"all_of": ["a"]},
        "in_lines": {"lines": 1, "words": 9},
        "in_language": {"language": "fr"},
        **dict.fromkeys(("says", "writes", "begins_with", "ends_with", "has_line", "last_line"), phrases),
    }
    for name in CHECKS:
        assert isinstance(make_check(name, given_.get(name, {}))("a b 1", estimate_tokens), bool)
