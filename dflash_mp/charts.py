"""Charts as inline SVG that fits its place and the reader's light or dark page.

Titles and legends are HTML beside the drawing: they wrap, and matplotlib reads no markup in them.
"""

import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from dflash_mp.markup import Html, text

Points = Sequence[tuple[float, float]]

COLOURS = ("#3987c9", "#d9822b", "#3aa76d", "#b765b3", "#c9523f", "#7d8a99")
"""Middle tones: readable on white and on black."""

INK = "#010203"
"""Stands for the colour of the page's text, which matplotlib cannot know."""

SIZE = (5.4, 2.7)
"""Inches; the page scales the drawing to the width it has."""

MOST_POINTS = 400


@dataclass(frozen=True)
class Key:
    """How a label is drawn."""

    label: str
    colour: str
    dashed: bool = False


def colour(index: int) -> str:
    """Of the series ``index`` of a chart."""
    return COLOURS[index % len(COLOURS)]


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most ``most`` points: means of neighbours, where there are more."""
    size = -(-len(points) // most)
    if size <= 1:
        return points
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def lines(
    title: str,
    series: Mapping[str, Points],
    across: str = "optimizer step",
    shares: bool = False,
    kinds: int = 1,
) -> Html:
    """One line per label; empty for no points at all. Few points are marked.

    With two or more ``kinds`` the labels come in so many groups of equal size: the colours are the
    same in all of them, and the lines of all but the first are dashed.

    Values that span more than a factor of ten have a logarithmic axis, unless they are ``shares``,
    whose axis goes from 0 to 1.
    """
    keys = [key for key in _keys(series, kinds) if series[key.label]]
    if not keys:
        return ""
    figure, axes = _canvas(across)
    heights: list[float] = []
    for key in keys:
        x, y = zip(*thinned(series[key.label]), strict=True)
        mark, dash = "o" if len(x) < 40 else None, "--" if key.dashed else "-"
        axes.plot(x, y, dash, color=key.colour, marker=mark, markersize=3.5, linewidth=1.6)
        heights += y
    if shares:
        axes.set_ylim(0, 1)
    elif 0 < 10 * min(heights) < max(heights):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    _whole_numbers(axes)
    return _figure(figure, title, keys)


def bars(
    title: str, names: Sequence[Any], groups: Mapping[str, Sequence[float]], kinds: int = 1
) -> Html:
    """Bars over ``names``, side by side for each label; ``kinds`` as in ``lines``, paler."""
    keys = [key for key in _keys(groups, kinds) if groups[key.label]]
    figure, axes = _canvas("")
    width = 0.8 / max(1, len(keys))
    for index, key in enumerate(keys):
        values, alpha = groups[key.label], 0.5 if key.dashed else 1.0
        places = [i + (index + 0.5) * width - 0.4 for i in range(len(values))]
        axes.bar(places, values, width, color=key.colour, alpha=alpha)
    slanted = (
        {"rotation": 40, "ha": "right"} if max(map(len, map(str, names)), default=0) > 3 else {}
    )
    axes.set_xticks(range(len(names)), [str(name) for name in names], **slanted)
    return _figure(figure, title, keys)


def histogram(title: str, values: Sequence[float]) -> Html:
    """How often values between 0 and 1 occur."""
    figure, axes = _canvas("")
    axes.hist(values, bins=20, range=(0, 1), color=colour(0))
    return _figure(figure, title, [])


def areas(title: str, layers: Mapping[str, Points]) -> Html:
    """Shares of a whole, stacked in the order given; all layers have points at the same places."""
    thin = {label: thinned(points) for label, points in layers.items()}
    places = [x for x, _ in next(iter(thin.values()), [])]
    if not places:
        return ""
    figure, axes = _canvas("optimizer step")
    heights = [[y for _, y in points] for points in thin.values()]
    if len(places) == 1:
        # An area needs an extent.
        places, heights = [0.0, places[0]], [row * 2 for row in heights]
    tones = [colour(index) for index in range(len(thin))]
    axes.stackplot(places, heights, colors=tones, linewidth=0)
    axes.set(ylim=(0, 1), xlim=(places[0], places[-1]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _whole_numbers(axes)
    return _figure(figure, title, _keys(thin))


def _canvas(across: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(across, color=INK, fontsize=9)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    return figure, axes


def _whole_numbers(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)


def _keys(labels: Collection[str], kinds: int = 1) -> list[Key]:
    group = len(labels) // kinds
    return [
        Key(label, colour(index % group), dashed=index >= group)
        for index, label in enumerate(labels)
    ]


def _figure(figure: Figure, title: str, keys: Sequence[Key]) -> Html:
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # The salt keeps the names inside one drawing apart from those of the next.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(out, format="svg", metadata=nothing)
    drawing = out.getvalue()
    drawing = drawing[drawing.index("<svg") :].replace(INK, "currentColor")
    # The same in every drawing, and nothing refers to them.
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)
    drawing = drawing.replace("<svg", f'<svg role="img" aria-label="{text(title)}"', 1)
    legend = "".join(
        f'<span class="key{" dashed" if key.dashed else ""}" style="--colour: {key.colour}">'
        f"{text(key.label)}</span>"
        for key in keys
        if key.label.casefold() != title.casefold()
    )
    return f"<figure><figcaption>{text(title)}{legend}</figcaption>{drawing}</figure>"
