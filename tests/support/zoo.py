"""HuggingFace's families in tiny configurations: gradients of every transform beside plain torch's.

    make zoo

Fails where a result differs, or an error is not one of torchard's own. Refusals are listed by name.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchard import Mesh, MeshTensor, P, checkpoint, functionalize, jit, place, shard, tree

# LLaVA compares numbers of image tokens, which are values.
os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")

BATCH, LENGTH, VOCAB, PIXELS = 4, 6, 32, 32
LIMIT = 60  # seconds for one check


@dataclass(frozen=True)
class Family:
    """A tiny model and a batch for it.

    Attributes:
        model: the class of transformers.
        config: the class of its configuration.
        sizes: what the configuration is given.
        inputs: the batch, made anew.
        out: the result that is differentiated.
        layers: the path of a list of equal layers, if the model has one.
        more: what else the configuration is given.
        dtype: of parameters and gradients.
        cache: whether the model takes use_cache without naming it.
    """

    model: str
    config: str
    sizes: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    out: str = "logits"
    layers: str = ""
    more: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    cache: bool = False

    def build(self) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**{**self.sizes, **self.more})
        module = getattr(transformers, self.model)(config).to(self.dtype).eval()
        for parameter in module.parameters():  # zeros and ones would hide what is dropped
            nn.init.normal_(parameter, std=0.2)
        return module


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(BATCH * LENGTH).mul(7).remainder(VOCAB - 4).add(3).reshape(BATCH, LENGTH)
    return {"input_ids": ids}


def pixels() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"pixel_values": torch.randn(BATCH, 3, PIXELS, PIXELS).double()}


def both() -> dict[str, Tensor]:
    return {**tokens(), **pixels()}


def with_mask() -> dict[str, Tensor]:
    ids = tokens()["input_ids"]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def seq2seq() -> dict[str, Tensor]:
    return {**tokens(), "decoder_input_ids": tokens()["input_ids"].flip(1)}


def speech() -> dict[str, Tensor]:
    torch.manual_seed(1)
    mel = torch.randn(BATCH, 8, 16).double()
    return {"input_features": mel, "decoder_input_ids": tokens()["input_ids"]}


def wave() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"input_values": torch.randn(BATCH, 400).double()}


def image_tokens() -> dict[str, Tensor]:
    """One image of four patches in each row."""
    ids = tokens()["input_ids"].clone()
    ids[:, 1:5] = VOCAB - 1
    return {"input_ids": ids, **pixels()}


LLAMA = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": VOCAB},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
BERT = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": VOCAB},
    **{"num_attention_heads": 4, "max_position_embeddings": 16, "pad_token_id": 0},
}
BART = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": VOCAB},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0},
    **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 2},
}
VIT = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": PIXELS, "patch_size": 16},
}
CLIP = {
    "text_config": {**BERT, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": VIT,
}
SINGLE = torch.float32  # what torch's grouped products of experts take
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 4}
DEEPSEEK = {
    **{"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4},
    **{"qk_rope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24},
}
SWIN = {
    **{"image_size": PIXELS, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]},
    **{"window_size": 4},
}
SEGFORMER = {
    **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]},
    **{"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2]},
    **{"mlp_ratios": [2, 2], "decoder_hidden_size": 16},
}
PERCEIVER = {
    **{"num_latents": 4, "d_latents": 16, "d_model": 16, "num_blocks": 1, "vocab_size": VOCAB},
    **{"num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
    **{"max_position_embeddings": LENGTH},
}
WAV = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 8], "vocab_size": VOCAB},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2},
}
RESNET = {
    **{"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    **{"out_features": ["stage2"], "num_labels": 3},
}
DETR = {
    **{"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 4},
    **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
}
LLAVA_VISION = {**VIT, "model_type": "clip_vision_model", "projection_dim": 16}


def decoder(name: str, layers: str = "model.layers", **more: Any) -> Family:
    return Family(f"{name}ForCausalLM", f"{name}Config", LLAMA, tokens, layers=layers, more=more)


def experts(name: str, layers: str = "model.layers", **more: Any) -> Family:
    return replace(decoder(name, layers, **more), dtype=SINGLE)


def encoder(name: str, layers: str, **more: Any) -> Family:
    return Family(f"{name}ForMaskedLM", f"{name}Config", BERT, tokens, layers=layers, more=more)


def detr() -> dict[str, Any]:
    import transformers

    return {**DETR, "backbone_config": transformers.ResNetConfig(**RESNET)}


def llava() -> dict[str, Any]:
    text = {**LLAMA, "model_type": "llama"}
    more = {"image_token_id": VOCAB - 1, "vision_feature_layer": -1}
    return {"text_config": text, "vision_config": LLAVA_VISION, **more}


FALCON = {"new_decoder_architecture": False, "multi_query": False, "num_key_value_heads": 4}
FAMILIES: dict[str, Callable[[], Family]] = {
    "GPT-2": lambda: Family("GPT2LMHeadModel", "GPT2Config", {
        "n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 16,
        "bos_token_id": 1, "eos_token_id": 2}, tokens, layers="transformer.h"),
    "Llama": lambda: decoder("Llama"),
    "Mistral": lambda: decoder("Mistral", sliding_window=4),
    "Qwen2": lambda: decoder("Qwen2"),
    "Qwen3": lambda: decoder("Qwen3", head_dim=4),
    "Qwen3-MoE": lambda: experts("Qwen3Moe", **MOE),
    "Gemma": lambda: decoder("Gemma", head_dim=4),
    "Gemma 2": lambda: decoder("Gemma2", head_dim=4, query_pre_attn_scalar=4, sliding_window=4),
    "Phi": lambda: decoder("Phi"),
    "Phi-3": lambda: decoder("Phi3"),
    "Mixtral": lambda: experts("Mixtral", num_local_experts=4),
    "DeepSeek-V3": lambda: experts("DeepseekV3", "", **DEEPSEEK),
    "OLMo 2": lambda: decoder("Olmo2"),
    "StableLM": lambda: decoder("StableLm"),
    "GPT-NeoX": lambda: decoder("GPTNeoX", "gpt_neox.layers"),
    "Falcon": lambda: decoder("Falcon", "transformer.h", **FALCON),
    "OPT": lambda: decoder("OPT", "model.decoder.layers", ffn_dim=24, word_embed_proj_dim=16),
    "BLOOM": lambda: Family("BloomForCausalLM", "BloomConfig", {
        "hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}, with_mask, layers="transformer.h"),
    "Mamba": lambda: Family("MambaForCausalLM", "MambaConfig", {
        "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "vocab_size": VOCAB, "expand": 2,
        "time_step_rank": 2, "pad_token_id": 0}, tokens, layers="backbone.layers"),
    "BART": lambda: Family("BartForConditionalGeneration", "BartConfig", BART, seq2seq,
                           layers="model.decoder.layers"),
    "T5": lambda: Family("T5ForConditionalGeneration", "T5Config", {
        "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB,
        "pad_token_id": 0, "decoder_start_token_id": 0}, seq2seq),
    "Whisper": lambda: Family("WhisperForConditionalGeneration", "WhisperConfig", {
        **BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}, speech,
        layers="model.encoder.layers"),
    "BERT": lambda: encoder("Bert", "bert.encoder.layer"),
    "RoBERTa": lambda: encoder("Roberta", "roberta.encoder.layer"),
    "ALBERT": lambda: encoder("Albert", "", embedding_size=8),
    "DeBERTa-v2": lambda: encoder("DebertaV2", "deberta.encoder.layer", relative_attention=True,
                                  pos_att_type=["p2c", "c2p"]),
    "BigBird": lambda: encoder("BigBird", "bert.encoder.layer", attention_type="original_full"),
    "Perceiver": lambda: Family("PerceiverForMaskedLM", "PerceiverConfig", PERCEIVER, tokens),
    "ViT": lambda: Family("ViTForImageClassification", "ViTConfig", VIT, pixels),
    "CLIP": lambda: Family("CLIPModel", "CLIPConfig", {**CLIP, "projection_dim": 16}, both,
                           "logits_per_image", "text_model.encoder.layers"),
    "SigLIP": lambda: Family("SiglipModel", "SiglipConfig", CLIP, both, "logits_per_image",
                             "vision_model.encoder.layers"),
    "ConvNeXt": lambda: Family("ConvNextForImageClassification", "ConvNextConfig", {
        "num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}, pixels),
    "ResNet": lambda: Family("ResNetForImageClassification", "ResNetConfig", RESNET, pixels),
    "DETR": lambda: Family("DetrForObjectDetection", "DetrConfig", detr(), pixels,
                           layers="model.decoder.layers"),
    "Swin": lambda: Family("SwinForImageClassification", "SwinConfig", SWIN, pixels),
    "SegFormer": lambda: Family("SegformerForSemanticSegmentation", "SegformerConfig", SEGFORMER, pixels),
    "wav2vec 2": lambda: Family("Wav2Vec2ForCTC", "Wav2Vec2Config", WAV, wave,
                                layers="wav2vec2.encoder.layers"),
    "LLaVA": lambda: Family("LlavaForConditionalGeneration", "LlavaConfig", llava(), image_tokens,
                            layers="model.language_model.layers", cache=True),
}  # fmt: skip


# -- checks -----------------------------------------------------------------------------------------


class Case:
    """A family's function, and what plain torch makes of the module."""

    def __init__(self, family: Family) -> None:
        self.family, self.inputs = family, family.inputs()
        self.module = family.build()
        self.whole, self.params = functionalize(self.module)
        self.fn = self.uncached(self.whole)
        self.loss(lambda p, **given: self.module(**given))(None, self.inputs).backward()
        trained = {k: p for k, p in self.module.named_parameters() if p.requires_grad}
        self.gradients = {k: given(p.grad, p) for k, p in trained.items()}

    @property
    def caches(self) -> bool:
        return "use_cache" in signature(self.module.forward).parameters or bool(self.family.cache)

    def uncached(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function without a cache of keys and values, where there is one by default."""
        return functools.partial(fn, use_cache=False) if self.caches else fn

    def loss(self, fn: Callable[..., Any]) -> Callable[..., Tensor]:
        def run(params: Any, inputs: dict[str, Tensor]) -> Tensor:
            return fn(params, **inputs)[self.family.out].sin().sum()

        run.__name__ = "loss"
        return run

    @classmethod
    def single(cls, name: str) -> Case:
        """A family's case in single precision, as for timing."""
        tiny = FAMILIES[name]()
        inputs = tree.map(lambda x: x.float() if x.dtype == torch.float64 else x, tiny.inputs())
        return cls(replace(tiny, dtype=torch.float32, inputs=lambda: inputs))

    def compare(self, have: Any, want: dict[str, Tensor] | None = None) -> str:
        want = self.gradients if want is None else want
        size = max(float(value.abs().max()) for value in want.values())
        rtol, atol = (1e-4, 1e-6) if self.family.dtype == torch.float64 else (2e-2, 1e-4)
        for name, value in want.items():
            got = full(have[name])
            if not torch.allclose(got, value.to(got.dtype), rtol=rtol, atol=atol * size):
                off = float((got - value).abs().max())
                return f"wrong: {name} is off by {off:.1e} of {size:.1e}"
        return "equal"


def given(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient


def full(value: Any) -> Tensor:
    return value.full() if isinstance(value, MeshTensor) else value


def plain(case: Case) -> str:
    params = {k: p.clone().requires_grad_() for k, p in case.params.items()}
    case.loss(case.fn)(params, case.inputs).backward()
    return case.compare({k: given(p.grad, p) for k, p in params.items()})


def jitted(case: Case) -> str:
    run = jit(torch.func.grad(case.loss(case.fn)), backend="eager")
    return case.compare(run(case.params, case.inputs))


def checkpointed(case: Case) -> str:
    run = jit(torch.func.grad(checkpoint(case.loss(case.fn))), backend="eager")
    return case.compare(run(case.params, case.inputs))


def cached(case: Case) -> str:
    """With the cache that is the default of decoders, over a split batch."""
    if not case.caches:
        return "–"
    mesh = Mesh({"dp": 2}, virtual=True)
    run = shard(torch.func.grad(case.loss(case.whole)), mesh)
    return case.compare(run(place(case.params, mesh, P()), place(case.inputs, mesh, P("dp"))))


def sharded(axes: dict[str, int], over: str) -> Callable[[Case], str]:
    """Parameters that can be are split over an axis, and the batch over dp."""

    def check(case: Case) -> str:
        mesh = Mesh(axes, virtual=True)
        specs = {
            k: P(over) if p.ndim and p.shape[0] % axes[over] == 0 else P()
            for k, p in case.params.items()
        }
        run = shard(torch.func.grad(case.loss(case.fn)), mesh)
        return case.compare(
            run(place(case.params, mesh, specs), place(case.inputs, mesh, P("dp")))
        )

    return check


def stacked(case: Case) -> str:
    if not case.family.layers:
        return "–"
    fn, params = functionalize(case.module, stacked=case.family.layers)
    run = jit(torch.func.grad(case.loss(case.uncached(fn))), backend="eager")
    return case.compare(run(params, case.inputs), fn.stack(case.gradients))


def hidden_states(case: Case) -> str:
    """Three calls of the function, traced and plain, and three of the module."""
    fn, params = functionalize(case.family.build())
    module, given = case.family.build(), {**case.inputs, "output_hidden_states": True}
    run = jit(lambda p, x: fn(p, **x, output_hidden_states=True), backend="eager")
    wanted = states(module(**given))
    if not wanted:
        return "–"
    for _ in range(3):
        wanted = states(module(**given))
        for have in (states(fn(params, **given)), states(run(params, case.inputs))):
            if len(have) != len(wanted):
                return f"wrong: {len(have)} states for {len(wanted)}"
            pairs = zip(have, wanted, strict=True)
            if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs):
                return "wrong: states differ"
    return "equal"


def states(out: Any) -> list[Tensor]:
    found = [value for key, value in out.items() if "hidden_states" in key]
    return [leaf for leaf in tree.leaves(found) if isinstance(leaf, Tensor)]


CHECKS: dict[str, Callable[[Case], str]] = {
    "functionalize": plain,
    "jit": jitted,
    "checkpoint": checkpointed,
    "dp × tp": sharded({"dp": 2, "tp": 2}, "tp"),
    "fully sharded": sharded({"dp": 4}, "dp"),
    "with a cache": cached,
    "stacked": stacked,
    "hidden states": hidden_states,
}


# -- the table --------------------------------------------------------------------------------------


class TimeUp(Exception):
    """A check took longer than its limit."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeUp(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(check: Callable[[Case], str], case: Case) -> str:
    """``equal``, ``–`` (does not apply), ``refused: ...``, ``wrong: ...`` or ``error: ...``."""
    try:
        with within(LIMIT):
            return check(case)
    except Exception as error:
        kind = "refused" if type(error).__module__.startswith("torchard") else "error"
        text = " ".join(str(error).split())
        return f"{kind}: {type(error).__name__}: {text[:300]}"


def rows(names: list[str], checks: list[str]) -> Iterator[tuple[str, list[str], float]]:
    for name in names:
        began = time.monotonic()
        try:
            case = Case(FAMILIES[name]())
            found = [outcome(CHECKS[check], case) for check in checks]
        except Exception as error:
            found = [f"error: {type(error).__name__}: {' '.join(str(error).split())[:300]}"]
            found *= len(checks)
        yield name, found, time.monotonic() - began


ABOUT = """# HuggingFace's models

Tiny configurations of transformers {version}, as `make zoo` ran them with torch {torch}: gradients of all
parameters beside plain torch's, with split batches and parameters on virtual meshes, and
`output_hidden_states=True` three times. "–": the model has no cache, no list of equal layers, or no
hidden states.

"""


def table(found: list[tuple[str, list[str], float]], checks: list[str]) -> str:
    notes: list[str] = []
    lines = [f"| family | {' | '.join(checks)} | s |", "|---" * (len(checks) + 1) + "|---:|"]
    for name, cells, seconds in found:
        shown = [cell.partition(":")[0] for cell in cells]
        lines.append(f"| {name} | {' | '.join(shown)} | {seconds:.0f} |")
        notes += [f"- {name}, {check}: {cell}" for check, cell in zip(checks, cells, strict=True)
                  if ":" in cell]  # fmt: skip
    return "\n".join([*lines, "", *(["## What is not equal", ""] if notes else []), *notes, ""])


def main() -> int:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="families whose names have this in them")
    parser.add_argument("--checks", default="", help="checks whose names have this in them")
    parser.add_argument("--out", help="the file that the table is written to")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = [name for name in FAMILIES if given.only.lower() in name.lower()]
    checks = [check for check in CHECKS if given.checks in check]
    found = []
    for row in rows(names, checks):
        print(row[0], f"{row[2]:.0f} s", *(cell[:160] for cell in row[1]), sep=" | ", flush=True)
        found.append(row)
    if given.out:
        about = ABOUT.format(version=transformers.__version__, torch=torch.__version__)
        Path(given.out).write_text(about + table(found, checks))
    cells = [cell for _, row, _ in found for cell in row]
    return int(any(cell.startswith(("wrong", "error")) for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
