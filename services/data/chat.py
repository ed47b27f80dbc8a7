"""Converts chat messages to token ids with the model's tokenizer and chat template.

`transformers.AutoTokenizer` imports torch (4–6 s of processor time, 350 MB), which would slow the start of trainer and
samplers. For the Qwen families its choice of class is known, and that class imports in under a second without torch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import numpy as np
from numpy.typing import NDArray

from tandem.protos.contracts import JsonObject
from tandem.protos.errors import ModelError
from tandem.rollout.environments.tools.parsers import TurnPiece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QWEN_TYPES = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
_ANSWER = "The answer whose tokens are known."
_REPLY = "What a tool answers."
_QWEN_TOKENIZERS = frozenset({"Qwen2Tokenizer", "Qwen2TokenizerFast"})


class RefusedPromptError(Exception):
    """The chat template or the tokenizer rejects these messages; it may accept others."""


class ChatEncoder:
    """Tokenises chat messages up to the start of the answer. Raises ModelError for a broken tokenizer or template.

    The template shows the policy `tools`, in OpenAI's form.
    """

    def __init__(self, model_path: str, chat_template: str = "", tools: Sequence[JsonObject] = ()) -> None:
        self.model_path = model_path
        self.tools = tools
        self._tokenizer = load_tokenizer(model_path)
        self._own_tokens = self._tokenizer.added_tokens_decoder
        self.template_source = chat_template or f"model.path {model_path} (its tokenizer's chat template)"
        if chat_template:
            self._tokenizer.chat_template = read_template(chat_template)
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"model {model_path} has no chat template; set model.chat_template to a file with a Jinja template"
            )
        try:
            self.encode([{"role": "user", "content": "?"}])
        except RefusedPromptError as refusal:
            error = refusal.__cause__  # other errors may concern only this conversation, e.g. without a system message
            if isinstance(error, jinja2.TemplateSyntaxError):
                fault = f"{self.template_source}, line {error.lineno}: {error.message}"
                raise ModelError(f"{fault}; mend the template") from None

    def with_tools(self, tools: Sequence[JsonObject]) -> ChatEncoder:
        """This encoder with other tools."""
        other = copy.copy(self)
        other.tools = tools
        return other

    def encode(self, messages: Sequence[Mapping[str, object]]) -> NDArray[np.int32]:
        """Token ids up to the start of the answer, (T,) int32. Raises RefusedPromptError if the template refuses."""
        return self._ids(self._text(messages))

    def encode_reply(self, messages: Sequence[Mapping[str, object]], last_token: int) -> NDArray[np.int32]:
        """Token ids (T,) int32 from the end of an answer, whose last token is given, over messages that follow it, up
        to the start of the next answer.

        The answer itself is not encoded again: its tokens stay as they were sampled. If its last token is the one with
        which the template ends an answer, the ids begin after it. Raises RefusedPromptError if the template refuses,
        ModelError if it cannot continue a conversation because it leaves out or changes earlier answers.
        """
        answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        _, answer, text = self._text([*answered, *messages]).partition(_ANSWER)
        if not answer:
            raise self._rewrites()
        ids = self._ids(text)
        return ids[1:] if len(ids) and ids[0] == last_token else ids

    def encode_increment(
        self, messages: Sequence[Mapping[str, object]], ids: NDArray[np.int32]
    ) -> NDArray[np.int32] | None:
        """Token ids (T,) int32 of what follows the text of `ids` (T,) in the rendering of a conversation, up to the
        start of the next answer; None if the rendering does not begin with that text.

        White space is no difference: templates trim messages and format calls anew. Nor is what the tokenizer changes,
        such as the form of accents. Raises RefusedPromptError.
        """
        known, rendered = self._decoded(ids), self._text(messages)
        end = _end_of_text(known, rendered)
        if end is None:
            known, rendered = (self._decoded(self._ids(text)) for text in (known, rendered))
            end = _end_of_text(known, rendered)
        if end is None:
            return None
        rest = rendered[end:]
        return self._ids(rest.lstrip() if known[-1:].isspace() else rest)

    def check_replies(self, *, may_rewrite: bool = False) -> None:
        """Raises ModelError if the template cannot continue a conversation, with tools also if it does not show all of
        them or their answers. Unless it `may_rewrite` earlier answers, it must keep an answer as it is.
        """
        role = "tool" if self.tools else "user"
        answer = {"role": role, "content": _REPLY, **({"name": self._tool_names[0]} if self.tools else {})}
        try:
            text = self._text([{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}, answer])
        except RefusedPromptError as refusal:
            refused = "the messages of tools" if self.tools else "a conversation of several turns"
            raise ModelError(f"{self.template_source} refuses {refused}: {refusal}") from None
        if text.count(_ANSWER) != 1 and not may_rewrite:
            raise self._rewrites()
        if self.tools and (hidden := [name for name in self._tool_names if name not in text.partition(_ANSWER)[0]]):
            fault = f"{self.template_source} does not show the policy the tool {hidden[0]}"
            raise ModelError(f"{fault}; set model.chat_template to one that shows `tools`")
        if self.tools and _REPLY not in text:
            raise ModelError(f"{self.template_source} leaves out the answers of tools; set model.chat_template")

    def _rewrites(self) -> ModelError:
        fault = f"{self.template_source} leaves out or repeats earlier answers, so no episode can continue"
        remedy = 'set model.chat_template to one that keeps them, or environment.rewritten_history = "fork"'
        return ModelError(f"{fault}; {remedy}")

    @property
    def chat_template(self) -> str:
        """The template's text."""
        return str(self._tokenizer.chat_template)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def num_tokens(self) -> int:
        """Of the tokenizer's vocabulary."""
        return len(self._tokenizer)

    @property
    def own_tokens(self) -> frozenset[str]:
        """The texts that are one token each whatever is around them, such as the end of a message."""
        return frozenset(token.content for token in self._own_tokens.values())

    def turn_pieces(self, ids: NDArray[np.int32]) -> list[TurnPiece]:
        """A turn of the policy with token ids (T,): its texts, and its `own_tokens` apart."""
        pieces: list[TurnPiece] = []
        for is_own, run in groupby(ids.tolist(), self._own_tokens.__contains__):
            if is_own:
                tokens = (self._own_tokens[one] for one in run)
                pieces += [TurnPiece(token.content, is_token=True, is_special=token.special) for token in tokens]
            else:
                pieces.append(TurnPiece(self._decoded(list(run))))
        return pieces

    @property
    def _tool_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    def _text(self, messages: Sequence[Mapping[str, object]]) -> str:
        try:
            chat = [dict(message) for message in messages]
            tools = [dict(tool) for tool in self.tools] or None
            text = self._tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=False)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RefusedPromptError(" ".join(str(error).split()) or type(error).__name__) from error
        assert isinstance(text, str), "one conversation gives one text"
        return text

    def _decoded(self, ids: NDArray[np.int32] | list[int]) -> str:
        text = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "one sequence of tokens has one text"
        return text

    def _ids(self, text: str) -> NDArray[np.int32]:
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False)  # the template has added them
        except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
            raise RefusedPromptError(" ".join(str(error).split()) or type(error).__name__) from error
        return np.asarray(ids, np.int32)


