from __future__ import annotations

import copy
import math

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs pip install 'sluice[transformers]'")

import torch.nn.functional as F  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

from sluice import PrivacyEngine  # noqa: E402
from sluice._base.errors import InputError, UnsupportedModuleError  # noqa: E402
from sluice.integrations import Privacy  # noqa: E402
from sluice.integrations.transformers import PrivateTrainer, record_losses  # noqa: E402
from sluice.mechanism.gates import CoinGate  # noqa: E402
from sluice.runs.ledger import read_ledger  # noqa: E402

LENGTH, RECORDS, BOUND = 6, 24, 0.05
SMALL = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert(task: str = "ForSequenceClassification", **settings: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, f"Bert{task}")(transformers.BertConfig(**{**SMALL, **settings}))


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    settings = {name: value for name, value in SMALL.items() if "dropout" not in name}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


class Texts(Dataset):
    def __init__(self, records: int = RECORDS) -> None:
        generator = torch.Generator().manual_seed(4)
        self.words = torch.randint(3, 30, (records, LENGTH), generator=generator)
        self.mask = torch.ones(records, LENGTH, dtype=torch.int64)
        self.mask[::3, -2:] = 0
        self.labels = self.words[:, 0] % 2

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[i], "attention_mask": self.mask[i], "labels": self.labels[i]}


def trainer(folder, *, model=None, privacy=None, data=None, callbacks=None, **arguments) -> PrivateTrainer:
    settings = {
        "per_device_train_batch_size": 8,
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "learning_rate": 0.05,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }
    return PrivateTrainer(
        model=model or bert(),
        args=transformers.TrainingArguments(str(folder), **settings),
        train_dataset=data or Texts(),
        callbacks=callbacks,
        privacy=privacy or Privacy(noise_multiplier=1.0, delta=1e-3, max_grad_norm=1.0, accountant="rdp", seed=1),
    )


def weights(run: PrivateTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


@pytest.mark.parametrize(
    ("model", "labels"),
    [
        (lambda: bert(), torch.tensor([0, 1, 1])),
        (lambda: bert(num_labels=1), torch.tensor([0.5, -1.0, 2.0])),
        (lambda: bert(num_labels=3), torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 0]])),
        (lambda: bert("ForTokenClassification", num_labels=3), "tokens"),
        (lambda: bert("ForMaskedLM"), "tokens"),
        (gpt2, "tokens"),
        (llama, "tokens"),
    ],
    ids=["classes", "regression", "multi-label", "tagging", "masked", "GPT-2", "Llama"],
)
def test_record_losses_are_the_models_own_for_a_batch_of_one(model, labels):
    model = model().eval()
    words = Texts().words[:3]
    if isinstance(labels, str):
        labels = words % 3
        labels[0, 2:] = -100
        labels[1, 1] = -100
    model.config.problem_type = None
    found = record_losses(model, model(input_ids=words), labels)
    model.config.problem_type = None
    for i in range(3):
        own = model(input_ids=words[i : i + 1], labels=labels[i : i + 1]).loss
        assert float(found[i]) == pytest.approx(float(own), rel=1e-5)


def test_a_model_with_another_loss_is_refused():
    model = bert("ForMultipleChoice")
    with pytest.raises(InputError, match="BertForMultipleChoice has a loss that is not known here"):
        record_losses(model, {"logits": torch.zeros(2, 3)}, torch.zeros(2, dtype=torch.int64))


def test_record_losses_of_answers():
    model = bert("ForQuestionAnswering").eval()
    words, start, end = Texts().words[:3], torch.tensor([0, 2, 9]), torch.tensor([1, 3, 9])
    found = record_losses(model, model(input_ids=words), {"start_positions": start, "end_positions": end})
    for i in range(2):
        one = slice(i, i + 1)
        own = model(input_ids=words[one], start_positions=start[one], end_positions=end[one]).loss
        assert float(found[i]) == pytest.approx(float(own), rel=1e-5)
    assert float(found[2]) == 0.0  # beyond the text: does not count


