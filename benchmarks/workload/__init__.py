"""Multi-turn tool conversations to measure loops on, and the leanest loop to measure them against.

- `tokenizer`: byte-level BPE of 48k with Qwen's pieces, trained on first use.
- `conversations`: what an engine that answers at once says, and what the tools answer.
- `floor`: a hand-written loop over them, plain and with a pre-token cache.
- `rows`: finished trajectories of such conversations, to measure learners on.
- `packed`, `trl_step`: an update of them by hand, and TRL's.
- `updates`: timing them on a GPU or a CPU.
- `timing`: CPU time, stalls of the event loop, one JSON object a line.
"""
