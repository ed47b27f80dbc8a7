"""A vLLM AsyncLLM as a sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Literal

from tandem.protos.errors import DataError, EnvironmentLackError, TandemError, UnavailableError, WeightTransferError
from tandem.protos.types import FinishReason, SamplingParameters, VersionSpan
from tandem.rollout.engine import SamplerArguments, one_line
from tandem.rollout.sampler import NO_VERSION, Completion, Sampler, SamplingRequest, TransferProgress
from tandem.rollout.vllm.engine_folder import EngineFolder
from tandem.rollout.vllm.launch import start_vllm

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM

_SHUTDOWN_SECONDS = 3.0
_DEATH_POLL_SECONDS = 1.0
# An engine that makes no step for this long hangs. Its longest operation is applying weights.
_ANSWER_SECONDS = 120.0


async def start_sampler(arguments: SamplerArguments) -> Sampler:
    folder = EngineFolder()
    try:
        llm = start_vllm(arguments, folder)
    except BaseException:
        folder.close()
        raise
    sampler = VllmSampler(llm, folder, arguments)
    try:
        # Nothing is staged. This stamps the weights as NO_VERSION and fails if the plugin is missing.
        await sampler._apply_staged_weights(*NO_VERSION)
    except TandemError as error:
        sampler.close()
        raise EnvironmentLackError(
            f"vLLM's engine process lacks Tandem's plugin ({error}); install the project: pip install -e ."
        ) from error
    return sampler


class VllmSampler(Sampler):
    """Talks to the engine's process; rollout/vllm/plugin.py adds the calls that vLLM's EngineCore lacks."""

    def __init__(self, llm: AsyncLLM, folder: EngineFolder, arguments: SamplerArguments) -> None:
        super().__init__(
            llm.get_tokenizer(),
            max_model_tokens=arguments.max_model_tokens,
            seed=arguments.seed,
            group_store=arguments.group_store,
        )
        self._llm = llm
        self._folder = folder
        self._prepared: EngineCoreRequest | None = None
        self._prepared_for: tuple[object, ...] = (None, None, None)
        self._unsent: list[tuple[EngineCoreRequest, list[_Answer]]] = []
        """Answers that the engine does not know yet, by the request of their group."""
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def is_dead(self) -> bool:
        return bool(self._llm.errored)

    async def check(self) -> None:
        await self._core("get_weight_version")

    def close(self) -> None:
        try:
            self._llm.shutdown(timeout=_SHUTDOWN_SECONDS)
        finally:
            self._folder.close()
        # its __del__ calls it again during the interpreter's shutdown
        self._llm.shutdown = lambda timeout=None: None  # type: ignore[method-assign]

    async def _generate(self, request: SamplingRequest) -> Completion:
        answer = _Answer(request)
        prepared = self._engine_request(request)
        try:
            row = _row(prepared, answer)
            self._llm.output_processor.add_request(row, None, None, 0, answer)  # type: ignore[arg-type]
            self._send_soon(prepared, answer)
            # The engine may end without answering a new request.
            while not (await asyncio.wait((answer.output,), timeout=_DEATH_POLL_SECONDS))[0]:
                if self.is_dead:
                    raise UnavailableError("the engine has ended")
            return _completion(answer.output.result())
        finally:
            if not answer.output.done():
                answer.output.cancel()
                aborting = asyncio.ensure_future(self._llm.abort(request.request_id, internal=True))
                await asyncio.wait((aborting,), timeout=_SHUTDOWN_SECONDS)

    def _send_soon(self, prepared: EngineCoreRequest, answer: _Answer) -> None:
        """Has the request sent together with all that the loop's other tasks ask for at the same time."""
        if not self._unsent:
            sending = asyncio.ensure_future(self._send())
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        if not self._unsent or self._unsent[-1][0] is not prepared:
            self._unsent.append((prepared, []))
        self._unsent[-1][1].append(answer)

    async def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        rows = [(prepared, [(one.request.request_id, one.request.seed) for one in row]) for prepared, row in unsent]
        try:
            await self._core("add_rows", rows)
        except TandemError as error:
            for answer in (answer for _, answers in unsent for answer in answers):
                answer.put(error)

    def _engine_request(self, request: SamplingRequest) -> EngineCoreRequest:
        """vLLM's form of the request, with another row's id and seed. The rows of a group share it, so vLLM checks them
        once.
        """
        asked = (request.prompt_ids, request.sampling, self._version)
        prompt_ids, sampling, version = self._prepared_for
        if self._prepared is None or prompt_ids is not request.prompt_ids or (sampling, version) != asked[1:]:
            self._prepared = self._prepare(request)
            self._prepared_for = asked
        return self._prepared

    def _prepare(self, request: SamplingRequest) -> EngineCoreRequest:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input

        salted = tokens_input(request.prompt_ids.tolist(), cache_salt=_stamp(*self._version))
        params = _sampling_params(request.sampling)
        try:
            return self._llm.input_processor.process_inputs(request.request_id, salted, params, ("generate",))
        except (VLLMValidationError, ValueError) as error:
            raise DataError(f"prompt cannot be sampled: {one_line(error)}") from error

    async def _start_transfer(self, kind: Literal["join", "receive"], arguments: Mapping[str, object]) -> None:
        await self._core("start_weight_transfer", kind, arguments)

    async def _transfer_progress(self) -> Sequence[TransferProgress]:
        progress: Sequence[TransferProgress] = await self._core("weight_transfer_progress")
        return progress

    async def _apply_staged_weights(self, incarnation: int, policy_version: int) -> float:
        return float(await self._core("apply_staged_weights", _stamp(incarnation, policy_version)))

    async def _core(self, method: str, *arguments: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        call = self._llm.engine_core.call_utility_async(method, *arguments)  # type: ignore[attr-defined]
        try:
            return await asyncio.wait_for(call, _ANSWER_SECONDS)
        except TimeoutError as error:
            raise UnavailableError(f"the engine did not answer {method} within {_ANSWER_SECONDS:g} s") from error
        except EngineDeadError as error:
            told = "the engine's process is gone; its last lines are above or in the sampler's log"
            raise UnavailableError(told) from error
        except Exception as error:  # vLLM raises a bare Exception for any error in the engine
            raise WeightTransferError(f"{method} failed inside the engine: {error}") from error


class _Answer:
    """Where vLLM's output processor puts the output of a request, once, at its end."""

    def __init__(self, request: SamplingRequest) -> None:
        self.request = request
        self.output: asyncio.Future[CompletionOutput] = asyncio.get_running_loop().create_future()

    def put(self, output: RequestOutput | Exception) -> None:
        if self.output.done():  # cancelled
            return
        if isinstance(output, Exception):  # of the engine, or of vLLM's reading of its outputs
            self.output.set_exception(output if isinstance(output, TandemError) else _failure(output))
        else:
            self.output.set_result(output.outputs[0])


def _row(prepared: EngineCoreRequest, answer: _Answer) -> EngineCoreRequest:
    """The request under its own id, for vLLM's output processor, which reads no seed."""
    request = copy(prepared)
    request.request_id = request.external_req_id = answer.request.request_id
    return request


def _sampling_params(sampling: SamplingParameters) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    try:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop),
            repetition_penalty=sampling.repetition_penalty,
            logprobs=0,  # only the sampled token's
            flat_logprobs=True,
            detokenize=bool(sampling.stop),  # needed only to find stop strings
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (VLLMValidationError, ValueError) as error:
        raise DataError(f"sampling parameters cannot be used: {one_line(error)}") from error


def _failure(error: Exception) -> UnavailableError:
    return UnavailableError(f"the engine failed: {one_line(error)}")


def _completion(output: CompletionOutput) -> Completion:
    logprobs: Any = output.logprobs
    spans = [VersionSpan(span.start, *_parse_stamp(span.version)) for span in output.weight_versions or ()]
    reasons: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    return Completion(output.token_ids, logprobs.logprobs, spans, reasons.get(output.finish_reason, "error"))


def _stamp(incarnation: int, policy_version: int) -> str:
    return f"{incarnation}:{policy_version}"


def _parse_stamp(stamp: str) -> tuple[int, int]:
    incarnation, _, policy_version = stamp.partition(":")
    return int(incarnation), int(policy_version)
