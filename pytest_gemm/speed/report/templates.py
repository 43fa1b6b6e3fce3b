"""The templates of the reports."""

from __future__ import annotations

from pytest_gemm.core.text import escaped, ratio_text
from pytest_gemm.speed.report import units


def render(template: str, package: str = "pytest_gemm.speed.report", **values: object) -> str:
    """A template with its values; what goes into an HTML page is escaped.

    Args:
        template: its file.
        package: that has it; it may include the templates of this one.
        values: that it names.
    """
    import jinja2  # late: a run without a report does without it

    is_page = template.endswith(".html.jinja")
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package), jinja2.PackageLoader("pytest_gemm.speed.report")]),
        autoescape=is_page,
        trim_blocks=is_page,
        lstrip_blocks=not is_page,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
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
    return environment.get_template(template).render(values)
