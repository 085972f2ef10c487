"""The page that shows a server at work; its script asks for the figures once a second."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files


def page() -> tuple[str, str]:
    """Return the page, and the Content-Security-Policy that lets nothing run or load but what is in it."""
    text = files("ag.serve").joinpath("page.html").read_text(encoding="utf-8")
    (style,), (script,) = (re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("style", "script"))
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    rules += ["frame-ancestors 'none'", f"style-src {_digest(style)}", f"script-src {_digest(script)}"]
    return text, "; ".join(rules)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
