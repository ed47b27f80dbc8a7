"""Writes the list of metrics in docs/metrics.md from `tandem.services.metrics.names`."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from tandem.rollout.environments.tools.outcomes import OTHER
from tandem.services.metrics.names import METRICS, Label, Metric

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
BEGIN = "<!-- python -m tandem.services.metrics.docs writes this list -->\n"
END = "<!-- end of the list -->\n"
_SERVICES = {"service": "all", "jobs": "`tandem reward serve`", "batch": "trainer", "evaluation": "trainer"}
_SERVICES |= {"ledger": "controller", "tools": "rollout"}


def listed() -> str:
    """The metrics as a list."""
    lines = (f"- `{one.name}` ({_services(one)}; {one.kind}): {one.help}{_labels(one)}" for one in METRICS)
    return "".join(map(_filled, lines))


def with_list(text: str) -> str:
    """The text with its list replaced by the current one."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{listed()}{END}{after}"


def _services(metric: Metric) -> str:
    return ", ".join(_SERVICES.get(source, source) for source in metric.source)


def _labels(metric: Metric) -> str:
    return "".join(f" Label `{label.name}`: {', '.join(_values(label))}." for label in metric.labels)


def _values(label: Label) -> list[str]:
    return [*label.values, *([label.of_run] if label.of_run else []), *([OTHER] if label.is_open else [])]


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def main(arguments: list[str]) -> int:
    """Writes the list, or with `--check` compares it with the file."""
    text = PAGE.read_text(encoding="utf-8")
    if arguments == ["--check"]:
        fresh = with_list(text) == text
        if not fresh:
            print(f"{PAGE.name} lists other metrics; run python -m tandem.services.metrics.docs", file=sys.stderr)
        return 0 if fresh else 1
    PAGE.write_text(with_list(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