def _end_of_text(known: str, text: str) -> int | None:
    """Where `known` ends in `text`, if that begins with it or differs only in white space; else None."""
    if text.startswith(known):
        return len(known)
    known = "".join(known.split())
    places = [*islice((place for place, one in enumerate(text) if not one.isspace()), len(known))]
    if "".join(text[place] for place in places) != known:
        return None
    return places[-1] + 1 if places else 0


def load_tokenizer(model_path: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model folder or hub name. Raises ModelError if it is missing or cannot be read."""
    folder = Path(model_path)
    if not folder.is_dir() and (
        folder.exists() or folder.is_absolute() or model_path.count("/") != 1 or model_path[0] in ".~"
    ):
        raise ModelError(
            f"model.path {model_path}: no such folder; name a Hugging Face model folder or a hub name like org/model"
        )
    try:
        if _is_qwen_tokenizer(folder):
            from transformers import Qwen2Tokenizer

            return Qwen2Tokenizer.from_pretrained(model_path)
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_path)
        return tokenizer
    except Exception as error:  # the tokenizers library raises bare Exceptions for a file it cannot parse
        reason = " ".join(str(error).split())
        fault = f"model.path {model_path}: its tokenizer cannot be loaded ({type(error).__name__}: {reason[:300]})"
        raise ModelError(f"{fault}; the folder must hold tokenizer.json or what AutoTokenizer needs") from error


def _is_qwen_tokenizer(folder: Path) -> bool:
    """Whether AutoTokenizer would choose `Qwen2Tokenizer`: always for type qwen2, else if the folder names it."""
    configs = folder / "config.json", folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file() or not all(config.is_file() for config in configs):
        return False
    model, tokenizer = (json.loads(config.read_text(encoding="utf-8")) for config in configs)
    if "auto_map" in tokenizer or model.get("model_type") not in _QWEN_TYPES:
        return False
    return model["model_type"] == "qwen2" or tokenizer.get("tokenizer_class") in _QWEN_TOKENIZERS


def read_template(file: str) -> str:
    """The chat template in a file. Raises ModelError if it cannot be read or parsed."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
        return text
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(
            f"model.chat_template {file} cannot be read ({reason}); name a text file with a Jinja template"
        ) from None
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"model.chat_template {file}, line {error.lineno}: {error.message}; mend the template"
        ) from None
