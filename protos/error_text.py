"""Parts of messages: the name that was probably meant, and texts that are safe and short enough to show."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tandem.protos.secret_values import masked


def nearest(word: str, known: Iterable[str], above: float = 0.5) -> str:
    """The known name most similar to `word` (more than `above`, 0 to 1), or the one whose initials it is, else ""."""
    word = word[:200]
    best, likeness = "", above
    for candidate in known:
        if word and word == "".join(part[:1] for part in candidate.split("_")):
            return candidate
        ratio = difflib.SequenceMatcher(None, word.lower(), candidate.lower()).ratio()
        if ratio > likeness:
            best, likeness = candidate, ratio
    return best


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Ends a message about an unknown name with the nearest known name, or with all known names."""
    known = list(known)
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else f"; there are {', '.join(map(printable, known)) or 'none'}"


def printable(name: str) -> str:
    """A user's name on one line, cut to 80 characters."""
    return name if name.isprintable() and len(name) <= 80 else f"{name[:80]!r}"


def escaped(text: str, kept: str = "") -> str:
    r"""Text from elsewhere for a terminal or a log: control characters, which a terminal obeys, become escape sequences
    of Python. Those in `kept` stay.

    Example:
        >>> print(escaped("\x1b[2J and a\nb"))
        \x1b[2J and a\nb
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in kept else one.encode("unicode_escape").decode() for one in text)


def shown(value: object, key: str = "") -> str:
    """The `repr` of a key's value without secrets, cut to 80 characters."""
    try:
        return f"{masked(value, key)!r:.80}"
    except RecursionError:
        return f"a {type(value).__name__} too deep to show"
    except ValueError:
        return f"{type(value).__name__} of too many digits"
