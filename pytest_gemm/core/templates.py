"""The templates of reports, pages and scripts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from pytest_gemm.core import units
from pytest_gemm.core.text import escaped, ratio_text

if TYPE_CHECKING:
    import jinja2

_FILTERS: Final[Mapping[str, Callable[..., object]]] = {
    "line": lambda text: " ".join(str(text).split()),
    "md": escaped,
    "percent": units.percent,
    "plural": units.plural,
    "rate": units.rate_text,
    "ratio_text": ratio_text,
    "seconds": units.seconds_text,
    "signed": units.signed,
    "three": units.three,
}


class Templates:
    """The templates of some packages.

    Args:
        packages: with a folder ``templates``; the first one that has a file is the one that counts.
        filters: that they use beside those for numbers and Markdown.
    """

    def __init__(self, *packages: str, **filters: Callable[..., object]) -> None:
        self._packages, self._filters = packages, filters

    @functools.cached_property
    def _environment(self) -> jinja2.Environment:
        import jinja2  # late: a run that shows nothing does without it

        made = jinja2.Environment(
            loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package) for package in self._packages]),
            autoescape=jinja2.select_autoescape(["html.jinja"]),
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        made.filters |= {**_FILTERS, **self._filters}
        return made

    def render(self, template: str, **values: object) -> str:
        """A template with the values that it names; what goes into an HTML page is escaped."""
        return self._environment.get_template(template).render(values)
