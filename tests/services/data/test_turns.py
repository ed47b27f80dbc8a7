"""Token ids between two turns: what the chat template puts there, whatever the policy sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.protos.errors import ModelError
from tandem.services.data.chat import ChatEncoder, RefusedPromptError
from tests.support.tiny_model import CHAT_TEMPLATE, EOS_ID, build_tiny_model, character_tokenizer

OTHERS = {
    "mistral": "<|im_start|>{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}<|im_end|>"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}",
    "names": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: ",
    "without thoughts": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last %}{{ m['content'] }}"
    "{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}",
    "trimmed": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}",
}
FIRST = [{"role": "user", "content": "guess"}]
REPLY = [{"role": "user", "content": "higher"}, {"role": "user", "content": "go on"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def encoder_of(model: Path, folder: Path, template: str) -> ChatEncoder:
    (folder / "template.jinja").write_text(template)
    return ChatEncoder(str(model), str(folder / "template.jinja"))


def encoded(text: str) -> list[int]:
    return list(character_tokenizer().encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", ["chat", *OTHERS])
@pytest.mark.parametrize("said", ["7", "", "a b", "{{ 1 }}"])
def test_prompt_turn_and_reply_are_what_the_template_makes_of_the_conversation(
    model: Path, tmp_path: Path, name: str, said: str
) -> None:
    encoder = encoder_of(model, tmp_path, {"chat": CHAT_TEMPLATE, **OTHERS}[name])
    whole = encoder.encode([*FIRST, {"role": "assistant", "content": said}, *REPLY]).tolist()
    begun = [*encoder.encode(FIRST).tolist(), *encoded(said)]
    assert [*begun, *encoder.encode_reply(REPLY, begun[-1]).tolist()] == whole, "cut off, or ended by a stop string"
    if name != "names":  # which has no end token
        assert [*begun, EOS_ID, *encoder.encode_reply(REPLY, EOS_ID).tolist()] == whole


@pytest.mark.parametrize(("name", "said"), [("without thoughts", "<think>x</think>7"), ("trimmed", " 7 ")])
def test_the_tokens_of_a_turn_stay_although_the_template_would_change_them(
    model: Path, tmp_path: Path, name: str, said: str
) -> None:
    encoder = encoder_of(model, tmp_path, OTHERS[name])
    begun = [*encoder.encode(FIRST).tolist(), *encoded(said), EOS_ID]
    ids = [*begun, *encoder.encode_reply(REPLY, EOS_ID).tolist()]
    kept = character_tokenizer().decode(ids)
    assert f"assistant\n{said}<|im_end|>\n<|im_start|>user\nhigher<|im_end|>" in kept
    assert ids != encoder.encode([*FIRST, {"role": "assistant", "content": said}, *REPLY]).tolist()


@pytest.mark.parametrize(
    "template",
    ["{{ messages[-1]['content'] }}", "{% for m in messages + messages %}{{ m['content'] }}{% endfor %}"],
    ids=["last message only", "twice"],
)
def test_a_template_that_cannot_continue_a_conversation_is_refused(model: Path, tmp_path: Path, template: str) -> None:
    encoder = encoder_of(model, tmp_path, template)
    with pytest.raises(ModelError, match=r"template\.jinja leaves out or repeats earlier answers.*set model\."):
        encoder.check_replies()


def test_a_template_that_refuses_a_reply_says_so(model: Path, tmp_path: Path) -> None:
    refuses = "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    encoder = encoder_of(model, tmp_path, refuses + "{{ m['content'] }}{% endfor %}")
    encoder.check_replies()
    with pytest.raises(RefusedPromptError, match="no tools"):
        encoder.encode_reply([{"role": "tool", "content": "1"}], last_token=EOS_ID)
    once = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}{{ messages[0]['content'] }}"
    with pytest.raises(ModelError, match=r"template\.jinja refuses a conversation of several turns: one message"):
        encoder_of(model, tmp_path, once).check_replies()
