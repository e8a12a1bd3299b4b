"""The one HTML page: templates, the script and style that it carries, and figures made fit to stand inside it.

Nothing is fetched when the page is opened, and nothing that came with a run can run in it: text is escaped, data is
JSON that cannot end its script element, and the page's policy names its own scripts by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from analysis.report import style
from analysis.report.blocks import Figure

_HERE = Path(__file__).parent
_HEAD = ("theme.js",)
_BODY = (
    "tabulator/tabulator.min.js",
    "page.js",
    "tables.js",
    "charts.js",
    "codes.js",
    "details.js",
)
_STYLES = ("tabulator/tabulator_simple.min.css", "page.css", "tables.css", "print.css")
_PAGE_COLOURS = {
    style.INK: "--ink",
    style.LINE: "--line",
    style.BAND: "--band",
    style.SHIPPED: "--shipped",
    style.FIXED: "--fixed",
}


def render(**words: Any) -> str:
    """The page's text from the variables of `report.html.j2`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    environment.filters["inline_svg"] = inline_svg
    environment.filters["glue"] = glue
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    head, body = (tuple(map(_asset, names)) for names in (_HEAD, _BODY))
    return environment.get_template("report.html.j2").render(
        **words,
        head_scripts=[Markup(text) for text in head],
        body_scripts=[Markup(text) for text in body],
        styles=Markup("\n".join(map(_asset, _STYLES))),
        script_hashes=Markup(" ".join(_hash(text) for text in (*head, *body))),
    )


@cache
def _asset(name: str) -> str:
    """A script or a style sheet, without the name of a source map, which is not there."""
    text = (_HERE / "assets" / name).read_text(encoding="utf-8")
    return re.sub(r"\s*(?://|/\*)# sourceMappingURL=\S+?(?: ?\*/)?\s*$", "", text).strip() + "\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def glue(words: str) -> str:
    """No line break inside '3.68 × 10⁻³', '−0.85 … −0.62' or '4.4 %'."""
    return words.replace(" … ", "\u00a0…\u00a0").replace(" × 10", "\u00a0×\u00a010").replace(" %", "\u00a0%")


def inline_svg(figure: Figure) -> Markup:
    """The figure's SVG to stand inside a page: ids unique in the page, ink and lines in the page's own colours."""
    body = figure.svg[figure.svg.index("<svg") :]
    prefix = re.sub(r"[^A-Za-z0-9]+", "-", figure.name)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(xlink:href|href)="#', rf'\1="#{prefix}-', body)
    body = body.replace("url(#", f"url(#{prefix}-")
    for colour, name in _PAGE_COLOURS.items():
        body = body.replace(colour.lower(), f"var({name})")
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    opening = re.search(r'viewBox="[^"]+"', body[: body.index(">")])
    assert opening is not None
    head = f'<svg {opening[0]} role="img" aria-label="{escape(figure.alt)}" xmlns="http://www.w3.org/2000/svg"'
    head += ' xmlns:xlink="http://www.w3.org/1999/xlink">'
    return Markup(head + body[body.index(">") + 1 :])
