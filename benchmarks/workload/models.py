"""Random models of Qwen2.5's shapes, saved once, optionally with turns of a fixed length.

A model with random weights does not end its turns, and a turn that is cut at its limit ends an
episode. So in a model with `turn` set, every turn has that many tokens, and the last one ends the
turn. Each token belongs to a position in the turn. Some dimensions of the hidden state, which no
layer writes to, hold the position of the last token, and the output layer reads them. Everything
else is random, and the cost is that of any model of this shape.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config

from agentrl.testing.tokenizer import byte_tokenizer

SHAPES = {  # hidden, MLP, layers, heads, KV heads, vocabulary, tied
    "small": (128, 256, 2, 4, 2, 512, True),
    "tiny": (256, 768, 4, 4, 2, 8192, True),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}
MARK = 16.0
"""The entry of an embedding for the position of a token; other entries are about 0.02."""
SURE = 30.0
"""The difference in nats between tokens of the next position and all others."""


def random_model(folder: Path, shape: str, *, device: str, turn: int = 0) -> Path:
    """Return the folder of a model within `folder`, and create the model if it does not exist.

    Args:
        folder: the folder of these models.
        shape: a key of `SHAPES`.
        device: the device on which the weights are drawn.
        turn: the number of tokens of each turn; 0 for no fixed length.
    """
    path = folder / (f"{shape}-turns-of-{turn}" if turn else shape)
    if path.is_dir():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        model = draw(shape, device=device, tied=not turn)
        if turn:
            fix_turn_length(model, byte_tokenizer(), turn)
        model.save_pretrained(made)
        byte_tokenizer().save_pretrained(made)
        Path(made).rename(path)
        Path(made).mkdir()  # for the context manager to remove
    return path


def draw(shape: str, *, device: str, tied: bool = True) -> PreTrainedModel:
    """Return a random model of a shape in bfloat16, or in float32 on a CPU."""
    hidden, mlp, layers, heads, kv_heads, vocabulary, ties = SHAPES[shape]
    tokenizer: Any = byte_tokenizer()
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=ties and tied,
        initializer_range=0.08 if shape == "small" else 0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return draw_weights(config, device)


def draw_weights(config: PretrainedConfig, device: str) -> PreTrainedModel:
    """Return a random model with a config in bfloat16, or in float32 on a CPU."""
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@torch.no_grad()
def fix_turn_length(model: PreTrainedModel, tokenizer: Any, turn: int) -> None:
    """Give every turn of an untied model `turn` tokens (see the module).

    A turn begins after the line break after `assistant`, which is position 0.
    """
    added = set(tokenizer.get_added_vocab().values())
    [line_end] = tokenizer.encode("\n", add_special_tokens=False)
    plain = [i for i in range(len(tokenizer)) if i not in added and i != line_end]
    positions = {token: 1 + k % (turn - 1) for k, token in enumerate(plain)} | {line_end: 0}
    inner: Any = model.get_decoder()
    embedding = inner.embed_tokens.weight
    embedding[:, :turn] = 0
    for token, position in positions.items():
        embedding[token, position] = MARK
    for layer in inner.layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight[:turn] = 0
    ids = torch.tensor([plain[: turn - 1]], device=embedding.device)
    hidden = inner(input_ids=ids, use_cache=False).last_hidden_state[0].float()
    seen = min(hidden[k, positions[token]].item() for k, token in enumerate(plain[: turn - 1]))
    head: Any = model.get_output_embeddings()
    head.weight[:, :turn] = 0
    for token, position in [*positions.items(), (tokenizer.eos_token_id, turn)]:
        if position:
            head.weight[token, position - 1] = SURE / seen
