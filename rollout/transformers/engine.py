"""Description of the engine `transformers`, available without loading its library."""

from __future__ import annotations

from tandem.protos.errors import ConfigError
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import Engine, SamplerArguments, class_names_in
from tandem.rollout.sampler import Sampler


class TransformersEngine(Engine):
    """A transformers model in a thread of the sampler's process. It runs wherever torch runs, and is slower than vLLM
    except for tiny models on CPUs.
    """

    name = "transformers"
    library = "transformers"
    install = "pip install 'tandem-rl[train]'"

    def known_architectures(self) -> frozenset[str]:
        return class_names_in("transformers", "models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")

    def check(self, config: RolloutConfig) -> None:
        super().check(config)
        if config.tensor_parallel_size > 1:
            raise ConfigError(
                f"rollout.tensor_parallel_size={config.tensor_parallel_size}: the engine transformers runs on one "
                'device; set it to 1 (more rollout.num_replicas sample side by side), or set rollout.engine="vllm"'
            )

    async def start(self, arguments: SamplerArguments) -> Sampler:
        from tandem.rollout.transformers.sampler import TransformersSampler

        self.check(arguments.config)
        return TransformersSampler(arguments)


ENGINE = TransformersEngine()
