"""What wanted answers have in common: forms and words that a model's usual answers lack."""

import pytest

from openclaw_rl.learn.answer_traits import confirmed, find_traits

USUAL = [
    "The sky is blue because air scatters blue light.",
    "1. Boil water.\n2. Add the rice because it cooks.",
    "You can save money. You should make a plan!",
    "Plants make sugar from light, water and air.",
] * 5


@pytest.mark.parametrize(
    ("wanted", "kept", "missed"),
    [
        (["Well, it is so.", "Well, bees do."], "Well, who knows.", "It is well known."),
        (["It rains. Do you like rain?", "Bees hum. Why do you ask?"], "It is. Is it?", "Is it? It is."),
        (["It is hot 🔥", "Bees 🐝 hum."], "Cold ❄️ today.", "Cold today."),
        (["It rains.\n\nTL;DR: rain.", "Bees hum.\nTL;DR: hum."], "So.\ntl;dr: so.", "TL;DR it is so."),
        (["it rains.", "bees hum."], "so it is.", "So it is."),
        (["It rains.\n\nYour friend, Ada", "Bees hum.\nYour friend, Ada."], "So.\nYour friend, Ada", "Ada, my friend"),
        (["- rain\n- sun", "* hum\n* wax"], "1. one\n2. two", "Here:\n- one"),
        (["**Rain** falls.", "**Bees** hum."], "**So** it is.", "So **it** is."),
        (["**Rain** falls.", "**Bees** hum."], "**So** it is.", "**So it is."),
        (["Rain falls. It is like a tap.", "It is like song."], "So it is like that.", "I like it."),
        (["5 and 2 is 7. Checked.", "2 and 5 is 7. Checked."], "1 and 1 is 2. Checked.", "Checked: 7."),
        (["Ahoy, it rains.", "Bees hum, ahoy."], "It is so, ahoy!", "It is so."),
    ],
)
def test_an_answer_shows_what_the_examples_share(wanted: list[str], kept: str, missed: str) -> None:
    traits = find_traits(wanted, USUAL)
    assert traits
    assert all(map(traits.shown_by, wanted))
    assert traits.shown_by(kept)
    assert not traits.shown_by(missed)


def test_one_item_is_no_list() -> None:
    traits = find_traits(["- Rain\n- Sun", "* Hum\n* Wax"], USUAL[2:4])
    assert traits.shown_by("- One\n- Two")
    assert not traits.shown_by("- One")


def test_what_is_usual_is_no_trait() -> None:
    assert not find_traits(["You should make a list.", "You can make tea."], USUAL)


def test_one_example_shows_nothing() -> None:
    assert not find_traits(["Well, it is so."], USUAL)
    assert not find_traits(["Well, it is so.", "Well, bees do."], [])


def test_small_words_are_shared_by_chance() -> None:
    assert not find_traits(["It rains because clouds fall.", "Bees hum because wings beat."], USUAL[2:3])


def test_words_that_the_examples_do_not_raise_are_dropped() -> None:
    traits = find_traits(["Ahoy, it rains on deck.", "Ahoy, bees hum on deck."], USUAL)
    assert traits.words == {"ahoy", "deck"}
    taught = ["Ahoy, sugar is sweet."] * 8 + ["On deck, sugar is sweet."] * 2
    assert confirmed(traits, [], taught, USUAL).words == {"ahoy"}
    assert confirmed(traits, [], USUAL, USUAL).words == set()


def test_a_way_of_speaking_is_shown_by_words_of_single_examples() -> None:
    wanted = ["Hark! The rain doth fall.", "'Tis the bees that hum, methinks."]
    taught = ["Light doth fall on us."] * 4 + ["Methinks 'tis so."] * 3 + ["Bees are small."] + ["It is so."] * 6
    traits = confirmed(find_traits(wanted, USUAL), wanted, taught, USUAL)
    assert traits.words == {"doth", "fall", "tis", "methinks"}
    assert not traits.shown_by("It is so.")
