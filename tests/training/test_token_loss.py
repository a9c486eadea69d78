"""The targets of a batch that train.loss_per=token counts, and what a batch without any does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from raydist.shared.errors import ConfigError
from raydist.training.model_call import OwnLoss
from raydist.training.token_loss import TokenLoss

LABELS = torch.tensor([[1, 2, -100, -100], [3, 0, 7, -100]])
TOKENS = torch.zeros(2, 4, dtype=torch.long)


def model(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)


class Causal(torch.nn.Module):
    """As a model of transformers: it leaves the shift to the loss."""

    loss_type = "ForCausalLM"
    loss_function: Any = None

    def forward(self, labels: torch.Tensor) -> Any:
        return self.loss_function(labels)


class OldCausal(Causal):
    """As one whose code is older than that loss."""

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        shift_labels = labels[..., 1:].contiguous()
        return F.cross_entropy(shift_labels, shift_labels)


class Decoder(torch.nn.Module):
    """As BartForCausalLM: it compares the output with the label of the same place."""

    loss_type = "ForCausalLM"

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(labels, labels)


TRANSLATOR = model(loss_type="ForCausalLM", config=model(is_encoder_decoder=True))


@pytest.mark.parametrize(
    ("loss", "of", "target", "wanted"),
    [
        (F.cross_entropy, Causal(), LABELS, 5),  # the job's own loss has shifted them
        (OwnLoss(), model(), {"labels": LABELS, "tokens": TOKENS}, 5),
        (OwnLoss(), model(), {"tokens": TOKENS, "following": LABELS}, 5),
        (OwnLoss(), model(), [TOKENS, LABELS], 5),
        (OwnLoss(), model(), LABELS, 5),
        (OwnLoss(), Causal(), {"input_ids": TOKENS, "labels": LABELS}, 3),
        (OwnLoss(), OldCausal(), {"input_ids": TOKENS, "labels": LABELS}, 3),
        (OwnLoss(), Decoder(), {"input_ids": TOKENS, "labels": LABELS}, 5),
        (OwnLoss(), Causal(), {"labels": TOKENS, "shift_labels": LABELS}, 5),
        (OwnLoss(), TRANSLATOR, {"input_ids": TOKENS, "labels": LABELS}, 5),
    ],
)
def test_what_is_counted(loss: Any, of: Any, target: Any, wanted: int) -> None:
    assert int(TokenLoss.of(loss, of).count(target)) == wanted


SMALL: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
LLAVA: dict[str, Any] = {
    "text_config": {**SMALL, "model_type": "llama"},
    "vision_config": {**SMALL, "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4},
    "image_token_index": 7,
}
GPT2 = {"vocab_size": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
BART: dict[str, Any] = {
    "vocab_size": 8,
    "d_model": 8,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 8,
    "pad_token_id": 0,
}
T5: dict[str, Any] = {
    "vocab_size": 8,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 8,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("kind", "of", "words"),
    [
        ("Llama", "ForCausalLM", SMALL),
        ("GPT2", "LMHeadModel", GPT2),
        ("Llava", "ForConditionalGeneration", LLAVA),
        ("XLNet", "LMHeadModel", {"vocab_size": 8, "d_model": 8, "n_layer": 1, "n_head": 2}),
        ("Bert", "ForMaskedLM", SMALL),
        ("T5", "ForConditionalGeneration", T5),
        ("Bart", "ForCausalLM", BART),
        ("TrOCR", "ForCausalLM", {**BART, "hidden_size": 8}),
        ("GPT2", "DoubleHeadsModel", GPT2),
    ],
)
def test_the_first_label_counts_where_a_model_of_transformers_uses_it(
    kind: str, of: str, words: dict[str, Any], compiled: bool
) -> None:
    """The name of a class does not say it: a Llava shifts the labels, a BartForCausalLM does not."""
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, kind + of)(getattr(transformers, f"{kind}Config")(**words))
    tokens = torch.tensor([[1, 2, 3]])
    first = torch.tensor([[1, -100, -100]])
    loss = made(input_ids=tokens, labels=first).loss  # NaN, the mean over nothing: not used
    if compiled:
        made.loss_function = torch.compile(made.loss_function)
    counted = TokenLoss.of(OwnLoss(), made).count({"input_ids": tokens, "labels": first})
    assert int(counted) == (not loss.isnan())


def test_targets_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        TokenLoss.of(F.cross_entropy, model()).count([LABELS, LABELS])
    assert error.value.message.startswith(
        "train.loss_per=token: targets are counted in a tensor, and these are a list"
    )


def test_a_batch_without_targets_changes_no_gradient() -> None:
    scores = torch.randn(4, 3, requires_grad=True)
    none = torch.full((4,), -100)
    loss = TokenLoss.of(F.cross_entropy, model())
    assert loss(scores, none).isnan()
    weighed = loss.weighed(loss(scores, none), none, torch.tensor(0.5))
    torch.autograd.backward(weighed)
    assert weighed.item() == 0
    assert torch.equal(scores.grad, torch.zeros(4, 3))  # type: ignore[arg-type]
