"""The recipes for Hugging Face's Trainer, as they are in docs/, with NGAdam: groups, schedule, options, resume, log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_huggingface import SAVED, STEPS, Counting, small_gpt
from torch import nn
from transformers import Trainer, TrainingArguments

import ngplus
from helpers.project import block_of
from helpers.training import flat

transformers = pytest.importorskip("transformers")
RECIPES = ["optimizer = ngplus.NGAdam(ngplus.decay_groups", "make = lambda model, lr"]
both = pytest.mark.parametrize("recipe", RECIPES, ids=["optimizer", "function"])


def run(recipe: str, folder: Path, resume: Path | None = None, model: Any = None, **options: Any) -> Trainer:
    common = {"per_device_train_batch_size": 4, "max_steps": STEPS, "save_steps": SAVED, "seed": 3, "report_to": []}
    rates = {"learning_rate": 5e-3, "weight_decay": 0.01, "use_cpu": True, "disable_tqdm": True, "logging_steps": 100}
    arguments = TrainingArguments(str(folder), **{**common, **rates, **options})
    names = {"ngplus": ngplus, "Trainer": Trainer, "arguments": arguments, "data": Counting()}
    names["model"] = small_gpt() if model is None else model
    exec(block_of("training.md", recipe), names)
    trainer: Any = names["trainer"]
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@both
def test_groups_and_schedule(recipe: str, tmp_path: Path) -> None:
    """The groups are those of the Trainer, and the schedule is one that its arguments ask for."""
    trainer: Any = run(recipe, tmp_path)
    optimizer = trainer.optimizer.optimizer  # what the page says
    assert isinstance(optimizer, ngplus.NGAdam)
    assert optimizer.health().steps == STEPS
    assert optimizer.health().good
    assert optimizer.plan()["transformer.wte.weight"].side == "both"
    decayed, rest = optimizer.param_groups
    assert [decayed["weight_decay"], rest["weight_decay"]] == [0.01, 0.0]
    by_trainer = set(trainer.get_decay_parameter_names(trainer.model))
    names = {name for name, _ in trainer.model.named_parameters()}
    assert set(decayed["param_names"]) == by_trainer & names
    assert decayed["lr"] == pytest.approx(0.0)  # linear, at its end


@both
def test_both_recipes_make_the_same_steps(recipe: str, tmp_path: Path) -> None:
    wanted = flat(run(RECIPES[0], tmp_path / "wanted").model)
    assert torch.equal(flat(run(recipe, tmp_path / "other").model), wanted)


@both
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_resumed_training_equals_uninterrupted_training(recipe: str, options: Any, tmp_path: Path) -> None:
    whole = run(recipe, tmp_path / "whole", **options)
    resumed = run(recipe, tmp_path / "resumed", resume=tmp_path / "whole" / f"checkpoint-{SAVED}", **options)
    assert torch.equal(flat(resumed.model), flat(whole.model))
    assert not torch.equal(flat(whole.model), flat(small_gpt()))


@both
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_adapters(recipe: str, dora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=dora)
    model = peft.get_peft_model(small_gpt(), config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer: Any = run(recipe, tmp_path, model=model).optimizer
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is not p.requires_grad, name
        assert (len(optimizer.state.get(p, {})) > 0) is p.requires_grad, name


def test_the_recipe_for_logging(tmp_path: Path) -> None:
    names: dict[str, Any] = {"Trainer": Trainer}
    exec(block_of("recipes.md", "class LoggingTrainer"), names)
    model = small_gpt()
    options = {"max_steps": 4, "logging_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    optimizer = ngplus.NGAdam(model)
    arguments = TrainingArguments(str(tmp_path), **options)
    trainer = names["LoggingTrainer"](model, arguments, train_dataset=Counting(), optimizers=(optimizer, None))
    trainer.train()
    steps = [entry["ngplus/steps"] for entry in trainer.state.log_history]
    assert steps == [2.0, 4.0, 4.0]
    assert all(entry["ngplus/update_rms"] > 0 for entry in trainer.state.log_history)


SMALL = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}


def model_of(name: str) -> nn.Module:
    if name == "Bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL))
    if name == "Llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1))
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    )


@pytest.mark.parametrize("name", ["Bert", "Llama", "ResNet"])
def test_decay_groups_are_those_of_the_trainer(name: str, tmp_path: Path) -> None:
    """It finds more norm layers: those of the ResNet have another name."""
    model = model_of(name)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    by_trainer = set(trainer.get_decay_parameter_names(model))
    own = {name for name, _ in ngplus.decay_groups(model, 0.1)[0]["params"]}
    assert own <= by_trainer
    assert all(dict(model.named_parameters())[name].dim() == 1 for name in by_trainer - own)
    assert (by_trainer != own) is (name == "ResNet")
