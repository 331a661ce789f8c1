"""Forms: press a button, fill in a field, fill in a whole form and leave the rest alone."""

from collections.abc import Mapping
from random import Random
from typing import Any

from openclaw_rl.envs.base import Outcome
from openclaw_rl.envs.browser.pages.parts import (
    ChoiceField,
    Heading,
    Page,
    PageForm,
    Paragraph,
    RadioButton,
    SendButton,
    TextField,
    TickBox,
    Widget,
)
from openclaw_rl.envs.browser.pages.site import SiteDraft, SiteMove, share_right
from openclaw_rl.envs.browser.pages.words import CITIES, COMMANDS, PEOPLE, SURNAMES, TOPICS

TEXT_FIELDS = ("Name", "City", "Phone", "Company", "Topic")
SIZES = ("Small", "Medium", "Large")
PAYMENTS = ("Card", "Invoice", "Cash")
NEWSLETTER = "Newsletter"


class Forms:
    """The family of forms."""

    def draw(self, random: Random, level: int) -> SiteDraft:
        if level == 1:
            return draw_button(random)
        return draw_field(random) if level == 2 else draw_form(random)

    def site(self, content: Mapping[str, Any]) -> "FormSite":
        return FormSite(content)


class FormSite:
    """One form. It is over when it was sent."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.sent: dict[str, str] | None = None

    @property
    def over(self) -> bool:
        return self.sent is not None

    def get(self, path: str) -> Page:
        if self.over:
            return Page([Paragraph("Thank you.")])
        content = self.content
        widgets: list[Widget] = [TextField(name, name, value) for name, value in content["texts"].items()]
        widgets += [ChoiceField(name, name, tuple(options), value) for name, options, value in content["choices"]]
        widgets += [
            RadioButton(option, name, option == value)
            for name, options, value in content["radios"]
            for option in options
        ]
        widgets += [TickBox(name, name, ticked) for name, ticked in content["ticks"].items()]
        widgets += [SendButton(name, value=name) for name in content["buttons"]]
        return Page([*map(Heading, content["headings"]), PageForm("/send", tuple(widgets))])

    def post(self, path: str, fields: Mapping[str, str]) -> str:
        self.sent = dict(fields) if self.sent is None else self.sent
        return "/"

    def outcome(self) -> Outcome:
        expected, sent = self.content["expected"], self.sent or {}
        if sent.get("button") != expected["button"]:
            return Outcome(0.0, solved=False, hint=f'Click the button "{expected["button"]}".')
        problems = [
            f'The field "{name}" must be "{expected.get(name, "off")}", not "{sent.get(name, "off")}".'
            for name in sorted(expected.keys() | sent.keys())
            if expected.get(name, "").strip() != sent.get(name, "").strip()
        ]
        return share_right(problems, len(expected), ended=self.over)


def draw_button(random: Random) -> SiteDraft:
    buttons = random.sample(COMMANDS, 3)
    target = random.choice(buttons)
    content = form(buttons=buttons, expected={"button": target})
    return SiteDraft(f'Click "{target}".', content, [SiteMove("click", "button", target)])


def draw_field(random: Random) -> SiteDraft:
    labels = random.sample(TEXT_FIELDS, 2)
    label, value = labels[0], text_for(labels[0], random)
    expected = {labels[1]: "", label: value, "button": "Send"}
    random.shuffle(labels)
    content = form(texts=dict.fromkeys(labels, ""), buttons=["Send"], expected=expected)
    moves = [SiteMove("type", "textbox", label, value), SiteMove("click", "button", "Send")]
    return SiteDraft(f'Set {label} to "{value}" and click "Send".', content, moves)


def draw_form(random: Random) -> SiteDraft:
    labels = random.sample(TEXT_FIELDS, 3)
    # The last field has a value already, which must stay.
    texts = {labels[0]: "", labels[1]: "", labels[2]: text_for(labels[2], random)}
    values = {label: text_for(label, random) for label in labels[:2]}
    first_size, size = random.sample(SIZES, 2)
    payment, news = random.choice(PAYMENTS), random.random() < 0.5
    content = form(
        headings=["Order form"],
        texts=texts,
        choices=[["Size", list(SIZES), first_size]],
        radios=[["payment", list(PAYMENTS), ""]],
        ticks={NEWSLETTER: not news},
        buttons=["Clear", "Send"],
        expected={
            **texts,
            **values,
            **{"Size": size, "payment": payment, "button": "Send"},
            **({NEWSLETTER: "on"} if news else {}),
        },
    )
    wanted = [f'{label} "{value}"' for label, value in (*values.items(), ("Size", size), ("pay by", payment))]
    wish = "with" if news else "without"
    moves = [SiteMove("type", "textbox", label, value) for label, value in values.items()]
    moves += [SiteMove("select", "combobox", "Size", size), SiteMove("click", "radio", payment)]
    moves += [SiteMove("click", "checkbox", NEWSLETTER), SiteMove("click", "button", "Send")]
    return SiteDraft(f"Send the form {wish} newsletter: {', '.join(wanted)}. Leave the rest as it is.", content, moves)


def form(**content: Any) -> dict[str, Any]:
    return {"headings": [], "texts": {}, "choices": [], "radios": [], "ticks": {}, **content}


def text_for(label: str, random: Random) -> str:
    if label == "Name":
        return f"{random.choice(PEOPLE)} {random.choice(SURNAMES)}"
    if label == "City":
        return random.choice(CITIES)
    if label == "Phone":
        return f"{random.randint(100, 999)} {random.randint(1000, 9999)}"
    return (
        f"{random.choice(SURNAMES)} & Co" if label == "Company" else f"{random.choice(TOPICS)} {random.randint(2, 99)}"
    )
