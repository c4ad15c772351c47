"""Inference engines.

`base` has the protocols, `local` runs transformers in this process, `remote` uses SGLang and vLLM
servers, and `scripted` is a sampler for tests.
"""
