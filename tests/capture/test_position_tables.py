"""Tables that a subclass of Embedding looks up by itself: positions, shifted and scaled rows, with whatever input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ngplus
from helpers import reference as ref
from ngplus.capture import reasons

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:No per-sample curvature")]

SAMPLES, LENGTH, WORDS = 4, 6, 40


def check(model: nn.Module, loss: Callable[[Tensor], Tensor], ids: Tensor) -> ngplus.Plan:
    """What is called per-sample equals batches of one. Returns the plan."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = ngplus.NGPlus(model, lr=0.0, momentum=0.0)
    loss(ids).backward()
    optimizer.step()
    each = []
    for i in range(len(ids)):
        optimizer.zero_grad()
        loss(ids[i : i + 1]).backward()
        each.append({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()})
    plan = optimizer.plan()
    for row in plan:
        if row.source not in ("sample", "vmap"):
            continue
        lay = ref.columns if len(params[row.name].shape) == 1 else ref.rows
        stack = torch.stack([lay(*(gradients[name] for name in row.parameters)) for gradients in each])
        side, matrix = optimizer.curvature(row.name)
        assert ref.relative_error(matrix.reshape(-1), ref.gfim(stack, side).reshape(-1)) < 1e-9, row.name
    return plan


class Offset(nn.Embedding):
    """Rows two further than the index says."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 2)


class OfMask(nn.Embedding):
    """Positions of the entries that are not masked: the input is no index of the table."""

    def forward(self, input: Tensor) -> Tensor:
        mask = (input != 0).long()
        return super().forward((mask.cumsum(1) * mask).clamp_max(len(self.weight) - 1))


class OfLength(nn.Embedding):
    """Positions by the shape of token ids, as BART has them: ids are far above the number of rows."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(torch.arange(input.shape[1]).expand(len(input), -1) + 2)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class Twice(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + super().forward(input.flip(1))


class Padded(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight, padding_idx=-1, scale_grad_by_freq=False)


class Chosen(nn.Embedding):
    """Its rows are chosen without a lookup."""

    def forward(self, input: Tensor) -> Tensor:
        return self.weight[input]


class Standardised(nn.Embedding):
    """The function sees another table."""

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight - self.weight.mean(0))


class AlsoItsMean(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.weight.mean(0)


class Net(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.words, self.table, self.head = nn.Embedding(WORDS, 4), table, nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(ids) + self.table(ids)))


KINDS = {
    Offset: (WORDS + 2, "sample"), OfMask: (LENGTH + 1, "sample"), Scaled: (WORDS, "sample"), Twice: (WORDS, "batch"),
    Padded: (WORDS, "sample"), OfLength: (LENGTH + 2, "batch"), Chosen: (WORDS, "batch"),
    Standardised: (WORDS, "sample"), AlsoItsMean: (WORDS, "batch"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_is_looked_up_by_a_forward_of_its_own(kind: type[nn.Embedding]) -> None:
    rows, source = KINDS[kind]
    model = Net(kind(rows, 4))
    ids = torch.randint(1, WORDS, (SAMPLES, LENGTH))
    ids[1, 3:] = 0
    plan = check(model, lambda ids: model(ids).square().mean(), ids)
    assert plan["words.weight"].source == plan["head.weight"].source == "sample"
    row = plan["table.weight"]
    assert row.source == source, row.note
    assert bool(row.note) == (source == "batch")
    if kind is Chosen:
        assert reasons.without_detail(row.note) == reasons.OWN_FORWARD


def test_no_index_is_read_that_the_module_did_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator a read out of bounds would be an assert."""
    from ngplus.fisher.factors import tables

    made: list[tuple[int, int]] = []
    first = tables.Lookup.__post_init__

    def noted(self: Any) -> None:
        made.append((int(self.index.min()), int(self.index.max()) - self.rows))
        first(self)

    monkeypatch.setattr(tables.Lookup, "__post_init__", noted)
    for kind, (rows, _) in KINDS.items():
        model = Net(kind(rows, 4))
        optimizer = ngplus.NGPlus(model)
        model(torch.randint(1, WORDS, (SAMPLES, LENGTH))).square().mean().backward()
        optimizer.step()
    assert len(made) > len(KINDS)
    assert all(low >= 0 and above < 0 for low, above in made)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.shift, self.reentrant = inner, nn.Linear(1, 3), reentrant

    def forward(self, ids: Tensor) -> Tensor:
        shift = self.shift(torch.ones(len(ids), 1, 1))  # a reentrant checkpoint wants an input with a gradient
        return checkpoint(lambda ids, shift: self.inner(ids) + shift, ids, shift, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_table_in_a_checkpointed_part(reentrant: bool) -> None:
    model = Checkpointed(Net(Scaled(WORDS, 4)), reentrant)
    plan = check(model, lambda ids: model(ids).square().mean(), torch.randint(WORDS, (SAMPLES, LENGTH)))
    assert plan["inner.table.weight"].source == ("batch" if reentrant else "sample")


def test_a_call_that_fails_leaves_no_mode() -> None:
    class Fails(Scaled):
        fail = True

        def forward(self, input: Tensor) -> Tensor:
            if self.fail:
                raise KeyError("as asked")
            return super().forward(input)

    model = Net(Fails(WORDS, 4))
    ids = torch.randint(WORDS, (SAMPLES, LENGTH))
    optimizer = ngplus.NGPlus(model)
    with pytest.raises(KeyError, match="as asked"):
        model(ids)
    assert torch.overrides._get_current_function_mode() is None
    model.table.fail = False
    model(ids).square().mean().backward()
    optimizer.step()
    assert optimizer.plan()["table.weight"].source == "sample"


SMALL = {"vocab_size": WORDS, "d_model": 8, "max_position_embeddings": 12, "pad_token_id": 1}
LAYERS = {
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}  # fmt: skip
DRY = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def tiny(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if name == "OPT":
        config = transformers.OPTConfig(
            vocab_size=WORDS, hidden_size=8, ffn_dim=8, max_position_embeddings=12, num_hidden_layers=1,
            num_attention_heads=2, word_embed_proj_dim=8, pad_token_id=1, bos_token_id=2, eos_token_id=2,
            dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
        return transformers.OPTForCausalLM(config)
    config = getattr(transformers, f"{name}Config")(**SMALL, **LAYERS, **DRY)
    return getattr(transformers, f"{name}ForConditionalGeneration" if name != "Marian" else "MarianMTModel")(config)


@pytest.mark.parametrize("name", ["Bart", "OPT", "Pegasus", "Marian", "MBart", "Blenderbot"])
def test_tiny_models_of_transformers(name: str) -> None:
    """Token ids are larger than their position tables."""
    torch.manual_seed(0)
    model = tiny(name).double().train()
    ids = torch.randint(14, WORDS, (SAMPLES, LENGTH))
    weights = torch.randn(LENGTH, WORDS)

    def loss(ids: Tensor) -> Tensor:
        given = {"input_ids": ids} if name == "OPT" else {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
        logits = model(**given, use_cache=False).logits
        return (torch.log_softmax(logits, -1) * weights).mean()

    plan = check(model, loss, ids)
    called = [row for row in plan if row.source in ("sample", "vmap")]
    assert len(called) > len(plan) / 2, str(plan)
