"""A table of model families: their tokenizers, and what their chat templates do with messages.

`test_families.py` tests each of these statements about a template.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from support import family_tokens as tokens
from support.vocabularies import DEEPSEEK3, GPT2, LLAMA3, O200K, QWEN2, QWEN3_5, Kind, Prefix


@dataclass(frozen=True)
class Family:
    """The properties of a model family.

    Attributes:
        name: the key in `FAMILIES`.
        template: a file's name in TRL's `chat_templates`, or in `templates/`.
        kind: the kind of vocabulary.
        added: the added tokens: (special, not special).
        eos: the tokenizer's `eos_token`. It does not end a turn in every family: see `end_ids`.
        end_ids: the tokens of `eos_token_id` in the model's generation config.
        bos: the token that begins a text, if the family has one.
        pad: the tokenizer's `pad_token`, if it has one.
        adds_bos: encoding with `add_special_tokens=True` puts `bos` first.
        rstrip: added tokens that absorb the white space after them.
        split: the patterns of pre-tokenization, for byte-level vocabularies.
        prefix: the space before a text, for SentencePiece vocabularies.
        nfc: text is normalized (NFC) before it is encoded.
        owned: plain text that reads like a control token becomes it, even without added tokens.
        system: the template takes a system message.
        tools: the template shows the tools. If not, it drops them without an error.
        calls: the template writes structured calls. If not, it drops them without an error.
        results: what the template does with the text of a tool's result.
        parallel: two calls in a message: both are written, all but the first dropped, or refused.
        tool_then_user: a user message may follow a tool's result.
        alternates: two user messages in a row are refused.
        needs_user: a conversation without a user message is refused.
        arguments: the type of a call's arguments in messages: an object or its JSON text.
        rounds_alike: a second round of call and result is written like the first.
        thinking: the template's default for `enable_thinking`; `None`: it has no such variable.
        dated: the prompt contains today's date.
    """

    name: str
    template: str
    kind: Kind
    added: tokens.Added
    eos: str
    end_ids: tuple[str, ...]
    bos: str | None = None
    pad: str | None = None
    adds_bos: bool = False
    rstrip: tuple[str, ...] = ()
    split: tuple[str, ...] = QWEN2
    prefix: Prefix = "none"
    nfc: bool = False
    owned: bool = False
    system: bool = True
    tools: bool = True
    calls: bool = True
    results: Literal["verbatim", "trimmed", "json", "dropped", "refused"] = "verbatim"
    parallel: Literal["yes", "dropped", "refused"] = "yes"
    tool_then_user: bool = True
    alternates: bool = False
    needs_user: bool = False
    arguments: Literal["object", "text"] = "object"
    rounds_alike: bool = True
    thinking: bool | None = None
    dated: bool = False

    @property
    def special(self) -> tuple[str, ...]:
        return self.added[0]

    @property
    def tags(self) -> tuple[str, ...]:
        return self.added[1]


_QWEN2_5 = Family(
    name="qwen2_5",
    template="qwen2_5.jinja",
    kind="byte_level",
    added=tokens.QWEN2_5,
    eos="<|im_end|>",
    end_ids=("<|im_end|>", "<|endoftext|>"),
    pad="<|endoftext|>",
    nfc=True,
)
_QWEN3 = replace(
    _QWEN2_5,
    name="qwen3",
    template="qwen3.jinja",
    added=tokens.QWEN3,
    thinking=True,
)
_QWEN3_5 = replace(
    _QWEN3,
    name="qwen3_5_think",
    template="qwen3_5_think.jinja",
    added=tokens.QWEN3_5,
    split=QWEN3_5,
    results="trimmed",
    needs_user=True,
)
_CHATML = replace(
    _QWEN2_5,
    name="chatml",
    template="chatml.jinja",
    added=tokens.CHATML,
    nfc=False,
    calls=False,
)

_LLAMA3 = Family(
    name="llama3",
    template="llama3.jinja",
    kind="tiktoken",
    added=tokens.LLAMA3,
    eos="<|eot_id|>",
    end_ids=("<|end_of_text|>", "<|eot_id|>"),
    bos="<|begin_of_text|>",
    adds_bos=True,
    split=LLAMA3,
    tools=False,
    calls=False,
    results="trimmed",
)
_LLAMA3_1 = replace(
    _LLAMA3,
    name="llama3_1",
    template="llama3_1.jinja",
    added=tokens.LLAMA3_1,
    end_ids=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    pad="<|finetune_right_pad_id|>",
    tools=True,
    calls=True,
    results="json",
    parallel="refused",
)

_GLM4MOE = Family(
    name="glm4moe",
    template="glm4moe.jinja",
    kind="byte_level",
    added=tokens.GLM4,
    eos="<|endoftext|>",
    end_ids=("<|endoftext|>", "<|user|>", "<|observation|>"),
    pad="<|endoftext|>",
    split=LLAMA3,
    thinking=True,
)

_GEMMA3 = Family(
    name="gemma3",
    template="gemma3.jinja",
    kind="sentencepiece_bpe",
    added=tokens.GEMMA3,
    eos="<eos>",
    end_ids=("<eos>", "<end_of_turn>"),
    bos="<bos>",
    pad="<pad>",
    adds_bos=True,
    tools=False,
    calls=False,
    results="refused",
    tool_then_user=False,
    alternates=True,
)
_GEMMA4 = replace(
    _GEMMA3,
    name="gemma4",
    template="gemma4_v5.jinja",
    added=tokens.GEMMA4,
    end_ids=("<eos>", "<turn|>", "<|tool_response>"),
    tools=True,
    calls=True,
    results="verbatim",
    tool_then_user=True,
    alternates=False,
    thinking=False,
)

_GPTOSS = Family(
    name="gptoss",
    template="gptoss.jinja",
    kind="tiktoken",
    added=tokens.GPTOSS,
    eos="<|return|>",
    end_ids=("<|return|>", "<|endoftext|>", "<|call|>"),
    bos="<|startoftext|>",
    pad="<|endoftext|>",
    split=O200K,
    results="json",
    parallel="dropped",
    dated=True,
)

_DEEPSEEKV3 = Family(
    name="deepseekv3",
    template="deepseekv3.jinja",
    kind="byte_level",
    added=tokens.DEEPSEEK3,
    eos="<｜end▁of▁sentence｜>",
    end_ids=("<｜end▁of▁sentence｜>",),
    bos="<｜begin▁of▁sentence｜>",
    pad="<｜end▁of▁sentence｜>",
    adds_bos=True,
    split=DEEPSEEK3,
    tools=False,
    arguments="text",
    rounds_alike=False,
)
# Its template writes tool tokens that the tokenizer, made from Qwen2.5's, does not have: they are
# plain text. Calls are written only where the content is None, a key that transformers removes.
_DEEPSEEK_R1_DISTILL = replace(
    _DEEPSEEKV3,
    name="deepseek_r1_distill",
    template="deepseek_r1_distill.jinja",
    added=tokens.DEEPSEEK_R1_DISTILL,
    split=QWEN2,
    calls=False,
)

_PHI3 = Family(
    name="phi3",
    template="phi3.jinja",
    kind="sentencepiece_bpe",
    added=tokens.PHI3,
    eos="<|endoftext|>",
    end_ids=("<|endoftext|>", "<|assistant|>", "<|end|>"),
    bos="<s>",
    pad="<|endoftext|>",
    rstrip=tokens.PHI3_RSTRIP,
    prefix="legacy",
    tools=False,
    calls=False,
    results="dropped",
)

_MISTRAL_V3 = Family(
    name="mistral_v3",
    template="mistral_v3.jinja",
    kind="sentencepiece_bpe",
    added=tokens.MISTRAL_V3,
    eos="</s>",
    end_ids=("</s>",),
    bos="<s>",
    adds_bos=True,
    prefix="first",
    tool_then_user=False,
    alternates=True,
)

_LFM2 = Family(
    name="lfm2",
    template="lfm2_2_5.jinja",
    kind="byte_level",
    added=tokens.LFM2,
    eos="<|im_end|>",
    end_ids=("<|im_end|>",),
    bos="<|startoftext|>",
    pad="<|pad|>",
    adds_bos=True,
    split=LLAMA3,
)

_NEMOTRON = Family(
    name="nemotron_3_nano",
    template="nemotron_3_nano.jinja",
    kind="tiktoken",
    added=tokens.NEMOTRON_3,
    eos="<|im_end|>",
    end_ids=("</s>", "<|im_end|>"),
    bos="<s>",
    pad="<|im_end|>",
    split=O200K,
    thinking=True,
)

_COHERE2 = Family(
    name="cohere2",
    template="cohere2.jinja",
    kind="byte_level",
    added=tokens.COHERE2,
    eos="<|END_OF_TURN_TOKEN|>",
    end_ids=("<|END_OF_TURN_TOKEN|>",),
    bos="<BOS_TOKEN>",
    pad="<PAD>",
    adds_bos=True,
    split=GPT2,
    nfc=True,
    tools=False,
    calls=False,
    results="dropped",
    alternates=True,
)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _QWEN2_5,
        _QWEN3,
        replace(
            _QWEN3,
            name="qwen3_instruct_2507",
            template="qwen3_instruct_2507.jinja",
            thinking=None,
        ),
        _QWEN3_5,
        replace(_QWEN3_5, name="qwen3_5_nothink", template="qwen3_5_nothink.jinja", thinking=False),
        _LLAMA3,
        _LLAMA3_1,
        replace(_LLAMA3_1, name="llama3_2", template="llama3_2.jinja", dated=True),
        _GLM4MOE,
        _GEMMA3,
        replace(_GEMMA3, name="gemma3_unigram", kind="unigram", owned=True),
        _GEMMA4,
        _GPTOSS,
        _DEEPSEEKV3,
        _DEEPSEEK_R1_DISTILL,
        _PHI3,
        replace(_PHI3, name="phi3_5", template="phi3_5.jinja"),
        _CHATML,
        replace(_CHATML, name="bpe_owning", split=(), owned=True),
        _MISTRAL_V3,
        replace(_MISTRAL_V3, name="mistral_v3_legacy", prefix="legacy"),
        _LFM2,
        _NEMOTRON,
        _COHERE2,
    )
}
