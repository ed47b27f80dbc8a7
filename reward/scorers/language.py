"""Language consistency: the share of an answer that is written in the scripts of a language."""

from __future__ import annotations

import re
import unicodedata
from functools import cached_property, lru_cache
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
_ASCII_WORD = re.compile(r"[A-Za-z]+")


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
    def _wanted(self) -> frozenset[str]:
        return frozenset(self.scripts) or SCRIPTS[self.language]

    def judge(self, item: ScoreItem) -> Score:
        text = without_formulas(item.solution) if self.ignore_formulas else item.solution
        good = every = 0
        for token in text.split():
            found, wanted = self._counted_ascii(token) if token.isascii() else self._counted(token)
            every += found
            good += wanted
        return Scored(good / every if every else 0.0)

    def _counted_ascii(self, token: str) -> tuple[int, int]:
        words = _ASCII_WORD.findall(token)
        found = len(words) if self.unit == "words" else sum(map(len, words))
        return found, found if "Latin" in self._wanted else 0

    def _counted(self, token: str) -> tuple[int, int]:
        """Words (or letters) of a text without white space, and how many of them are in the wanted scripts."""
        by_words = self.unit == "words"
        found = good = letters = 0
        pure = True  # the word so far has no letter of another script
        for character in [*token, " "]:
            script = script_of(character)
            if script == _NEUTRAL:
                continue
            if script and script not in _UNSPACED:
                letters += 1
                pure = pure and script in self._wanted
                continue
            if letters:
                weight = 1 if by_words else letters
                found += weight
                good += weight if pure else 0
                letters, pure = 0, True
            if script:
                found += 1
                good += script in self._wanted
        return found, good


@lru_cache(maxsize=1 << 16)
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
