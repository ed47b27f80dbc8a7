"""The engine vLLM."""

WORKER_EXTENSION = "tandem.rollout.vllm.worker_extension.WeightReceiver"
"""The class that adds Tandem's calls to vLLM's workers."""
