"""The Hugging Face Trainer with one line more: a sequence without targets costs one step, not the run.

Each sequence counts the same in the loss, however many of its tokens are targets. One has none: 0/0, so NaN.
Run: python examples/transformers_trainer.py
"""

import os
import tempfile
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is made here: nothing is to be asked for in the network

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, logging

import nanscan
from nanscan.integrations.transformers import wrap_trainer

VOCABULARY, LENGTH, PAD = 32, 16, 0


def make_data() -> list[dict[str, Tensor]]:
    """256 sequences that count in steps of 1, 2 or 3. The first few tokens of each are a prompt: no targets."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for row in range(256):
        start, step, prompt = (int(torch.randint(*span, (), generator=generator)) for span in ((1, 8), (1, 4), (2, 8)))
        ids = (torch.arange(LENGTH) * step + start) % (VOCABULARY - 1) + 1
        labels = ids.clone()
        labels[: LENGTH if row == 100 else prompt] = -100  # row 100 is all prompt
        data.append({"input_ids": ids, "labels": labels})
    return data


def loss_of_sequences(outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """The mean over sequences of the mean over their targets."""
    targets = labels[:, 1:]
    wanted = (targets != -100).float()
    scores = outputs["logits"][:, :-1].log_softmax(-1).gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)
    return -(scores * wanted / wanted.sum(1, keepdim=True)).sum(1).mean()


def train(guarded: bool, folder: str) -> Trainer:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=PAD, eos_token_id=PAD))
    arguments = TrainingArguments(
        folder,
        num_train_epochs=5,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        max_grad_norm=1.0,  # clipped once, in the pass that looks for NaN
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=make_data(), compute_loss_func=loss_of_sequences)
    trainer.remove_callback(PrinterCallback)  # the Trainer prints each entry otherwise
    if guarded:
        wrap_trainer(trainer)  # the one line
    trainer.train()
    return trainer


def main() -> None:
    logging.set_verbosity_error()
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)
    with tempfile.TemporaryDirectory() as folder:
        plain, guarded = train(False, folder), train(True, folder)
    finite = all(bool(weight.isfinite().all()) for weight in plain.model.parameters())
    print(f"plain:   weights finite: {finite}")
    optimizer = guarded.optimizer
    for report in optimizer.history:
        if report.skipped:
            print(f"guarded: step {report.step} skipped: {report.describe(2)}")
    entries = [entry for entry in guarded.state.log_history if entry.get("nanscan/consecutive_skips") == 0]
    entries, last = entries[:-1], entries[-2]  # the very last sums the training up
    print(f"guarded: skipped {last['nanscan/skipped_steps']} of {last['step']} steps")
    print(f"guarded: loss {entries[0]['loss']:.3f} -> {last['loss']:.3f}, gradient norm {last['grad_norm']:.3f}")


if __name__ == "__main__":
    main()
