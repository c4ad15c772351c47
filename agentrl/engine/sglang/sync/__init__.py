"""How the policy goes to a server: one `Sender` per way.

`disk` writes safetensors, `ipc` hands over GPU memory, `nccl` broadcasts from GPU to GPU, `adapter`
sends LoRA alone.
"""
