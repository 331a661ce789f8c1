"""Charts: whole, alone in their page or file, the same every time, with bands and a legend."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from openclaw_rl.errors import UserError
from openclaw_rl.lab.charts import BAR, STYLE, Chart, Series, bar_table, chart_file, line_chart, share
from openclaw_rl.lab.commands import write_text

NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'


def a_chart(title: str = "A title") -> Chart:
    lines = [
        Series("mean", [(1, 0.1), (2, 0.3), (3, 0.2)], "s0", [(1, 0.0, 0.2), (2, 0.2, 0.4), (3, 0.1, 0.3)]),
        Series("guard", [(1, 0.9), (3, 0.8)], "s0", drawn="dashed"),
        Series("ends", [(1, 0.5), (3, 0.6)], "s1", [(1, 0.4, 0.6), (3, 0.5, 0.7)], "points"),
    ]
    return line_chart(title, lines, axis="steps", lowest=0, highest=1, form=share)


def a_file(title: str = "A title") -> str:
    return chart_file("A heading", [a_chart(title), a_chart(title), a_chart("other")], columns=2)


def tags(svg: str) -> list[str]:
    return [element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()]


def test_a_chart_is_xml_that_fetches_nothing_and_styles_nothing() -> None:
    svg = a_chart().svg
    assert ElementTree.fromstring(svg).attrib["aria-label"] == (
        "A title, over 3 points: mean, from 10 % to 20 %; guard, from 90 % to 80 %; ends, from 50 % to 60 %."
    )
    assert set(tags(svg)) == {"svg", "line", "text", "polygon", "polyline", "circle", "title"}
    assert "http" not in svg
    assert "style=" not in svg
    assert " id=" not in svg, "charts of one page would share it"


def test_bands_lie_below_lines_and_whiskers_have_no_line() -> None:
    drawn = [tag for tag in tags(a_chart().svg) if tag in ("polygon", "polyline", "circle")]
    # A band, two whiskers; a line with three dots; a dashed line without dots; two points.
    assert drawn == ["polygon", *["polyline"] * 3, *["circle"] * 3, "polyline", *["circle"] * 2]


def test_a_chart_has_the_pages_colours() -> None:
    svg = a_chart().svg
    assert not re.findall(r"#[0-9a-f]{6}\b", svg)
    rules = STYLE.read_text()
    for name in {name for classes in re.findall(r'class="([^"]*)"', svg) for name in classes.split()}:
        assert re.search(rf"\.{name}\b", rules), f"{name} is not in the style sheet"


def test_every_colour_has_a_dark_one() -> None:
    light, dark = STYLE.read_text().split("/* Charts */")[0].split("prefers-color-scheme: dark", 1)
    used = set(re.findall(r"var\((--[\w-]+)\)", STYLE.read_text())) - {"--sans"}
    assert "--series-0" in used
    for variable in used:
        assert f"{variable}:" in light
        assert f"{variable}:" in dark


def test_a_file_stands_alone_in_light_and_dark() -> None:
    text = a_file()
    assert tags(text).count("style") == 1
    assert "http" not in text.replace(NAMESPACE, "")
    assert "var(" not in text, "many programs that show SVG know no variables"
    light, dark = text.split("</style>")[0].split("prefers-color-scheme: dark")
    assert "#0072b2" in light
    assert "#4fa9e2" in dark
    root = ElementTree.fromstring(text)
    shown = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert [shown.count(label) for label in ("A heading", "A title", "other", "steps")] == [1, 2, 1, 3]
    assert [shown.count(label) for label in ("mean", "guard", "ends")] == [1, 1, 1], "one legend for all"


def test_a_long_legend_has_several_rows_within_the_file() -> None:
    series = [Series(f"a method with a long name {n}", [(0, n), (1, n)], f"s{n}") for n in range(6)]
    root = ElementTree.fromstring(chart_file("", [line_chart("", series, axis="steps")]))
    places = [(float(e.attrib["x"]), float(e.attrib["y"])) for e in root.iter() if e.attrib.get("class") == "label"]
    assert len({y for _, y in places}) > 1
    assert max(y for _, y in places) < float(root.attrib["height"])
    assert max(x for x, _ in places) < float(root.attrib["width"]) - 100


@pytest.mark.parametrize(
    "title", ["<b>&\"'", "costs $5 and $x^2", "half $", "🦞 龙虾", 'id="x" url(#y) #0072b2', "a\nb", "half \ud83e"]
)
def test_whatever_a_title_says_is_text(title: str) -> None:
    whole = title.replace("\ud83e", "\ufffd")
    text = a_file(title)
    assert "".join(whole.split()) in "".join("".join(ElementTree.fromstring(text).itertext()).split())
    charts = [element for element in ElementTree.fromstring(text).iter() if "aria-label" in element.attrib]
    assert charts[0].attrib["aria-label"].startswith(whole.replace("\n", " "))


def test_nothing_is_said_to_be_nothing() -> None:
    assert "nothing measured yet" in line_chart("Empty", [], axis="steps").svg
    assert "nothing measured yet" not in a_chart().svg


def test_a_table_of_bars_has_a_bar_as_long_as_each_share_and_says_where_there_is_none() -> None:
    rows = {
        ("first & last", "as it was"): {"one": (0.5, 0.25, 0.75)},
        ("other", ""): {"one": (1.0, 0.8, 1.0), "two": (0.0, 0.0, 0.2)},
    }
    root = ElementTree.fromstring(chart_file("Scores", [bar_table("Shares", {"one": "easy", "two": "hard"}, rows)]))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"first & last", "as it was", "easy", "hard", "50 %", "100 %", "0 %"} < set(texts)
    assert texts.count("no score") == 1
    bars = [float(element.get("width", "")) for element in root.iter() if element.get("class") == "s0"]
    assert bars == [BAR / 2, BAR, 0]
    lines = [element.get("points", "").split() for element in root.iter() if element.get("class") == "interval"]
    ends = [[float(end.split(",")[0]) for end in line] for line in lines]
    assert [high - low for low, high in ends] == pytest.approx([BAR * 0.5, BAR * 0.2, BAR * 0.2], abs=0.2)


def test_equal_charts_are_equal_files(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        write_text(tmp_path / "new" / name, a_file())
    assert (tmp_path / "new" / "a.svg").read_bytes() == (tmp_path / "new" / "b.svg").read_bytes()


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"a\.svg cannot be written: File exists\.$"):
        write_text(tmp_path / "file" / "a.svg", a_file())
