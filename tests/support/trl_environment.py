"""An environment written as TRL's documentation tells, and what TRL's trainer makes of it:

python -m tests.support.trl_environment MODEL
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


class Counter:
    """The policy counts up to the row's answer."""

    def reset(self, **kwargs: object) -> str | None:
        self.value, self.goal = 0, int(str(kwargs["answer"]))
        return "Count."

    def increment(self, step: int) -> int:
        """
        Adds to the counter.

        Args:
            step: How much to add.

        Returns:
            The value of the counter.
        """
        self.value += step
        return self.value

    def get_reward(self) -> float:
        return 1.0 if self.value == self.goal else 0.0


def main(model: str) -> None:
    """Prints the names of the tools and of the rewards that TRL's trainer finds."""
    import datasets
    import transformers
    import trl

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    tokenizer.chat_template = template.read_text()
    rows = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "Begin."}], "answer": "2"}] * 4)
    trainer = trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(f"{model}-trained", use_cpu=True, bf16=False, report_to=[], num_generations=4),
        train_dataset=rows,
        processing_class=tokenizer,
        environment_factory=Counter,
    )
    print(json.dumps({"tools": [one.__name__ for one in trainer.tools], "rewards": trainer.reward_func_names}))


if __name__ == "__main__":
    main(sys.argv[1])
