"""The process of a reward model, started by `model_batcher`. Only this module of `reward` imports torch.

Messages are lines of JSON, never pickle. The set-up comes first and is answered with `{"ready": …}` or `{"error": …}`;
then come chunks of questions. For each the process reports the questions it works on (`working`, so that the parent
knows the suspects if it hangs or dies), their scores or why there are none, and `done`. Before each forward pass but
the first it sends `next` and gets `{"continue": …}`; if that is false, the rest of the chunk gets no scores.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.reward.sandbox.inside import kernel

_NO_LIMIT = 10**6  # tokenizers without a limit report a number far above this

Encoded = dict[str, list[int]]


class SetupError(Exception):
    """The model cannot be used; the message says why."""


class RefusedError(Exception):
    """The model cannot score one question. Arguments: reason, detail."""


def main(descriptor: int, parent: int) -> None:
    """Serves the socket `descriptor` until it closes, or the thread of process `parent` that started this one ends."""
    kernel.prctl(kernel.SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent died before the line above
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    try:
        with socket.socket(fileno=descriptor) as channel:
            serve(channel)
    except BaseException:  # a bug or a broken device; torch would take seconds to shut down while the parent waits
        traceback.print_exc()
        os._exit(1)


def serve(channel: socket.socket) -> None:
    lines = channel.makefile("r", encoding="utf-8", newline="\n")

    def say(message: Mapping[str, object]) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    try:
        classifier = Classifier(json.loads(lines.readline()))
    except SetupError as error:
        say({"error": str(error)})
        return
    say({"ready": True})
    for line in lines:
        for message in classifier.answer(json.loads(line)["questions"]):
            say(message)
            if "next" in message and not json.loads(lines.readline() or '{"continue": false}')["continue"]:
                break
        say({"done": True})


class Classifier:
    """A sequence classifier of a local folder, with its tokenizer. Raises SetupError if one cannot be used."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        import torch

        torch.set_num_threads(setup["num_threads"])
        self._label: int = setup["label"]
        self._activation: str = setup["activation"]
        self._budget: int = setup["max_batch_tokens"]
        self._truncate: bool = setup["truncate"]
        try:
            self._device = torch.device(_best_device() if setup["device"] == "auto" else setup["device"])
            self._load(Path(setup["path"]), setup["dtype"])
            self._model.to(self._device)
        except SetupError:
            raise
        except Exception as error:  # libraries raise anything here, even Exception itself
            raise SetupError(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}") from error
        self._prepare_padding()
        self._max_length = setup["max_length"] or self._own_max_length()

    def _load(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        local: dict[str, object] = {"local_files_only": True, "trust_remote_code": False}
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **local)
        self._model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **local
        )
        self._model.eval()
        if missing := sorted(info["missing_keys"]):
            # transformers initialises them randomly and only warns: rewards would be random.
            raise SetupError(f"the folder has no weights for {', '.join(missing[:3])}; it holds no sequence classifier")
        if info["mismatched_keys"]:
            raise SetupError(f"weights have other shapes than config.json says: {sorted(info['mismatched_keys'])[:3]}")
        if self._label >= self._model.config.num_labels:
            labels = f"{self._model.config.num_labels} labels"
            raise SetupError(f"label {self._label} is not there: the model has {labels}, the first is 0")

    def _prepare_padding(self) -> None:
        """Makes tokenizer and model agree on the padding token: decoders find the last token of a row by it."""
        config, tokenizer = self._model.config, self._tokenizer
        if tokenizer.pad_token_id is None:
            own = getattr(config, "pad_token_id", None)
            stand_in = own if own is not None else tokenizer.eos_token_id
            if stand_in is None:
                raise SetupError("the tokenizer has neither a padding token nor an end token, so rows cannot be padded")
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(stand_in)
        config.pad_token_id = tokenizer.pad_token_id
        tokenizer.padding_side = "right"
        tokenizer.truncation_side = "left"

    def _own_max_length(self) -> int:
        lengths = [getattr(self._model.config, "max_position_embeddings", None), self._tokenizer.model_max_length]
        return min((int(length) for length in lengths if length and length < _NO_LIMIT), default=_NO_LIMIT)

    def answer(self, questions: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Messages about the questions: suspects, scores, refusals."""
        yield {"working": [question["id"] for question in questions]}
        rows: list[tuple[int, Encoded]] = []
        for question in questions:
            try:
                rows.append((question["id"], self._encode(question)))
            except RefusedError as refusal:
                yield {"refused": [[question["id"], *refusal.args]]}
        for number, batch in enumerate(batches(rows, self._budget)):
            if number:
                yield {"next": True}
            yield from self._score(batch)

    def _encode(self, question: Mapping[str, Any]) -> Encoded:
        tokenizer, prompt, answer = self._tokenizer, question["prompt"], question["answer"]
        cut: dict[str, Any] = {"truncation": True, "max_length": self._max_length} if self._truncate else {}
        try:
            if prompt is None:
                encoded = tokenizer(answer, **cut)
            elif tokenizer.chat_template:
                turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                turns = [*turns, {"role": "assistant", "content": answer}]
                text = tokenizer.apply_chat_template(turns, tokenize=False)
                encoded = tokenizer(text, add_special_tokens=False, **cut)  # the template wrote the special tokens
            else:
                text = (
                    prompt if isinstance(prompt, str) else "\n\n".join(f"{t['role']}: {t['content']}" for t in prompt)
                )
                encoded = tokenizer(text, answer, **({**cut, "truncation": "only_first"} if cut else {}))
        except Exception as error:  # a template may raise anything for a conversation that it rejects
            words = " ".join(str(error).split())[:200]
            raise RefusedError("invalid_input", f"the model's tokenizer refuses it: {words}") from error
        length = len(encoded["input_ids"])
        if length == 0:
            raise RefusedError("invalid_input", "prompt and answer have no tokens in the model's vocabulary")
        if length > self._max_length:
            raise RefusedError("limit", f"{length} tokens are more than the {self._max_length} that the model takes")
        names = self._tokenizer.model_input_names
        return {name: list(encoded[name]) for name in names if name in encoded and name != "attention_mask"}

    def _score(self, batch: Sequence[tuple[int, Encoded]]) -> Iterator[dict[str, object]]:
        import torch

        numbers = [number for number, _ in batch]
        yield {"working": numbers}
        try:
            values = self._forward([encoded for _, encoded in batch])
        except torch.OutOfMemoryError:
            values = []
        if values:
            scores = list(zip(numbers, values, strict=True))
            yield {"scores": [pair for pair in scores if math.isfinite(pair[1])]}
            wrong = [(number, value) for number, value in scores if not math.isfinite(value)]
            yield {"refused": [[number, "crashed", f"the model's score is {value}"] for number, value in wrong]}
            return
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if len(batch) == 1:
            yield {"refused": [[numbers[0], "limit", f"the device lacks the memory for {_length(batch[0])} tokens"]]}
            return
        for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
            yield from self._score(half)

    def _forward(self, rows: Sequence[Encoded]) -> list[float]:
        import torch

        padded = self._tokenizer.pad(list(rows), padding="longest", return_tensors="pt").to(self._device)
        with torch.inference_mode():
            logits_BL = self._model(**padded).logits.float()  # B rows, L labels
        if self._activation == "sigmoid":
            logits_BL = logits_BL.sigmoid()
        elif self._activation == "softmax":
            logits_BL = logits_BL.softmax(-1)
        return list(logits_BL[:, self._label].tolist())


def batches(rows: Sequence[tuple[int, Encoded]], budget: int) -> Iterator[list[tuple[int, Encoded]]]:
    """Groups rows, the longest first, so that rows × longest stays within the budget; a row above it is alone."""
    batch: list[tuple[int, Encoded]] = []
    for row in sorted(rows, key=_length, reverse=True):
        if batch and (len(batch) + 1) * _length(batch[0]) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _length(row: tuple[int, Encoded]) -> int:
    return len(row[1]["input_ids"])


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
