"""Who samples tokens: `base` the contract, `local` transformers here, `scripted` for tests."""
