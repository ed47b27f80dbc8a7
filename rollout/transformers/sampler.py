"""A transformers model as a sampler: one thread steps all running rows together."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
import transformers

from tandem.protos.errors import DataError, ModelError, UnavailableError, WeightTransferError
from tandem.protos.manifest import ITEM_BYTES
from tandem.protos.types import SamplingParameters
from tandem.rollout.base_weights import local_folder
from tandem.rollout.engine import SamplerArguments, check_cache, check_memory, check_model_folder, one_line
from tandem.rollout.sampler import NO_VERSION, Completion, Sampler, SamplingRequest, TransferProgress, is_received
from tandem.rollout.transformers.batch import Batch, LanguageModel, Row
from tandem.rollout.weight_receiver import StagedReceiver

_ENGINE_BYTES = 500 << 20  # memory of torch and transformers without weights and KV cache
_ANSWER_SECONDS = 120.0  # a thread that makes no step for this long hangs
_CLOSE_SECONDS = 10.0
_PROMPT_TOKENS_AT_ONCE = 4096  # per forward pass, padding included, unless one prompt is longer
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False)
class _Call(Generic[T]):
    function: Callable[[], T]
    future: Future[T] = field(default_factory=Future)

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.function())
            except Exception as error:
                self.future.set_exception(WeightTransferError(f"weights could not be applied: {one_line(error)}"))
                raise


class TransformersSampler(Sampler):
    """A sampler whose thread owns the model.

    The thread takes rows and calls from an inbox between two steps, so weights and version change together.
    """

    def __init__(self, arguments: SamplerArguments) -> None:
        if arguments.config.num_threads != "auto":
            torch.set_num_threads(arguments.config.num_threads)
        model, tokenizer = _load(arguments)
        language_model = LanguageModel(model, tokenizer)
        super().__init__(
            tokenizer,
            max_model_tokens=arguments.max_model_tokens,
            seed=arguments.seed,
            group_store=arguments.group_store,
        )
        self._parameters = dict(model.named_parameters())
        self._on_gpu = model.device.type == "cuda"
        tied = bool(model.config.get_text_config().tie_word_embeddings)
        self._receiver = StagedReceiver(
            model.device,
            0,
            {name: tuple(parameter.shape) for name, parameter in self._parameters.items()},
            frozenset({"lm_head.weight"}) if tied else frozenset(),
            local_folder(arguments.model_path),
        )
        self._num_token_ids = model.get_input_embeddings().num_embeddings
        bytes_per_sequence = _bytes_per_sequence(model, arguments)
        check_cache(arguments, bytes_per_sequence)
        self._max_rows = arguments.config.kv_cache_bytes // bytes_per_sequence
        self._stamp = NO_VERSION
        self._waiting: deque[Row] = deque()
        self._batches: list[Batch] = []
        self._inbox: queue.SimpleQueue[Row | _Call[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards `_ended`, after which nothing enters the inbox
        self._ended = ""
        self._thread = threading.Thread(target=self._run, args=(language_model,), daemon=True)
        self._thread.start()

    @property
    def is_dead(self) -> bool:
        return not self._thread.is_alive()

    async def check(self) -> None:
        await self._call(lambda: None)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(_CLOSE_SECONDS)

    async def _generate(self, request: SamplingRequest) -> Completion:
        _check_sampling(request.sampling)
        if not 0 <= request.prompt_ids.min() <= request.prompt_ids.max() < self._num_token_ids:
            raise DataError(f"prompt cannot be sampled: the model knows the token ids 0 … {self._num_token_ids - 1}")
        row = Row(request)
        self._put(row)
        return await asyncio.wrap_future(row.future)

    async def _sampled_so_far(self, request_ids: Collection[str]) -> Mapping[str, Completion]:
        def completions() -> dict[str, Completion]:
            rows = [row for batch in self._batches for row in batch.rows if row.request.request_id in request_ids]
            return {row.request.request_id: row.completion() for row in rows if row.logprobs}

        return await self._call(completions)

    async def _start_transfer(self, kind: Literal["join", "receive"], arguments: Mapping[str, Any]) -> None:
        start = self._receiver.start_join if kind == "join" else self._receiver.start_receive
        start(**arguments)

    async def _transfer_progress(self, version: tuple[int, int] | None) -> tuple[Sequence[TransferProgress], float]:
        progress = [self._receiver.progress()]
        return progress, await self._apply(version) if version and is_received(progress) else 0.0

    async def _apply(self, version: tuple[int, int]) -> float:
        def apply() -> float:
            started = time.perf_counter()
            for name, tensor in self._receiver.take():
                if name in self._parameters:  # a head tied to the embedding may be sent too
                    self._parameters[name].copy_(tensor)
            if self._on_gpu:  # the trainer overwrites shared memory once this update is acknowledged
                torch.cuda.synchronize()
            self._stamp = version
            return time.perf_counter() - started

        return await self._call(apply)

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs the function in the thread, between two steps."""
        call = _Call(function)
        self._put(call)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call.future), _ANSWER_SECONDS)
        except TimeoutError as error:
            raise UnavailableError(f"the engine made no step within {_ANSWER_SECONDS:g} s") from error

    def _put(self, item: Row | _Call[T]) -> None:
        with self._lock:
            if self._ended:
                raise UnavailableError(self._ended)
            self._inbox.put(item)

    def _run(self, language_model: LanguageModel) -> None:
        ended = "the engine is closed"
        try:
            with torch.inference_mode():
                while self._read_inbox():
                    self._start_waiting(language_model)
                    for batch in self._batches:
                        batch.step(self._stamp)
                    self._hand_out()
        except Exception as error:
            _LOG.exception("the engine failed")
            ended = f"the engine failed: {one_line(error)}"
        with self._lock:
            self._ended = ended
        for batch in self._batches:
            self._waiting += batch.rows
        unanswered = [*self._waiting, *(self._inbox.get() for _ in range(self._inbox.qsize()))]
        for item in unanswered:
            if item is not None and item.future.set_running_or_notify_cancel():
                item.future.set_exception(UnavailableError(ended))

    def _read_inbox(self) -> bool:
        """Runs the calls and queues the rows that arrived. Waits if there is nothing to sample. False: closed."""
        while True:
            try:
                item = self._inbox.get(block=not self._batches and not self._waiting)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, _Call):
                item.run()
            else:
                self._waiting.append(item)

    def _start_waiting(self, language_model: LanguageModel) -> None:
        """Reads the prompts of as many waiting rows as fit the cache, and samples their first tokens."""
        room = self._max_rows - sum(len(batch.rows) for batch in self._batches)
        prompts: set[tuple[bytes, tuple[int, ...]]] = set()
        longest = 0
        rows: list[Row] = []
        while self._waiting and len(rows) < room:
            request = self._waiting[0].request
            prompts.add((request.prompt_ids.tobytes(), tuple(request.sampled_ids)))
            longest = max(longest, len(request.prompt_ids) + len(request.sampled_ids))
            if len(prompts) > 1 and len(prompts) * longest > _PROMPT_TOKENS_AT_ONCE:
                break
            row = self._waiting.popleft()
            if not row.future.cancelled():
                rows.append(row)
        if not rows:
            return
        try:
            self._batches.append(Batch(language_model, rows, self._stamp))
        except Exception:
            self._waiting.extendleft(reversed(rows))  # the engine ends, and tells those who wait for them
            raise
        self._hand_out()
        mergeable = [batch for batch in self._batches if batch.is_mergeable]
        for batch in mergeable[1:]:
            mergeable[0].merge(batch)
            self._batches.remove(batch)

    def _hand_out(self) -> None:
        """Completes the rows that have ended and drops those that were cancelled."""
        for row in [row for batch in self._batches for row in batch.remove_ended()]:
            if row.future.set_running_or_notify_cancel():
                row.future.set_result(row.completion())
        self._batches = [batch for batch in self._batches if batch.rows]


