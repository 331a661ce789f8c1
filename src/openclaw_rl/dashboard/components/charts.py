"""Matplotlib's figures in one style, for the demo and for environments: as SVG inside a page, or as PNG files.

Matplotlib is imported only where something is drawn, and never through pyplot, which keeps figures and may open
windows. The same figure gives the same text every time.
"""

import io
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from openclaw_rl.errors import UserError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours that people with every kind of colour vision can tell apart.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, FAINT, GRID, PAPER = "#1f2a37", "#5b6673", "#e3e7ec", "#ffffff"
#: In a page, colours come from its style sheet, which has others for dark mode.
VARIABLES = {
    **{colour: f"--series-{number}" for number, colour in enumerate(SERIES)},
    **{INK: "--ink", FAINT: "--faint", GRID: "--grid", PAPER: "--paper"},
}
#: Dots per inch: sharp on a screen of twice the usual density.
DPI = 160
_TAG = re.compile(r"<[^>]*>")
_ID = re.compile(r'( id="|href="#|url\(#)')
_FONT = re.compile(r"font-family: [^;\"]*")
#: Parts of an SVG that a page must not contain: an inner style sheet would apply to the whole page.
_NEEDLESS = re.compile(r"<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)
_SIZE = re.compile(r' (?:width|height)="[\d.]+pt"| xmlns:xlink="[^"]*"')


def need_matplotlib(what: str) -> None:
    """Raise UserError if Matplotlib is missing. Call this before long work."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(f"{what} needs matplotlib: {sys.executable} -m pip install matplotlib") from None


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, its size in inches. Raises UserError without Matplotlib."""
    need_matplotlib("A picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.04)
    figure = Figure(figsize=(width, height), facecolor=PAPER, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def dress(axes: "Axes", title: str = "", x: str = "", y: str = "") -> None:
    """The style of all axes: no frame, a faint grid, grey labels."""
    axes.set_facecolor(PAPER)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=9, length=0, pad=5)
    if title:
        axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=9, fontweight="bold")
    axes.set_xlabel(x, fontsize=9, color=FAINT)
    axes.set_ylabel(y, fontsize=9, color=FAINT)


def add_legend(figure: "Figure", handles: "Sequence[Artist]") -> None:
    """Below all axes, never on the data."""
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9, labelcolor=INK
    )


def plain(text: str) -> str:
    """A text as a label. Dollar signs are escaped, because Matplotlib would read formulas between them."""
    return text.replace("$", r"\$")


def to_svg(figure: "Figure", name: str, description: str) -> Markup:
    """A figure as SVG for a page. All ids start with `name`, which must be unique there.

    `description` is for screen readers. Texts stay texts, in the page's font.
    """
    text = _NEEDLESS.sub("", _draw(figure, name, "svg").decode())
    text = text[text.index("<svg") :].strip()
    # Only within tags: a label may look like an id.
    text = _TAG.sub(lambda tag: _adapt(tag[0], name), text)
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1))


def _adapt(tag: str, name: str) -> str:
    """A tag with the page's ids, fonts and colours."""
    if tag.startswith("<svg"):
        tag = _SIZE.sub("", tag)
    tag = _ID.sub(rf"\g<1>{name}-", tag.replace("xlink:href", "href"))
    tag = _FONT.sub("font-family: var(--sans)", tag)
    for colour, variable in VARIABLES.items():
        tag = tag.replace(colour, f"var({variable})")
    return tag


def save_png(figure: "Figure", path: Path) -> None:
    """Raises UserError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_draw(figure, "png", "png"))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


def _draw(figure: "Figure", name: str, kind: str) -> bytes:
    from matplotlib import rc_context

    out = io.BytesIO()
    # Without date and program name, so that equal figures are equal files.
    metadata: dict[str, Any] = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
        # A PNG shows an empty box for a character that its font lacks; a page uses the browser's fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(out, format=kind, dpi=DPI, metadata=metadata, facecolor=PAPER)
    return out.getvalue()
