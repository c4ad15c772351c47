"""The added tokens of the families' tokenizers: (special, not special).

Of the reserved and unused tokens, only a few are listed.
"""

from __future__ import annotations

Added = tuple[tuple[str, ...], tuple[str, ...]]


def _tokens(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_QWEN_SEES = _tokens(
    "<|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> "
    "<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
)
_CALL = _tokens("<tool_call> </tool_call>")
_RESPONSE = _tokens("<tool_response> </tool_response>")
_THINK = _tokens("<think> </think>")

CHATML: Added = (_tokens("<|endoftext|> <|im_start|> <|im_end|>"), (*_CALL, *_RESPONSE))

QWEN2_5: Added = (
    (*CHATML[0], *_QWEN_SEES),
    (
        *_CALL,
        *_tokens("<|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|>"),
        *_tokens("<|repo_name|> <|file_sep|>"),
    ),
)
QWEN3: Added = (QWEN2_5[0], (*QWEN2_5[1], *_RESPONSE, *_THINK))
QWEN3_5: Added = (
    (
        *QWEN3[0],
        *_tokens("<|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod>"),
        *_tokens("<tts_text_bos_single> <|audio_pad|>"),
    ),
    QWEN3[1],
)

LLAMA3: Added = (
    _tokens(
        "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> "
        "<|reserved_special_token_1|> <|reserved_special_token_2|> <|reserved_special_token_3|> "
        "<|start_header_id|> <|end_header_id|> <|reserved_special_token_4|> <|eot_id|> "
        "<|reserved_special_token_5|>"
    ),
    (),
)
LLAMA3_1: Added = (
    _tokens(
        "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> "
        "<|reserved_special_token_1|> <|finetune_right_pad_id|> <|reserved_special_token_2|> "
        "<|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|> "
        "<|reserved_special_token_3|>"
    ),
    (),
)

GLM4: Added = (
    _tokens(
        "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> "
        "<|observation|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> "
        "<|begin_of_audio|> <|end_of_audio|> <|begin_of_transcription|> "
        "<|end_of_transcription|> <|code_prefix|> <|code_middle|> <|code_suffix|> /nothink"
    ),
    (*_THINK, *_CALL, *_RESPONSE, *_tokens("<arg_key> </arg_key> <arg_value> </arg_value>")),
)

# Gemma's runs of white space and tags of HTML are added tokens too.
_GEMMA_TEXT = ("[multimodal]", "<unused0>", "\n\n", "\n\n\n", "▁▁", "<table>", "</table>", "<td>")
_GEMMA = _tokens("<pad> <eos> <bos> <unk> <mask>")
GEMMA3: Added = (
    (*_GEMMA, *_tokens("<start_of_turn> <end_of_turn> <start_of_image> <end_of_image>")),
    _GEMMA_TEXT,
)
GEMMA4: Added = (
    (
        *_GEMMA,
        *_tokens("<|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|>"),
        *_tokens('<|"|> <|think|> <|channel> <channel|> <|turn> <turn|> <|image> <|audio>'),
        *_tokens("<image|> <audio|> <|image|> <|audio|>"),
    ),
    _GEMMA_TEXT,
)

GPTOSS: Added = (
    _tokens(
        "<|startoftext|> <|endoftext|> <|reserved_200000|> <|reserved_200001|> <|return|> "
        "<|constrain|> <|reserved_200004|> <|channel|> <|start|> <|end|> <|message|> "
        "<|reserved_200009|> <|call|> <|endofprompt|>"
    ),
    (),
)

# The tokens of the roles are not special in DeepSeek's.
DEEPSEEK3: Added = (
    _tokens(
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜> <｜place▁holder▁no▁0｜> <|EOT|>"
    ),
    (
        *_THINK,
        *_tokens("<｜fim▁hole｜> <｜fim▁begin｜> <｜fim▁end｜> <｜User｜> <｜Assistant｜>"),
        *_tokens("<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>"),
        *_tokens("<｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜>"),
        *_tokens("<｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜>"),
    ),
)
DEEPSEEK_R1_DISTILL: Added = (
    (*_tokens("<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜>"), *_QWEN_SEES[4:]),
    (*_tokens("<｜User｜> <｜Assistant｜> <|EOT|>"), *_THINK, *QWEN2_5[1]),
)

_PHI3_RSTRIP = _tokens(
    "<|assistant|> <|placeholder1|> <|placeholder2|> <|placeholder3|> <|placeholder4|> "
    "<|system|> <|end|> <|placeholder5|> <|placeholder6|> <|user|>"
)
PHI3: Added = ((*_tokens("<unk> <s> <|endoftext|>"), *_PHI3_RSTRIP), ("</s>",))
# These take the white space after them with them.
PHI3_RSTRIP = ("</s>", *_PHI3_RSTRIP)

MISTRAL_V3: Added = (
    _tokens(
        "<unk> <s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] "
        "[TOOL_RESULTS] [/TOOL_RESULTS] [control_8]"
    ),
    (),
)

LFM2: Added = (
    (
        *_tokens("<|pad|> <|startoftext|> <|endoftext|> <|fim_pre|> <|fim_mid|> <|fim_suf|>"),
        *_tokens("<|im_start|> <|im_end|> <|tool_list_start|> <|tool_list_end|>"),
        *_tokens("<|tool_call_start|> <|tool_call_end|> <|tool_response_start|>"),
        *_tokens("<|tool_response_end|>"),
        *_THINK,
    ),
    (),
)

NEMOTRON_3: Added = (
    _tokens("<unk> <s> </s> [INST] [/INST] <|im_start|> <|im_end|> <SPECIAL_18>"),
    (*_THINK, *_CALL, *_RESPONSE),
)

COHERE2: Added = (
    _tokens(
        "<PAD> <UNK> <CLS> <SEP> <MASK_TOKEN> <BOS_TOKEN> <EOS_TOKEN> <EOP_TOKEN> "
        "<|END_OF_TURN_TOKEN|>"
    ),
    _tokens(
        "<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> "
        "<|START_RESPONSE|> <|END_RESPONSE|>"
    ),
)
