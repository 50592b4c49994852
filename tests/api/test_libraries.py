"""Libraries on top of torch train and generate with an optimized model as they do without."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fusewright
from tests.models.mini import LLAMA_VOCABULARY, MINI_LLAMA
from tests.runtime.dispatch_models import cheap

STEPS = 20
pytestmark = pytest.mark.models
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


def llama(**changes: Any) -> Any:
    """The mini Llama with `changes` to its configuration."""
    torch.manual_seed(0)
    model: Any = MINI_LLAMA.model()
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


class Tokens(Dataset[dict[str, Tensor]]):
    """Forty rows of eight random tokens."""

    def __init__(self) -> None:
        self.rows = torch.randint(LLAMA_VOCABULARY, (40, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index].clone()}


def check_dispatched(model: nn.Module, calls: int) -> None:
    data = fusewright.explain(model).to_dict()
    assert data["calls"] == calls
    assert data["dispatched"] >= calls
    assert data["fallbacks"] == []


@pytest.mark.parametrize("use_cache", [False, True])
def test_generate_gives_the_tokens_of_eager(use_cache: bool) -> None:
    model = llama(use_cache=use_cache).eval()
    reference = copy.deepcopy(model)
    prompt = torch.arange(5)[None]
    expected = reference.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    cheap(model)
    found = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert found.tolist() == expected.tolist()
    data = fusewright.explain(model).to_dict()
    assert data["calls"] == 8
    assert data["dispatched"] >= 8


def test_a_lora_adapter_is_switched() -> None:
    import peft

    base = llama().eval()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config, adapter_name="one")
    model.add_adapter("two", config)
    model.eval()
    reference = copy.deepcopy(model)
    cheap(model)
    ids = torch.arange(8)[None]
    seen = []
    with torch.no_grad():
        for adapter in ("one", "two", "one"):
            model.set_adapter(adapter)
            reference.set_adapter(adapter)
            expected = reference(input_ids=ids).logits
            torch.testing.assert_close(model(input_ids=ids).logits, expected, **CLOSE)
            seen.append(expected)
        with model.disable_adapter(), reference.disable_adapter():
            expected = reference(input_ids=ids).logits
            torch.testing.assert_close(model(input_ids=ids).logits, expected, **CLOSE)
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[0], expected)
    check_dispatched(model, 4)


def trainer_losses(model: Any, folder: pathlib.Path) -> list[float]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train()
    return [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]


def test_hf_trainer(tmp_path: pathlib.Path) -> None:
    expected = trainer_losses(llama(), tmp_path / "eager")
    model = cheap(llama())
    found = trainer_losses(model, tmp_path / "optimized")
    assert len(found) == STEPS
    torch.testing.assert_close(found, expected, **CLOSE)
    check_dispatched(model, STEPS)


def accelerate_losses(model: Any) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = DataLoader(Tokens(), batch_size=2)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = prepared(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()
    return losses


def test_accelerate() -> None:
    expected = accelerate_losses(llama())
    model = cheap(llama())
    found = accelerate_losses(model)
    assert len(found) == STEPS
    torch.testing.assert_close(found, expected, **CLOSE)
    check_dispatched(model, STEPS)


def lightning_losses(model: Any, folder: pathlib.Path) -> list[float]:
    import lightning

    class Step(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model
            self.losses: list[float] = []

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    step = Step()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(step, DataLoader(Tokens(), batch_size=2))
    return step.losses


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:Found .* module.* in eval mode")
def test_lightning(tmp_path: pathlib.Path) -> None:
    expected = lightning_losses(llama(), tmp_path)
    model = cheap(llama())
    found = lightning_losses(model, tmp_path)
    assert len(found) == STEPS
    torch.testing.assert_close(found, expected, **CLOSE)
    check_dispatched(model, STEPS)
