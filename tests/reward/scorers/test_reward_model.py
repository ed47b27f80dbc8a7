"""Reward models: a real tiny classifier, with and without its own process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.contracts import ScoreItem
from tandem.reward.scorers.reward_model import RewardModel
from tandem.reward.workers.model_process import Classifier, SetupError, batches
from tests.support.scores import refused, values
from tests.support.tiny_model import ONE_LAYER, VOCABULARY, build_tiny_model, character_tokenizer

pytestmark = pytest.mark.timeout(600)  # starting torch takes seconds, or minutes on a busy machine

LABELS = 3
LONGEST = 200


def test_batches_stay_within_max_batch_tokens() -> None:
    rows = [(n, {"input_ids": [0] * length}) for n, length in enumerate([5, 90, 5, 40, 6, 4, 300, 1])]
    cut = list(batches(rows, 100))
    assert sorted(n for batch in cut for n, _ in batch) == list(range(8))
    sizes = [[len(encoded["input_ids"]) for _, encoded in batch] for batch in cut]
    assert sizes == [[300], [90], [40, 6], [5, 5, 4, 1]]
    assert list(batches([], 100)) == []


POISON = "☠"
"""A token of the tokenizer that the model has no embedding for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 classifier of three labels with a character tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    place = tmp_path_factory.mktemp("classifier")
    own = {"max_position_embeddings": LONGEST, "initializer_range": 0.5, "num_labels": LABELS, "pad_token_id": 0}
    config = Qwen2Config(**ONE_LAYER, **own, dtype="float32")
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(config).save_pretrained(place)
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([POISON])
    tokenizer.save_pretrained(place)
    return place


def logits(folder: Path, text: str) -> list[float]:
    """Logits of one unpadded row, tokenized by hand."""
    import torch
    from transformers import Qwen2ForSequenceClassification

    ids: list[int] = []
    while text:
        token = next(token for token in VOCABULARY if text.startswith(token))
        ids.append(VOCABULARY.index(token))
        text = text[len(token) :]
    model = Qwen2ForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        row: list[float] = model(torch.tensor([ids])).logits[0].tolist()
    return row


def turns(*texts: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in texts)


def item(answer: str, prompt: Any = "2+2?") -> ScoreItem:
    return ScoreItem("test", answer, None, {} if prompt is None else {"prompt": prompt})


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[RewardModel]:
    with closing(RewardModel(path=str(folder), label=1, max_batch_tokens=256)) as one:
        one.start()
        yield one


def test_the_score_is_the_models_logit(model: RewardModel, folder: Path) -> None:
    messages = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Hi"}]
    items = [item("4"), item("four, I think"), item("Hello!", messages), item("")]
    texts = [
        turns(("user", "2+2?"), ("assistant", "4")),
        turns(("user", "2+2?"), ("assistant", "four, I think")),
        turns(("system", "Be good."), ("user", "Hi"), ("assistant", "Hello!")),
        turns(("user", "2+2?"), ("assistant", "")),
    ]
    expected = [logits(folder, text)[1] for text in texts]
    assert len({round(value, 3) for value in expected}) == 4, "the model tells them apart"
    assert values(model.judge_batch(items)) == pytest.approx(expected, abs=1e-5)
    alone = [model.judge_batch([one])[0] for one in items]
    assert values(alone) == pytest.approx(expected, abs=1e-5), "whoever else is in the batch"


def test_order_is_kept_over_many_batches(model: RewardModel) -> None:
    items = [item("x" * (n * 37 % 97)) for n in range(60)]
    singly = values(model.judge_batch(items[:10]))
    assert values(model.judge_batch(items))[:10] == pytest.approx(singly, abs=1e-5)
    assert values(model.judge_batch(items[::-1]))[::-1][:10] == pytest.approx(singly, abs=1e-5)


def test_items_that_the_model_cannot_take_are_unscored(model: RewardModel) -> None:
    items = [item("4", None), item("4", 7), item("4"), item("\ud800"), item("x" * LONGEST), item("4")]
    scores = model.judge_batch(items)
    assert refused(scores[0]) == ("invalid_input", "extra_info.prompt is missing: it should hold the prompt")
    assert refused(scores[1])[0] == "invalid_input"
    assert refused(scores[3])[0] == "invalid_input" and "tokenizer refuses it" in refused(scores[3])[1]
    assert refused(scores[4])[0] == "limit" and f"more than the {LONGEST} that the model takes" in refused(scores[4])[1]
    assert values([scores[2]]) == values([scores[5]]) == values(model.judge_batch([item("4")]))


# ---- without a process, because each one has to start torch ----


def classifier(place: Path, **options: Any) -> Classifier:
    setup = {"path": str(place), "device": "cpu", "dtype": "auto", "label": 0, "activation": "none"}
    limits = {"max_batch_tokens": 1000, "max_length": 0, "truncate": False, "num_threads": torch_threads()}
    return Classifier({**setup, **limits, **options})


def torch_threads() -> int:
    import torch

    return torch.get_num_threads()  # the number of threads of the other tests


def answers_of(one: Classifier, *questions: tuple[Any, str]) -> list[Any]:
    """The process's reply to each question: its score, or (reason, detail)."""
    found: dict[int, Any] = {}
    asked = [{"id": n, "prompt": prompt, "answer": answer} for n, (prompt, answer) in enumerate(questions)]
    for message in one.answer(asked):
        found |= dict(message.get("scores", ()))
        found |= {number: tuple(rest) for number, *rest in message.get("refused", ())}
    return [found[number] for number in range(len(questions))]


