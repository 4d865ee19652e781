"""Forty public architectures, one of them with two kinds of batches, each built from a small configuration, with a batch of random inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LENGTH, VOCABULARY, PIXELS = 8, 40, 32
Built = tuple[nn.Module, Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model, as ``build(rows)`` gives it with a batch.

    Attributes:
        fixed: whether layers that mix records are replaced by `sluice.gradients.fix` first.
    """

    name: str
    source: str
    build: Callable[[int], Built]
    fixed: bool = False


def words(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)}


def masked_words(rows: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, LENGTH, dtype=torch.int64)
    mask[::2, LENGTH - 2 :] = 0
    return {**words(rows), "attention_mask": mask}


def images(rows: int, *, size: int = PIXELS) -> Tensor:
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(1))


def pixel_values(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": images(rows)}


def both_sides(rows: int) -> dict[str, Tensor]:
    return {**masked_words(rows), "decoder_input_ids": words(rows)["input_ids"]}


def both_sides_unmasked(rows: int) -> dict[str, Tensor]:
    return {**both_sides(rows), "attention_mask": torch.ones(rows, LENGTH, dtype=torch.int64)}


_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "image_size": PIXELS,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def hugging_face(
    kind: str, task: str, inputs: Callable[[int], dict[str, Tensor]], **settings: Any
) -> Callable[[int], Built]:
    """A model of transformers by the name of its configuration's type and of its head."""

    def build(rows: int) -> Built:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**settings)
        config.use_cache = False
        config._experts_implementation = "eager"  # the other one has no float64, which the oracle needs
        for name, value in vars(config).items():
            if any(part in name for part in ("dropout", "pdrop", "drop_path")) and isinstance(value, float):
                setattr(config, name, 0.0)
        return getattr(transformers, f"{kind}{task}")(config), inputs(rows)

    return build


def text(kind: str, task: str = "ForSequenceClassification", **settings: Any) -> Callable[[int], Built]:
    return hugging_face(kind, task, masked_words, **{**_TEXT, **settings})


def t5(inputs: Callable[[int], dict[str, Tensor]]) -> Callable[[int], Built]:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return hugging_face("T5", "ForConditionalGeneration", inputs, **sizes)


def vision(kind: str, **settings: Any) -> Callable[[int], Built]:
    return hugging_face(kind, "ForImageClassification", pixel_values, **{**_VISION, **settings})


def from_timm(name: str, **settings: Any) -> Callable[[int], Built]:
    def build(rows: int) -> Built:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=4, **settings), (images(rows),)

    return build


def mixer(rows: int) -> Built:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(img_size=PIXELS, patch_size=8, num_blocks=2, embed_dim=32, num_classes=4), (images(rows),)


def adapted(config: str, *, on: Callable[[int], Built], **settings: Any) -> Callable[[int], Built]:
    """A model with one of peft's adapters, which alone is trained; adapters that begin at zero are moved off it."""

    def build(rows: int) -> Built:
        import peft

        model, x = on(rows)
        private = peft.get_peft_model(model, getattr(peft, config)(**settings))
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in private.parameters():
                if p.requires_grad:
                    p += 0.02 * torch.randn(p.shape, generator=generator)
        return private, x

    return build


