"""Run what users of other projects bring, unchanged."""
