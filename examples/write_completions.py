"""Writes nine completions, two of them malformed, for trying the reward service:
`python examples/write_completions.py OUTPUT.jsonl`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def completion(data_source: str, solution: Any, ground_truth: Any) -> dict[str, Any]:
    """A row in verl's columns with its completion."""
    reward_model = {"style": "rule", "ground_truth": ground_truth}
    return {"data_source": data_source, "solution": solution, "reward_model": reward_model, "extra_info": {}}


ROWS = [
    completion("openai/gsm8k", "<think>48 / 2 = 24 and 48 + 24 = 72.</think>\n<answer>72</answer>", "72"),
    completion("openai/gsm8k", "<think>48 - 2 = 46.</think>\n<answer>46</answer>", "72"),
    completion("openai/gsm8k", "She sold 72 clips.", "72"),
    completion("openai/gsm8k", f"<think>{'Let me think again. ' * 20}</think>\n<answer>72</answer>", "72"),
    completion("lighteval/MATH", "<think>One of two equal parts.</think>\n<answer>$\\frac{1}{2}$</answer>", "0.5"),
    completion("lighteval/MATH", "<think>Both ends count.</think>\n<answer>$[0, 1]$</answer>", "(0,1)"),
    completion("searchR1_nq", "<think>In 1901.</think>\n<answer>Wilhelm Röntgen</answer>", ["Wilhelm Conrad Röntgen"]),
    completion("openai/gsm8k", "<think>?</think>\n<answer>72</answer>", None),
    completion("openai/gsm8k", 72, "72"),
]


def main(output: Path) -> int:
    """Writes the rows as JSON lines; returns the exit code."""
    output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    print(f"{output}: {len(ROWS)} rows")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1])))