class Tagger(nn.Module):
    """A recurrent net over words, the last state of which is classified."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.recurrent = kind(16, 24, batch_first=True)  # type: ignore[call-arg]
        self.head = nn.Linear(24, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(input_ids))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.positions = nn.Parameter(torch.randn(1, LENGTH, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(input_ids) + self.positions).mean(1))


def convolutional(rows: int) -> Built:
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(16, 32, 3), nn.ReLU())
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 36, 4)), (images(rows),)


def recurrent(kind: type[nn.RNNBase]) -> Callable[[int], Built]:
    return lambda rows: (Tagger(kind), words(rows))


def encoder(rows: int) -> Built:
    return Encoder(), words(rows)


_BERT, _GPT2 = text("Bert"), text("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=32)
_LLAMA = text("Llama", num_key_value_heads=2)
_ATTENTION = ["query", "value"]
_DEPTHS: dict[str, Any] = {"depths": [1, 1, 1, 1]}


def _entry(source: str) -> Callable[..., Entry]:
    return lambda name, build, fixed=False: Entry(name=name, source=source, build=build, fixed=fixed)


_hf, _timm, _torch, _peft = (_entry(source) for source in ("transformers", "timm", "torch.nn", "peft"))

ENTRIES: tuple[Entry, ...] = (
    _hf("BERT", _BERT),
    _hf("RoBERTa", text("Roberta")),
    _hf("DistilBERT", text("DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=64)),
    _hf("ALBERT", text("Albert", embedding_size=16)),
    _hf("ELECTRA", text("Electra", embedding_size=16)),
    _hf("DeBERTa v2", text("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"])),
    _hf("MPNet", text("MPNet")),
    _hf("ModernBERT", text("ModernBert", global_attn_every_n_layers=2)),
    _hf("GPT-2", _GPT2),
    _hf("GPT-NeoX", text("GPTNeoX")),
    _hf("OPT", text("OPT", ffn_dim=64, word_embed_proj_dim=32)),
    _hf("BLOOM", text("Bloom", n_layer=2, n_head=4)),
    _hf("Llama", _LLAMA),
    _hf("Mistral", text("Mistral", num_key_value_heads=2)),
    _hf("Qwen2", text("Qwen2", num_key_value_heads=2)),
    _hf("Gemma", text("Gemma", num_key_value_heads=2, head_dim=8)),
    _hf("Phi", text("Phi", task="ForCausalLM")),
    _hf("Mixtral (sparse experts)", text("Mixtral", num_key_value_heads=2, num_local_experts=4)),
    _hf("Mamba", text("Mamba", task="ForCausalLM", state_size=4)),
    _hf("T5", t5(both_sides)),
    _hf("T5, nothing masked", t5(both_sides_unmasked)),
    _hf(
        "BART",
        hugging_face(
            "Bart",
            "ForConditionalGeneration",
            both_sides,
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=32,
        ),
    ),
    _hf("ViT", vision("ViT")),
    _hf("BEiT", vision("Beit")),
    _hf(
        "Swin",
        hugging_face(
            "Swin",
            "ForImageClassification",
            pixel_values,
            image_size=PIXELS,
            patch_size=4,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=4,
        ),
    ),
    _timm(
        "ViT-Tiny", from_timm("vit_tiny_patch16_224", img_size=PIXELS, patch_size=8, embed_dim=32, depth=2, num_heads=4)
    ),
    _timm("ConvNeXt", from_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 32, 64))),
    _timm(
        "Swin-Tiny",
        from_timm(
            "swin_tiny_patch4_window7_224",
            img_size=PIXELS,
            window_size=4,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 2),
            drop_path_rate=0.0,
        ),
    ),
    _timm("MLP-Mixer", mixer),
    _timm("ResNet-18", from_timm("resnet18")),
    _timm("ResNet-18", from_timm("resnet18"), fixed=True),
    _timm("EfficientNet-B0", from_timm("efficientnet_b0"), fixed=True),
    _torch("convolutional net", convolutional),
    _torch("LSTM", recurrent(nn.LSTM)),
    _torch("GRU", recurrent(nn.GRU)),
    _torch("TransformerEncoder", encoder),
    _peft(
        "BERT with LoRA",
        adapted("LoraConfig", on=_BERT, r=4, target_modules=_ATTENTION, modules_to_save=["classifier"]),
    ),
    _peft("BERT with DoRA", adapted("LoraConfig", on=_BERT, r=4, target_modules=_ATTENTION, use_dora=True)),
    _peft("BERT with IA3", adapted("IA3Config", on=_BERT, target_modules=_ATTENTION, feedforward_modules=[])),
    _peft(
        "GPT-2 with prompt tuning", adapted("PromptTuningConfig", on=_GPT2, task_type="SEQ_CLS", num_virtual_tokens=4)
    ),
    _peft(
        "Llama with LoRA",
        adapted("LoraConfig", on=_LLAMA, r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS"),
    ),
)
