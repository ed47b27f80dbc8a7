"""Language consistency: the share of an answer that is written in the scripts of a language."""

from __future__ import annotations

import re
import unicodedata
from functools import cached_property
from typing import Literal, Self

from pydantic import model_validator

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer

_LANGUAGES = {
    "Arabic": "ar fa ps ur",
    "Cyrillic": "be bg kk ky mk mn ru tg uk",
    "Cyrillic Latin": "az sr uz",
    "Devanagari": "hi mr ne sa",
    "Han Bopomofo": "zh",
    "Han Hiragana Katakana": "ja",
    "Hangul Han": "ko",
    "Latin": "af ca cs cy da de en es et eu fi fil fr ga gl hr hu id is it lt "
    "lv ms mt nl no pl pt ro sk sl sq sv sw tr vi",
    **dict(Armenian="hy", Bengali="bn", Ethiopic="am", Georgian="ka", Greek="el", Gujarati="gu", Gurmukhi="pa"),
    **dict(Hebrew="he", Kannada="kn", Khmer="km", Lao="lo", Malayalam="ml", Myanmar="my", Sinhala="si"),
    **dict(Tamil="ta", Telugu="te", Thai="th"),
}
SCRIPTS: dict[str, frozenset[str]] = {
    code: frozenset(scripts.split()) for scripts, codes in _LANGUAGES.items() for code in codes.split()
}
"""Scripts of a language by its code (ISO 639)."""

# A character's script is the first word of its Unicode name; these names say it otherwise.
_RENAMED = dict(CJK="Han", IDEOGRAPHIC="Han", FEMININE="Latin", MASCULINE="Latin") | {"KATAKANA-HIRAGANA": "Katakana"}
# Letters of formulas and units, whatever the language.
_SYMBOLS = {"MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER", "MICRO", "OHM", "KELVIN", "ANGSTROM", "PLANCK"}
_WIDTHS = ("FULLWIDTH ", "HALFWIDTH ")
_UNSPACED = frozenset({"Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar"})
_NEUTRAL = "neutral"

_OPENERS = re.compile(r"\$\$|\$|\\\(|\\\[|```|`")
_CLOSERS = {"$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]", "```": "```", "`": "`"}
_ONE_LINE = frozenset({"$", "`"})
_WORD = re.compile("[wo]+|[WO]")  # of the codes below
_NO_LETTER = {_NEUTRAL: "", "": " "}
_MOST_CODES = 1 << 16


class _Codes(dict[int, str]):
    """For `str.translate`. A letter in the wanted scripts becomes w, another one o; in upper case if it is a word by
    itself. Marks and joiners of the letter before vanish, all else becomes a space.
    """

    def __init__(self, wanted: frozenset[str]) -> None:
        self._wanted = wanted

    def __missing__(self, point: int) -> str:
        script = script_of(chr(point))
        code = _NO_LETTER.get(script, "w" if script in self._wanted else "o")
        code = code.upper() if script in _UNSPACED else code
        if len(self) < _MOST_CODES:
            self[point] = code
        return code


class LanguageConsistency(Scorer):
    """The share of the answer's words that are in the scripts of `language`, from 0 to 1; 0 without words.

    The language consistency reward of DeepSeek-R1 (arXiv:2501.12948: the proportion of words in the target language),
    decided by script: it tells English from Chinese, but not from German. A word counts if all its letters are in the
    scripts. In scripts that are written without spaces every letter is a word. Formulas and code are ignored, since
    they are Latin in every language. The ground truth is not used.

    Example:
        >>> LanguageConsistency(language="ru").judge(ScoreItem("", "Ответ: the answer $x$ верен", None))
        Scored(value=0.5, breakdown={})
    """

    ISOLATION = "in_process"

    language: str = "en"
    """Code of the language (ISO 639): en, zh, ja, ru, …"""
    scripts: tuple[str, ...] = ()
    """Names of scripts, in place of those of `language`, e.g. `["Latin", "Han"]`."""
    unit: Literal["words", "letters"] = "words"
    """What is counted. By words, a Latin word of ten letters counts like one Chinese character; by letters, as ten."""
    ignore_formulas: bool = True
    r"""Ignore text between `$`, `$$`, `\(` and `\)`, `\[` and `\]`, or backticks."""

    @model_validator(mode="after")
    def _scripts_are_known(self) -> Self:
        known = sorted(frozenset().union(*SCRIPTS.values()))
        if unknown := [script for script in self.scripts if script not in known]:
            raise ValueError(f"scripts: {unknown[0]!r} is unknown; there are {', '.join(known)}")
        if not self.scripts and self.language not in SCRIPTS:
            codes = ", ".join(sorted(SCRIPTS))
            raise ValueError(f"language {self.language!r} is unknown; there are {codes}, or give scripts")
        return self

    @cached_property
    def _codes(self) -> _Codes:
        return _Codes(frozenset(self.scripts) or SCRIPTS[self.language])

    def judge(self, item: ScoreItem) -> Score:
        text = without_formulas(item.solution) if self.ignore_formulas else item.solution
        words = _WORD.findall(text.translate(self._codes))
        pure = [word for word in words if "o" not in word.lower()]
        every, good = (words, pure) if self.unit == "words" else ("".join(words), "".join(pure))
        return Scored(len(good) / len(every) if every else 0.0)


def script_of(character: str) -> str:
    """Script of a letter; "" for what is no letter; neutral for marks and joiners of the letter before."""
    category = unicodedata.category(character)
    if category[0] == "M" or category == "Cf":
        return _NEUTRAL
    if not character.isalpha():
        return ""
    name = unicodedata.name(character, "")
    for width in _WIDTHS:
        name = name.removeprefix(width)
    first = name.partition(" ")[0]
    if first in _SYMBOLS:
        return ""
    if first == "MODIFIER":
        return _NEUTRAL
    return _RENAMED.get(first, first.capitalize() or "Unknown")


def without_formulas(text: str) -> str:
    """The text without what stands between `$`, `$$`, `\\(` `\\)`, `\\[` `\\]` or backticks, in one walk.

    A sign without its partner stays, and is not looked for again.
    """
    pieces, position, unclosed = [], 0, set[str]()
    while (opener := _OPENERS.search(text, position)) is not None:
        sign = opener[0]
        end = -1 if sign in unclosed else text.find(_CLOSERS[sign], opener.end())
        if end < 0:
            unclosed.add(sign)
        if end < 0 or (sign in _ONE_LINE and text.find("\n", opener.end(), end) >= 0):
            pieces.append(text[position : opener.end()])
            position = opener.end()
            continue
        pieces += [text[position : opener.start()], " "]
        position = end + len(_CLOSERS[sign])
    return "".join([*pieces, text[position:]])
