"""Private fine-tuning by Hugging Face's Trainer: stopped half way, resumed, and the epsilon of the whole.

python examples/transformers_trainer.py --quick      # needs pip install 'sluice[transformers]'
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

from sluice.integrations import Privacy
from sluice.integrations.transformers import PrivateTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="20 releases instead of 200")
options = parser.parse_args()
steps = 20 if options.quick else 200

# Made-up texts of eight words, of which the first one gives the class away. All have one length: pad yours to one.
generator = torch.Generator().manual_seed(0)
labels = torch.arange(512) % 2
words = torch.randint(10, 50, (512, 8), generator=generator)
words[:, 0] = 1 + labels
texts = Dataset.from_dict({"input_ids": words.tolist(), "attention_mask": [[1] * 8] * 512, "labels": labels.tolist()})


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        control.should_training_stop = state.global_step == steps // 2


def trainer(folder: str, callbacks: list[TrainerCallback]) -> PrivateTrainer:
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=64,  # on average: batches are Poisson samples
        max_steps=steps,
        save_steps=steps // 2,
        learning_rate=5e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return PrivateTrainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=texts.select(range(384)),
        eval_dataset=texts.select(range(384, 512)),
        compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
        callbacks=callbacks,
        privacy=Privacy(target_epsilon=3.0, delta=1e-5, max_grad_norm=1.0),
    )


with tempfile.TemporaryDirectory() as folder:
    first = trainer(folder, [Stop()])
    first.train()
    print(f"stopped after {first.state.global_step} steps")

    second = trainer(folder, [])
    second.train(resume_from_checkpoint=True)
    accuracy = second.evaluate()["eval_accuracy"]

engine = second.privacy_engine
print(f"test accuracy {accuracy:.3f} after {second.state.global_step} steps, {engine.released} releases")
print(f"epsilon {engine.get_certified_epsilon(1e-5):.3f} at delta 1e-5")