def test_one_step_is_the_clipped_sum_of_the_models_own_losses(tmp_path):
    privacy = Privacy(noise_multiplier=1e-6, delta=1e-3, max_grad_norm=BOUND, accountant="rdp", seed=1)
    run = trainer(
        tmp_path,
        privacy=privacy,
        max_steps=1,
        per_device_train_batch_size=RECORDS,
        learning_rate=1.0,
        optim="sgd",
        lr_scheduler_type="constant",
    )
    exact = copy.deepcopy(run.model).double()
    before = weights(run).double()
    total = torch.zeros_like(before)
    for record in Texts():
        exact.zero_grad()
        exact(**{name: value[None] for name, value in record.items()}).loss.backward()
        gradient = torch.cat(
            [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in exact.parameters()]
        )
        total += gradient * min(1.0, BOUND / float(gradient.norm()))
    run.train()
    assert torch.allclose(weights(run).double(), before - total / RECORDS, atol=1e-6)


@pytest.mark.parametrize("model", [bert, gpt2], ids=["BERT", "GPT-2"])
def test_an_ordinary_loop_by_keyword_is_exact(model):
    module = model()
    before = copy.deepcopy(module).double()
    engine = PrivacyEngine(seed=1, accountant="rdp")
    _, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        data_loader=Texts(),
        sample_rate=1.0,
        noise_multiplier=1e-6,
        max_grad_norm=BOUND,
        releases=1,
        max_physical_batch_size=7,
    )
    for batch in loader:
        labels = batch.pop("labels")
        outputs = module(**batch, use_cache=False) if model is gpt2 else module(**batch)
        F.cross_entropy(outputs.logits.reshape(len(labels), -1)[:, :2], labels).backward()
        optimizer.step()
    engine.close()
    total = 0.0
    for record in Texts():
        label = record.pop("labels")[None]
        before.zero_grad()
        logits = before(**{name: value[None] for name, value in record.items()}).logits
        F.cross_entropy(logits.reshape(1, -1)[:, :2], label).backward()
        gradient = torch.cat([p.grad.flatten() for p in before.parameters()])
        total = total + gradient * min(1.0, BOUND / float(gradient.norm()))
    expected = torch.cat([p.detach().flatten() for p in before.parameters()]) - total / RECORDS
    assert torch.allclose(torch.cat([p.detach().flatten() for p in module.parameters()]).double(), expected, atol=1e-6)


def test_a_loss_inside_the_model_is_refused_with_a_remedy():
    module = bert()
    engine = PrivacyEngine(seed=1, accountant="rdp")
    _, _, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        data_loader=Texts(),
        sample_rate=1.0,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        releases=1,
    )
    with pytest.raises(UnsupportedModuleError, match="Call the model without labels"):
        module(**next(iter(loader)))
    engine.close()


def test_a_seeded_run_resumes_bit_for_bit_with_its_schedule_and_gate(tmp_path):
    privacy = Privacy(
        noise_multiplier=1.0,
        delta=1e-3,
        max_grad_norm=1.0,
        accountant="rdp",
        seed=5,
        gate=CoinGate(probability=0.5),
        max_physical_batch_size=4,
    )
    whole = trainer(tmp_path / "whole", privacy=privacy)
    whole.train()
    assert whole.state.global_step == whole.privacy_engine.released == 6
    rates = [entry["learning_rate"] for entry in whole.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.05 * (6 - step) / 6 for step in range(6)])

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 3

    trainer(tmp_path / "parts", privacy=privacy, callbacks=[Stop()]).train()
    second = trainer(tmp_path / "parts", privacy=privacy)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(whole), weights(second))
    assert second.state.global_step == second.privacy_engine.released == 6
    certified = second.privacy_engine.get_certified_epsilon(1e-3)
    assert certified == whole.privacy_engine.get_certified_epsilon(1e-3)
    assert certified == second.privacy_engine.get_epsilon(1e-3)


