"""benchmarks/models.md has what the trainer and the local engine say of tiny models."""

from __future__ import annotations

import pytest
from support.models_page import PAGE, with_tables


@pytest.mark.slow
def test_the_tables_of_models_are_up_to_date():
    page = PAGE.read_text("utf-8")
    assert with_tables(page) == page, "make models"
