"""Pictures: whole, alone in their page, the same every time, and a sentence where they cannot be drawn."""

import io
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from openclaw_rl.dashboard.components import charts
from openclaw_rl.dashboard.components.render import moment, render
from openclaw_rl.errors import UserError


def a_figure(title: str = "A title") -> "charts.Figure":
    figure = charts.new_figure(4, 3)
    axes = figure.add_subplot()
    charts.dress(axes, charts.plain(title), "x", "y")
    axes.plot([1, 2, 3], [1, 3, 2], "o-", color=charts.SERIES[0])
    axes.fill_between([1, 2, 3], [0, 2, 1], [2, 4, 3], color=charts.SERIES[1], alpha=0.2)
    return figure


def ids(svg: str) -> list[str]:
    return re.findall(r' id="([^"]+)"', svg)


def test_pictures_of_one_page_have_no_id_in_common_and_refer_to_their_own() -> None:
    one, other = (charts.to_svg(a_figure(), name, "same") for name in ("one", "other"))
    assert not set(ids(one)) & set(ids(other))
    for svg in (one, other):
        referred = re.findall(r'(?:href="#|url\(#)([^")]+)', svg)
        assert referred
        assert set(referred) <= set(ids(svg))
        assert len(set(ids(svg))) == len(ids(svg))


def test_a_picture_is_xml_that_fetches_nothing_and_styles_nothing_but_itself() -> None:
    svg = charts.to_svg(a_figure(), "one", "what is to be seen")
    root = ElementTree.fromstring(svg)
    assert root.attrib["aria-label"] == "what is to be seen"
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {
        "svg",
        "defs",
        "g",
        "path",
        "use",
        "text",
        "clipPath",
        "rect",
    }
    assert "http" not in svg.replace('xmlns="http://www.w3.org/2000/svg"', "")


def test_a_picture_has_the_pages_colours_and_letters() -> None:
    svg = charts.to_svg(a_figure(), "one", "")
    assert not re.findall(r"#[0-9a-f]{6}\b", svg)
    assert "var(--series-0)" in svg
    assert set(re.findall(r"font-family: ([^;\"]*)", svg)) == {"var(--sans)"}
    known = render("dashboard/components/base.html.j2")
    for variable in set(re.findall(r"var\((--[\w-]+)\)", svg)) | set(charts.VARIABLES.values()):
        assert known.count(f"{variable}:") >= 1, f"{variable} is no colour of the page"


def test_every_colour_has_a_dark_one() -> None:
    light, dark = render("dashboard/components/base.html.j2").split("prefers-color-scheme: dark", 1)
    for variable in charts.VARIABLES.values():
        assert f"{variable}:" in light.split("</style>")[0]
        assert f"{variable}:" in dark.split("* { box-sizing")[0]


@pytest.mark.parametrize(
    "title", ["<b>&\"'", "costs $5 and $x^2", "half $", "🦞 龙虾", 'id="x" url(#y) #0072b2', "a\nb"]
)
def test_whatever_a_title_says_is_text(title: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    root = ElementTree.fromstring(charts.to_svg(a_figure(title), "one", title))
    assert root.attrib["aria-label"] == title.replace("\n", " ")
    assert "".join(title.split()) in "".join("".join(root.itertext()).split())
    charts.save_png(a_figure(title), tmp_path / "a.png")
    assert not recwarn.list


def test_equal_figures_are_equal_files(tmp_path: Path) -> None:
    assert charts.to_svg(a_figure(), "one", "d") == charts.to_svg(a_figure(), "one", "d")
    for name in ("a.png", "b.png"):
        charts.save_png(a_figure(), tmp_path / "new" / name)
    data = (tmp_path / "new" / "a.png").read_bytes()
    assert data == (tmp_path / "new" / "b.png").read_bytes()
    with Image.open(io.BytesIO(data)) as image:
        image.verify()
        assert (image.format, image.size) == ("PNG", (4 * charts.DPI, 3 * charts.DPI))


def test_a_picture_that_cannot_be_saved_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"a\.png cannot be written: File exists\.$"):
        charts.save_png(a_figure(), tmp_path / "file" / "a.png")


def test_without_matplotlib_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sentence = rf"needs matplotlib: {re.escape(sys.executable)} -m pip install matplotlib$"
    with pytest.raises(UserError, match=f"^The demo {sentence}"):
        charts.need_matplotlib("The demo")
    with pytest.raises(UserError, match=sentence):
        charts.new_figure(1, 1)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300, -1e300])
def test_a_time_that_is_none_is_said(seconds: float) -> None:
    assert moment(seconds) == "at an unknown time"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", moment(1.8e9))
