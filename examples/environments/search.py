"""A tool: search in a local corpus by BM25, for examples/recipes/search.toml. Needs `pip install bm25s`.

`TANDEM_SEARCH_CORPUS` names the corpus, a file of JSON lines; without it, examples/prepare_search.py's is read. A line
has `title` and `text`, or `contents` with both, as the corpora of Search-R1 do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import bm25s

from tandem import parallel_tool, tool_effect

CORPUS = Path(os.environ.get("TANDEM_SEARCH_CORPUS", "data/search/corpus.jsonl"))
NUM_RESULTS = 3
MAX_WORDS = 100
"""Longest result, in words."""


def passages(corpus: Path) -> list[str]:
    lines = [json.loads(line) for line in corpus.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [line["contents"] if "contents" in line else f"{line['title']}: {line['text']}" for line in lines]


# Calls are forked from the process that imports this file, so they share the index and need not load it.
PASSAGES = passages(CORPUS)
INDEX = bm25s.BM25()
INDEX.index(bm25s.tokenize(PASSAGES, show_progress=False), show_progress=False)


@parallel_tool
@tool_effect("pure")
def search(query: str) -> str:
    """Searches an encyclopedia and returns the passages that fit best.

    Args:
        query: Words that the passage should have, for example "capital France".
    """
    words = bm25s.tokenize(query, show_progress=False)
    found, scores = INDEX.retrieve(words, k=min(NUM_RESULTS, len(PASSAGES)), show_progress=False)
    fitting = [PASSAGES[number] for number, score in zip(found[0], scores[0], strict=True) if score > 0]
    if not fitting:
        return "no passage has these words"
    shown = (" ".join(passage.split()[:MAX_WORDS]) for passage in fitting)
    return "\n".join(f"({number}) {passage}" for number, passage in enumerate(shown, 1))