def _load(arguments: SamplerArguments) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    check_model_folder(arguments)
    check_memory(arguments, _ENGINE_BYTES)
    path = arguments.model_path
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, arguments.dtype))
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:  # errors of json, struct, safetensors … for a bad folder
        raise ModelError(f"model {path} cannot be sampled: {one_line(error)}") from error
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and arguments.max_model_tokens > longest:
        raise ModelError(
            f"model {path} cannot be sampled: its max_position_embeddings is {longest}, and prompt and answer may have "
            f"{arguments.max_model_tokens} tokens"
        )
    model.requires_grad_(False)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def _bytes_per_sequence(model: transformers.PreTrainedModel, arguments: SamplerArguments) -> int:
    config = model.config.get_text_config()
    query_heads = getattr(config, "num_attention_heads", None) or 1
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    bytes_per_token: int = 2 * config.num_hidden_layers * heads * head_size * ITEM_BYTES[arguments.dtype]
    return bytes_per_token * arguments.max_model_tokens


def _check_sampling(sampling: SamplingParameters) -> None:
    allowed = {
        "temperature": 0 <= sampling.temperature < math.inf,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= -1,
        "min_p": 0 <= sampling.min_p <= 1,
        "max_tokens": sampling.max_tokens >= 1,
        "repetition_penalty": 0 < sampling.repetition_penalty < math.inf,
    }
    for name, is_allowed in allowed.items():
        if not is_allowed:
            raise DataError(f"sampling parameters cannot be used: {name} is {getattr(sampling, name)}")
