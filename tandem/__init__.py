"""Tandem: asynchronous reinforcement learning for language models."""