def test_what_the_model_raises_ends_the_process(folder: Path) -> None:
    with pytest.raises(IndexError):
        answers_of(classifier(folder), ("2+2?", "4"), ("2+2?", POISON))


def test_without_a_chat_template_prompt_and_answer_are_a_pair(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    plain = classifier(tmp_path / "plain", max_length=30)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    short, long, fits, spoken = answers_of(plain, ("2+2?", "4"), ("2+2?", "x" * 40), ("2+2?", "x" * 26), (talk, "c"))
    assert short == pytest.approx(logits(folder, "2+2?4")[0], abs=1e-5)
    assert spoken == pytest.approx(logits(folder, "user: a\n\nassistant: bc")[0], abs=1e-5)
    assert long == ("limit", "44 tokens are more than the 30 that the model takes") and isinstance(fits, float)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_prompt_field_truncate_and_activation(folder: Path, activation: str) -> None:
    import torch

    text = "a" * 50 + "bcdefghij"
    row = torch.tensor(logits(folder, text[-20:]))
    expected = (row.sigmoid() if activation == "sigmoid" else row.softmax(-1))[2].item()
    one = classifier(folder, label=2, truncate=True, max_length=20, activation=activation)
    scored, empty = answers_of(one, (None, text), (None, ""))
    assert scored == pytest.approx(expected, abs=1e-5)
    assert empty == ("invalid_input", "prompt and answer have no tokens in the model's vocabulary")


def test_a_template_that_refuses_a_conversation(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "strict")
    refuse = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}"
    (tmp_path / "strict" / "chat_template.jinja").write_text(refuse + "{{ messages[0].content }}")
    questions = ([{"role": "system", "content": "s"}], "x"), ("hi", "x")
    first, second = answers_of(classifier(tmp_path / "strict"), *questions)
    assert first[0] == "invalid_input" and "users first" in first[1] and isinstance(second, float)


def test_segments_of_a_pair_reach_an_encoder(tmp_path: Path) -> None:
    """BERT tells prompt and answer apart by token types."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]
    small = {"vocab_size": len(words), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**small, intermediate_size=16, initializer_range=1.0, num_labels=1, max_position_embeddings=32)
    torch.manual_seed(0)
    encoder = BertForSequenceClassification(config).eval()
    encoder.save_pretrained(tmp_path)
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(tmp_path)
    with torch.inference_mode():
        ids, types = torch.tensor([[2, 5, 6, 3, 7, 3]]), torch.tensor([[0, 0, 0, 0, 1, 1]])
        right = encoder(input_ids=ids, token_type_ids=types).logits.item()
        wrong = encoder(input_ids=ids).logits.item()
    assert abs(right - wrong) > 1e-3
    scored, *_ = answers_of(classifier(tmp_path), ("one two", "three"), ("two", "one two one two one"))
    assert scored == pytest.approx(right, abs=1e-5)


def test_a_score_that_is_not_a_number_is_unscored(folder: Path) -> None:
    import torch

    one = classifier(folder)
    with torch.no_grad():
        one._model.score.weight.fill_(float("nan"))
    assert answers_of(one, ("2+2?", "4")) == [("crashed", "the model's score is nan")]


def test_a_batch_that_needs_too_much_memory_is_halved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    one, expected = classifier(folder), answers_of(classifier(folder), *[("2+2?", "x" * n) for n in range(8)])
    real, sizes = one._forward, []

    def forward(rows: Any) -> list[float]:
        sizes.append(len(rows))
        if len(rows) > 2 or max(len(row["input_ids"]) for row in rows) > 150:
            raise torch.OutOfMemoryError
        return real(rows)

    monkeypatch.setattr(one, "_forward", forward)
    *scored, huge = answers_of(one, *[("2+2?", "x" * n) for n in range(8)], ("2+2?", "x" * 130))
    assert scored == pytest.approx(expected, abs=1e-5) and max(sizes) > 2
    assert huge[0] == "limit" and "the device lacks the memory for" in huge[1]


OWN_CONFIG = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForSequenceClassification": "own.M"}}
OWN_CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Own: pass\nclass M: pass\n"


@pytest.mark.parametrize(
    ("files", "options", "told"),
    [
        ({"model.safetensors": "no tensors"}, {}, "SafetensorError"),
        ({"tokenizer.json": "{}"}, {}, "Error: "),
        ({}, {"label": LABELS}, "label 3 is not there: the model has 3 labels"),
        ({}, {"device": "cuda:99"}, "Error: "),
        ({"config.json": json.dumps(OWN_CONFIG), "own.py": OWN_CODE}, {}, "contains custom code"),
    ],
    ids=["weights", "tokenizer", "label", "device", "code"],
)
def test_models_that_cannot_be_used(
    folder: Path, tmp_path: Path, files: dict[str, str], options: dict[str, Any], told: str
) -> None:
    place = tmp_path / "model"
    shutil.copytree(folder, place)
    for name, text in files.items():
        (place / name).write_text(text)
    with pytest.raises(SetupError) as caught:
        classifier(place, **options)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert not (place / "ran").exists(), "no code of the folder is run"


def test_a_model_that_is_no_classifier_cannot_be_used(tmp_path: Path) -> None:
    build_tiny_model(tmp_path)
    with pytest.raises(SetupError, match=r"has no weights for score\.weight; it holds no sequence classifier"):
        classifier(tmp_path)
