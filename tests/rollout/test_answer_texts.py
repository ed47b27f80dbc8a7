"""Texts of answers: short ones that are equal are decoded once."""

from __future__ import annotations

from tandem.rollout.answer_texts import SHORT, AnswerTexts


class Digits:
    """A tokenizer that notes what it decodes."""

    def __init__(self) -> None:
        self.decoded: list[list[int]] = []

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        self.decoded.append(token_ids)
        return "".join(map(str, token_ids))


def test_equal_short_answers_are_decoded_once_and_long_ones_each_time() -> None:
    tokenizer = Digits()
    texts = AnswerTexts(tokenizer)
    assert [texts.of(ids) for ids in ([1, 2], [1, 2], [1], [], [1, 2])] == ["12", "12", "1", "", "12"]
    assert tokenizer.decoded == [[1, 2], [1], []]
    for _ in range(2):
        assert texts.of([3] * (SHORT + 1)) == "3" * (SHORT + 1)
    assert len(tokenizer.decoded) == 5