def test_releases_that_a_crash_took_stay_charged(tmp_path):
    privacy = Privacy(noise_multiplier=1.0, delta=1e-3, max_grad_norm=1.0, accountant="rdp")

    class Crash(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 5:
                raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        trainer(tmp_path, privacy=privacy, callbacks=[Crash()]).train()
    run = trainer(tmp_path, privacy=privacy)
    run.train(resume_from_checkpoint=True)
    assert run.privacy_engine.released == 4  # three kept, two lost, one left
    assert read_ledger(tmp_path / "ledger.jsonl").spent == 6


def test_losses_of_training_records_and_times_are_not_told(tmp_path):
    run = trainer(tmp_path)
    told = [run.train().metrics, *run.state.log_history]
    sensitive = ("loss", "grad_norm", "runtime", "per_second")
    assert not [name for entry in told for name in entry if any(word in name for word in sensitive)]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "one step is one release"),
        ({"bf16": True}, "norms are measured"),
        ({"label_smoothing_factor": 0.1}, "smoother averages over the batch"),
        ({"auto_find_batch_size": True}, "batch size is part of what is promised"),
    ],
)
def test_settings_that_would_be_wrong_are_refused(tmp_path, setting, message):
    with pytest.raises(InputError, match=message):
        trainer(tmp_path, **setting)


def test_a_folder_of_another_run_and_a_second_run_are_refused(tmp_path):
    run = trainer(tmp_path)
    run.train()
    with pytest.raises(InputError, match="train was called before"):
        run.train()
    with pytest.raises(InputError, match="holds the ledger of an earlier run"):
        trainer(tmp_path).train()


def test_an_overridden_loss_is_refused_and_a_given_one_is_used(tmp_path):
    class Own(PrivateTrainer):
        def compute_loss(self, *args, **kwargs):
            raise AssertionError

    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], max_steps=2, disable_tqdm=True
    )
    privacy = Privacy(noise_multiplier=1.0, delta=1e-3, max_grad_norm=1.0, accountant="rdp", seed=1)
    with pytest.raises(InputError, match="compute_loss was overridden"):
        Own(model=bert(), args=arguments, train_dataset=Texts(), privacy=privacy)
    seen = []

    def loss(outputs, labels, num_items_in_batch=None):
        seen.append(len(labels))
        return record_losses(model, outputs, labels).mean()

    model = bert()
    PrivateTrainer(model=model, args=arguments, train_dataset=Texts(), privacy=privacy, compute_loss_func=loss).train()
    assert seen


def test_padding_to_the_longest_record_is_refused(tmp_path):
    data = [{"input_ids": [5] * (3 + i % 4), "labels": i % 2} for i in range(RECORDS)]

    def longest(rows):
        length = max(len(row["input_ids"]) for row in rows)
        words = [row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows]
        return {"input_ids": torch.tensor(words), "labels": torch.tensor([row["labels"] for row in rows])}

    run = trainer(tmp_path, data=data, per_device_train_batch_size=4)
    run.data_collator = longest
    with pytest.raises(InputError, match="Pad all records to one length"):
        run.train()


def test_epochs_say_how_many_releases_there_are(tmp_path):
    run = trainer(tmp_path, max_steps=-1, num_train_epochs=1.5)
    run.train()
    assert run.privacy_engine.released == run.state.global_step == math.ceil(1.5 * RECORDS / 8)


def test_adapters_of_peft_train_alone_and_resume(tmp_path):
    peft = pytest.importorskip("peft", reason="needs pip install 'sluice[integrations]'")

    def adapted() -> torch.nn.Module:
        settings = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
        return peft.get_peft_model(bert(), settings)

    whole = trainer(tmp_path, model=adapted())
    before = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    whole.train()
    changed = {name for name, p in whole.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all("lora" in name or "modules_to_save" in name for name in changed)
    second = trainer(tmp_path, model=adapted())
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(weights(whole), weights(second))


def test_a_stream_of_records_is_refused(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield Texts()[0]

    with pytest.raises(InputError, match="cannot be sampled by index"):
        trainer(tmp_path, data=Stream()).train()
