"""Description of the engine `vllm`, available without loading its library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tandem.protos.contracts import JsonObject
from tandem.protos.errors import ConfigError, EnvironmentLackError
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import Engine, SamplerArguments, class_names_in
from tandem.rollout.environments.tools.parsers import ParsedTurn, TurnPiece
from tandem.rollout.sampler import Sampler
from tandem.rollout.vllm.engine_folder import sweep_engine_folders

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""Below, vLLM would sample at the least one; above, it refuses."""


class VllmEngine(Engine):
    """vLLM in a separate process, with one worker per GPU."""

    name = "vllm"
    library = "vllm"
    install = "pip install 'tandem-rl[cpu]' (with GPUs: 'tandem-rl[gpu]')"

    def known_architectures(self) -> frozenset[str]:
        return class_names_in("vllm", "model_executor/models/registry.py", "_TEXT_GENERATION_MODELS")

    def check(self, config: RolloutConfig) -> None:
        super().check(config)
        if not LEAST_TEMPERATURE <= config.temperature <= MOST_TEMPERATURE:
            raise ConfigError(
                f"rollout.temperature={config.temperature:g}: vLLM samples at {LEAST_TEMPERATURE} to "
                f'{MOST_TEMPERATURE:g}; choose one of these, or set rollout.engine="transformers"'
            )

    def core_environment(self, cores: Sequence[int]) -> Mapping[str, str]:
        # By default, vLLM puts the workers of every sampler on core 0.
        return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))}

    def remove_leftovers(self) -> None:
        sweep_engine_folders()

    async def start(self, arguments: SamplerArguments) -> Sampler:
        from tandem.rollout.vllm.sampler import start_sampler

        self.check(arguments.config)
        return await start_sampler(arguments)

    def tool_parser(
        self, name: str, tokenizer: object, schemas: Sequence[JsonObject]
    ) -> Callable[[Sequence[TurnPiece], frozenset[str]], ParsedTurn]:
        if not self.installed:
            raise EnvironmentLackError(
                f'environment.tool_format "vllm:{name}": vllm is not installed; install it: {self.install}'
            )
        from tandem.rollout.vllm.tool_calls import VllmToolParser

        return VllmToolParser(name, tokenizer, schemas).parse


ENGINE = VllmEngine()
