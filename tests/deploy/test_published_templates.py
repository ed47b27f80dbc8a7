"""Random episodes over chat templates as they are published, from the packages of two other trainers: no turn changes
the tokens before it, and each sampled token is trained once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest

from tests.support.chat_templates import ChatTemplate, template_encoder
from tests.support.random_episodes import Counts, Play
from tests.support.wheels import pip

pytestmark = pytest.mark.timeout(180)

PACKAGES = ("trl==1.16.0", "axolotl==0.19.0")
TRL, AXOLOTL = "trl/chat_templates", "axolotl/utils/chat_templates/templates"
EPISODES = 20
DEEPSEEK_END = "<｜end▁of▁sentence｜>"
PUBLISHED = {
    f"{TRL}/qwen2_5": {"with_tools": True},
    f"{TRL}/qwen3": {"with_tools": True},
    f"{TRL}/qwen3_instruct_2507": {"with_tools": True},
    f"{TRL}/llama3": {"end": "<|eot_id|>"},
    f"{TRL}/llama3_1": {"end": "<|eot_id|>"},
    f"{TRL}/llama3_2": {"end": "<|eot_id|>"},
    f"{TRL}/gemma": {"end": "<end_of_turn>", "alternates": True},
    f"{TRL}/gemma3": {"end": "<end_of_turn>", "alternates": True},
    f"{TRL}/phi3_5": {"end": "<|end|>"},
    # These two write a message of a tool in another way if one came before it, unless a call did, too.
    f"{TRL}/deepseekv3": {"end": DEEPSEEK_END, "alternates": True},
    f"{TRL}/deepseek_r1_distill": {"end": DEEPSEEK_END, "alternates": True},
    f"{TRL}/glm4moe": {"end": "<|user|>"},
    f"{TRL}/lfm2": {},
    f"{AXOLOTL}/mistral_v1": {"end": "</s>", "alternates": True},
    f"{AXOLOTL}/mistral_v2v3": {"end": "</s>", "alternates": True},
    f"{AXOLOTL}/mistral_v7_tekken": {"end": "</s>", "alternates": True},
    f"{AXOLOTL}/chatml": {},
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    pip("install", "-q", "--no-deps", "--no-compile", "--target", folder, *PACKAGES)
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_turn_changes_the_tokens_before_it(name: str, packages: Path, tmp_path: Path) -> None:
    text = (packages / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(text, **PUBLISHED[name])
    encoder = template_encoder(tmp_path, template)

    def played(mode: Literal["keep", "fork"]) -> Counts:
        encoder.check_replies(may_rewrite=mode == "fork")
        return asyncio.run(Play(encoder, template, [*PUBLISHED].index(name), mode).episodes(EPISODES))

    kept, forked = played("keep"), played("fork")
    assert min(kept.turns, forked.turns) > EPISODES and kept.forks == 0
    assert kept.breaks > 0, "encoding the conversation again would have changed tokens"
