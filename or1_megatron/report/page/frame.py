"""The frame of all HTML pages of this package: one file with one look that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import PurePosixPath
from string import Template

_WEB = files("or1_megatron.report.page") / "web"


def asset(name: str) -> str:
    """Return the text of a file of ``web/``; one of ``vendor/`` begins with its license, as a comment."""
    text = (_WEB / name).read_text(encoding="utf-8")
    if not name.startswith("vendor/"):
        return text
    license_text = (_WEB / str(PurePosixPath(name).with_name("LICENSE"))).read_text(encoding="utf-8")
    return f"/*!\n{license_text}\n*/\n{text}"


def html_page(title: str, body: str, *, styles: Sequence[str] = (), scripts: Sequence[str] = (), late: str = "") -> str:
    """Return the whole page.

    Args:
        title: plain text.
        body: HTML.
        styles, scripts: files of ``web/`` beside the common look. Scripts share one scope and follow the body.
        late: HTML at the end, which the first paint does not need.
    """
    style = "\n".join(asset(name) for name in ("look.css", *styles))
    script = "\n".join(asset(name) for name in scripts)
    code = f'<script>\n(() => {{\n"use strict";\n{script}\n}})();\n</script>\n' if scripts else ""
    return Template(asset("frame.html")).substitute(title=escape(title), style=style, body=body, code=code, late=late)
